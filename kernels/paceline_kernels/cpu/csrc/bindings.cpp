// The torch ops in `paceline_cpu` (`start`, `linear`, `embed`, `head`, `argmax`, `attention`) and the classes `Weight` and `Layers`.
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <string>

#include "step.h"

namespace paceline {
namespace {

struct Machine {
  const Kernels* kernels = nullptr;
  std::unique_ptr<Team> team;
  std::unique_ptr<Product> product;
  std::unique_ptr<Room> attention_room = std::make_unique<Room>();
  std::mutex one_at_a_time;  // steps and products of several threads share the team
};

Machine& machine() {
  static auto* it = new Machine;  // never freed: helpers may run until the process ends
  return *it;
}

// Choose the kernels (`auto`, or one by name) and the number of threads; returns the kernels' name.
std::string start(const std::string& name, int64_t threads) {
  Machine& m = machine();
  std::lock_guard<std::mutex> lock(m.one_at_a_time);
  const Kernels* found = find_kernels(name.c_str());
  TORCH_CHECK(found != nullptr, "this CPU can't run the kernels ", name);
  if (!m.team || m.team->size() != threads) m.team = std::make_unique<Team>(static_cast<int>(threads));
  m.kernels = found;
  m.product = std::make_unique<Product>(*found, *m.team);
  return found->name;
}

const Machine& started() {
  TORCH_CHECK(machine().kernels != nullptr, "start() comes before the first product");
  return machine();
}

// The kernels' name and the number of threads.
std::tuple<std::string, int64_t> running() { return {started().kernels->name, started().team->size()}; }

const float* floats(const at::Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous(), "float32 and contiguous expected");
  return x.const_data_ptr<float>();
}

const float* floats(const std::optional<at::Tensor>& x) { return x.has_value() ? floats(*x) : nullptr; }

Kind kind_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return Kind::f32;
    case at::kBFloat16: return Kind::bf16;
    case at::kHalf: return Kind::f16;
    default: TORCH_CHECK(false, "float32, bfloat16 or float16 expected");
  }
}

// A packed weight; keeps its tensors alive. `kind` is a number of `Kind`; see `Matrix` for `scales` and `sums`, and `groups`.
struct Weight : torch::CustomClassHolder {
  Weight(int64_t kind, at::Tensor data, int64_t n, int64_t k, std::optional<at::Tensor> scales, std::optional<at::Tensor> sums,
         std::optional<at::Tensor> groups, std::optional<at::Tensor> bias)
      : data_(std::move(data)), scales_(std::move(scales)), sums_(std::move(sums)), groups_(std::move(groups)), bias_(std::move(bias)) {
    TORCH_CHECK(data_.is_contiguous(), "packed data is contiguous");
    matrix.kind = static_cast<Kind>(kind);
    matrix.n = static_cast<int>(n);
    matrix.k = static_cast<int>(k);
    matrix.kp = matrix.grouped() ? matrix.k : static_cast<int>(data_.numel() / (matrix.panels() * matrix.panel()));
    TORCH_CHECK(!matrix.grouped() || (matrix.k % kGroup == 0 && groups_.has_value()), "weights in groups have whole groups");
    matrix.data = data_.const_data_ptr();
    matrix.scales = floats(scales_);
    matrix.sums = sums_.has_value() ? sums_->const_data_ptr<int32_t>() : nullptr;
    matrix.groups = groups_.has_value() ? reinterpret_cast<const uint16_t*>(groups_->const_data_ptr<at::Half>()) : nullptr;
    matrix.bias = floats(bias_);
  }
  Matrix matrix;

 private:
  at::Tensor data_;
  std::optional<at::Tensor> scales_, sums_, groups_, bias_;
};

using WeightPtr = c10::intrusive_ptr<Weight>;

// x · wᵀ + bias for x [T, k].
at::Tensor linear(const at::Tensor& x, const WeightPtr& weight) {
  const Machine& m = started();
  std::lock_guard<std::mutex> lock(machine().one_at_a_time);
  const Matrix& w = weight->matrix;
  TORCH_CHECK(x.dim() == 2 && x.size(1) == w.k, "[T, ", w.k, "] expected");
  at::Tensor out = at::empty({x.size(0), w.n}, x.options());
  m.product->run(w, {floats(x), w.k}, static_cast<int>(x.size(0)), out.mutable_data_ptr<float>(), w.n);
  return out;
}

// The weights of the outputs `ids` [T], [T, k]: rows of a table of embeddings.
at::Tensor embed(const at::Tensor& ids, const WeightPtr& weight) {
  const Matrix& w = weight->matrix;
  at::Tensor out = at::empty({ids.numel(), w.k}, at::kFloat);
  const int64_t* id = ids.const_data_ptr<int64_t>();
  float* to = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < ids.numel(); ++i, to += w.k) {
    TORCH_CHECK_INDEX(id[i] >= 0 && id[i] < w.n, "id ", id[i], " is outside the table of ", w.n);
    unpack_row(w, static_cast<int>(id[i]), to);
  }
  return out;
}

// The RMSNorm of the rows `rows` [n] of hidden states [T, k], times the head's weight: logits [n, V].
at::Tensor head(const at::Tensor& hidden, const at::Tensor& rows, const at::Tensor& norm, double eps, const WeightPtr& weight) {
  const Machine& m = started();
  std::lock_guard<std::mutex> lock(machine().one_at_a_time);
  const Matrix& w = weight->matrix;
  const int64_t n = rows.numel(), *row = rows.const_data_ptr<int64_t>();
  TORCH_CHECK(hidden.dim() == 2 && hidden.size(1) == w.k && norm.numel() == w.k, "hidden states [T, ", w.k, "] expected");
  at::Tensor normed = at::empty({n, w.k}, hidden.options()), out = at::empty({n, w.n}, hidden.options());
  const float *x = floats(hidden), *scale = floats(norm);
  float* to = normed.mutable_data_ptr<float>();
  for (int64_t i = 0; i < n; ++i) m.kernels->rms_norm(x + row[i] * w.k, scale, w.k, static_cast<float>(eps), to + i * w.k);
  m.product->run(w, {to, w.k}, static_cast<int>(n), out.mutable_data_ptr<float>(), w.n);
  return out;
}

// The index of the first of the largest of each row of x [n, V].
at::Tensor argmax(const at::Tensor& x) {
  const Machine& m = started();
  std::lock_guard<std::mutex> lock(machine().one_at_a_time);
  TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "[n, V] expected");
  at::Tensor out = at::empty({x.size(0)}, at::kLong);
  const float* from = floats(x);
  int64_t *to = out.mutable_data_ptr<int64_t>(), wide = x.size(1);
  m.team->each(static_cast<int>(x.size(0)), [&](int row, int) { to[row] = m.kernels->largest(from + row * wide, static_cast<int>(wide)); });
  return out;
}

// A cache [B, S, 2, K, D].
Cache cache_of(at::Tensor& t) {
  TORCH_CHECK(t.is_contiguous() && t.dim() == 5 && t.size(2) == 2, "a contiguous cache [B, S, 2, K, D] expected");
  return {static_cast<char*>(t.mutable_data_ptr()), kind_of(t), static_cast<int>(t.size(1)), static_cast<int>(t.size(3)), static_cast<int>(t.size(4))};
}

// The sequences of a step: `spans` [n, 3] int32 are first position, rows, and where the blocks begin in `tables` int32.
std::vector<Span> spans_of(const at::Tensor& spans, const at::Tensor& tables, int64_t all) {
  const int32_t *rows = spans.const_data_ptr<int32_t>(), *blocks = tables.const_data_ptr<int32_t>();
  std::vector<Span> found;
  int first = 0;
  for (int64_t i = 0; i < spans.size(0); ++i, rows += 3) {
    found.push_back({blocks + rows[2], first, rows[0], rows[1]});
    first += rows[1];
  }
  TORCH_CHECK(first == all, "the spans have ", first, " rows, the step ", all);
  return found;
}

// Attention of rotated queries [T, H, D], by itself: [T, H · D]. `soft_cap` and `window` 0: none.
at::Tensor attention(const at::Tensor& queries, at::Tensor cache, const at::Tensor& spans, const at::Tensor& tables, double scale,
                     double soft_cap, int64_t window) {
  const Machine& m = started();
  std::lock_guard<std::mutex> lock(machine().one_at_a_time);
  const int64_t rows = queries.size(0), heads = queries.size(1), size = queries.size(2);
  at::Tensor out = at::empty({rows, heads * size}, queries.options());
  const Attention all{cache_of(cache), floats(queries), heads * size, out.mutable_data_ptr<float>(), static_cast<int>(heads),
                      static_cast<float>(scale), static_cast<float>(soft_cap), static_cast<int>(window)};
  attend_all(*m.kernels, *m.team, all, spans_of(spans, tables, rows), *m.attention_room);
  return out;
}

// A decoder's layers. `numbers` are hidden, heads, kv_heads, head_dim, wide, gelu; `reals` eps, scale, soft_cap (0: none).
struct Layers : torch::CustomClassHolder {
  Layers(std::vector<int64_t> numbers, std::vector<double> reals) {
    TORCH_CHECK(numbers.size() == 6 && reals.size() == 3, "six numbers and three reals expected");
    int* fields[] = {&shape_.hidden, &shape_.heads, &shape_.kv_heads, &shape_.head_dim, &shape_.wide};
    for (int i = 0; i < 5; ++i) *fields[i] = static_cast<int>(numbers[i]);
    shape_.gelu = numbers[5] != 0;
    TORCH_CHECK(shape_.heads / shape_.kv_heads <= 96, "at most 96 heads of queries share one of keys");
    shape_.eps = static_cast<float>(reals[0]);
    shape_.scale = static_cast<float>(reals[1]);
    shape_.soft_cap = static_cast<float>(reals[2]);
  }

  // `norms` are input, query, key, attention post, mlp, mlp post; `weights` qkv, output, gate_up, down.
  void add(std::vector<std::optional<at::Tensor>> norms, std::vector<WeightPtr> weights, int64_t rope, int64_t window) {
    TORCH_CHECK(norms.size() == 6 && weights.size() == 4, "six norms and four weights expected");
    Layer layer;
    const float** places[] = {&layer.input_norm, &layer.query_norm, &layer.key_norm, &layer.attention_post_norm, &layer.mlp_norm, &layer.mlp_post_norm};
    for (int i = 0; i < 6; ++i) *places[i] = floats(norms[i]);
    layer.qkv = weights[0]->matrix;
    layer.output = weights[1]->matrix;
    layer.gate_up = weights[2]->matrix;
    layer.down = weights[3]->matrix;
    layer.rope = static_cast<int>(rope);
    layer.window = static_cast<int>(window);
    layers_.push_back(layer);
    norms_.push_back(std::move(norms));
    weights_.push_back(std::move(weights));
  }

  // `spans` [n, 3] int32 are each sequence's first position, rows, and where its blocks begin in `tables` int32.
  void run(at::Tensor residual, std::vector<at::Tensor> cos, std::vector<at::Tensor> sin, const at::Tensor& slots,
           const at::Tensor& spans, const at::Tensor& tables, std::vector<at::Tensor> caches) {
    const Machine& m = started();
    std::lock_guard<std::mutex> lock(machine().one_at_a_time);
    TORCH_CHECK(caches.size() == layers_.size(), "a cache for each layer expected");
    StepInput input;
    input.rows = static_cast<int>(residual.size(0));
    floats(residual);
    input.residual = residual.mutable_data_ptr<float>();
    for (const auto& t : cos) input.cos.push_back(floats(t));
    for (const auto& t : sin) input.sin.push_back(floats(t));
    input.slots = slots.const_data_ptr<int64_t>();
    input.spans = spans_of(spans, tables, input.rows);
    for (auto& c : caches) {
      input.caches.push_back(cache_of(c));
      TORCH_CHECK(input.caches.back().kv_heads == shape_.kv_heads && input.caches.back().head_dim == shape_.head_dim, "another model's cache");
    }
    Steps& steps = stepper(m);
    steps.run(layers_, input);
  }

 private:
  Steps& stepper(const Machine& m) {
    if (!steps_ || kernels_ != m.kernels || team_ != m.team.get()) {
      steps_ = std::make_unique<Steps>(*m.kernels, *m.team, shape_);
      kernels_ = m.kernels;
      team_ = m.team.get();
    }
    return *steps_;
  }

  Shape shape_;
  std::vector<Layer> layers_;
  std::vector<std::vector<std::optional<at::Tensor>>> norms_;
  std::vector<std::vector<WeightPtr>> weights_;
  std::unique_ptr<Steps> steps_;
  const Kernels* kernels_ = nullptr;
  const Team* team_ = nullptr;
};

TORCH_LIBRARY(paceline_cpu, library) {
  library.class_<Weight>("Weight").def(torch::init<int64_t, at::Tensor, int64_t, int64_t, std::optional<at::Tensor>, std::optional<at::Tensor>, std::optional<at::Tensor>, std::optional<at::Tensor>>());
  library.class_<Layers>("Layers")
      .def(torch::init<std::vector<int64_t>, std::vector<double>>())
      .def("add", &Layers::add)
      .def("run", &Layers::run);
  library.def("start", &start);
  library.def("running", &running);
  library.def("linear", &linear);
  library.def("embed", &embed);
  library.def("head", &head);
  library.def("argmax", &argmax);
  library.def("attention", &attention);
}

}  // namespace
}  // namespace paceline
