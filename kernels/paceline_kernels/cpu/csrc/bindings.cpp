// The torch ops: `paceline_cpu::linear` and the classes `Weight` and `Layers`.
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
  return found->name;
}

const Machine& started() {
  TORCH_CHECK(machine().kernels != nullptr, "start() comes before the first product");
  return machine();
}

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
    case at::kChar: return Kind::int8;
    default: TORCH_CHECK(false, "float32, bfloat16, float16 or int8 expected");
  }
}

// A packed weight; keeps its tensors alive.
struct Weight : torch::CustomClassHolder {
  Weight(at::Tensor data, int64_t n, int64_t k, std::optional<at::Tensor> scales, std::optional<at::Tensor> sums,
         std::optional<at::Tensor> bias)
      : data_(std::move(data)), scales_(std::move(scales)), sums_(std::move(sums)), bias_(std::move(bias)) {
    TORCH_CHECK(data_.is_contiguous(), "packed data is contiguous");
    matrix.kind = kind_of(data_);
    matrix.n = static_cast<int>(n);
    matrix.k = static_cast<int>(k);
    matrix.kp = static_cast<int>(data_.numel() / (matrix.panels() * matrix.panel()));
    matrix.data = data_.const_data_ptr();
    matrix.scales = floats(scales_);
    matrix.sums = sums_.has_value() ? sums_->const_data_ptr<int32_t>() : nullptr;
    matrix.bias = floats(bias_);
  }
  Matrix matrix;

 private:
  at::Tensor data_;
  std::optional<at::Tensor> scales_, sums_, bias_;
};

using WeightPtr = c10::intrusive_ptr<Weight>;

at::Tensor linear(const at::Tensor& x, const WeightPtr& weight) {
  const Machine& m = started();
  std::lock_guard<std::mutex> lock(machine().one_at_a_time);
  const Matrix& w = weight->matrix;
  TORCH_CHECK(x.dim() == 2 && x.size(1) == w.k, "[T, ", w.k, "] expected");
  at::Tensor out = at::empty({x.size(0), w.n}, x.options());
  Product(*m.kernels, *m.team).run(w, floats(x), w.k, static_cast<int>(x.size(0)), out.mutable_data_ptr<float>(), w.n);
  return out;
}

// A decoder's layers. `numbers` are hidden, heads, kv_heads, head_dim, wide, gelu; `reals` eps, scale, soft_cap (0: none).
struct Layers : torch::CustomClassHolder {
  Layers(std::vector<int64_t> numbers, std::vector<double> reals) {
    TORCH_CHECK(numbers.size() == 6 && reals.size() == 3, "six numbers and three reals expected");
    int* fields[] = {&shape_.hidden, &shape_.heads, &shape_.kv_heads, &shape_.head_dim, &shape_.wide};
    for (int i = 0; i < 5; ++i) *fields[i] = static_cast<int>(numbers[i]);
    shape_.gelu = numbers[5] != 0;
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
    const int32_t *rows = spans.const_data_ptr<int32_t>(), *blocks = tables.const_data_ptr<int32_t>();
    int first = 0;
    for (int64_t i = 0; i < spans.size(0); ++i, rows += 3) {
      input.spans.push_back({blocks + rows[2], first, rows[0], rows[1]});
      first += rows[1];
    }
    TORCH_CHECK(first == input.rows, "the spans have ", first, " rows, the step ", input.rows);
    for (auto& c : caches) input.caches.push_back(cache(c));
    Steps& steps = stepper(m);
    steps.run(layers_, input);
  }

 private:
  Cache cache(at::Tensor& t) const {
    TORCH_CHECK(t.is_contiguous() && t.dim() == 5 && t.size(3) == shape_.kv_heads && t.size(4) == shape_.head_dim, "a cache [B, S, 2, K, D] expected");
    return {static_cast<char*>(t.mutable_data_ptr()), kind_of(t), static_cast<int>(t.size(1)), shape_.kv_heads, shape_.head_dim};
  }

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
  library.class_<Weight>("Weight").def(torch::init<at::Tensor, int64_t, int64_t, std::optional<at::Tensor>, std::optional<at::Tensor>, std::optional<at::Tensor>>());
  library.class_<Layers>("Layers")
      .def(torch::init<std::vector<int64_t>, std::vector<double>>())
      .def("add", &Layers::add)
      .def("run", &Layers::run);
  library.def("start", &start);
  library.def("linear", &linear);
}

}  // namespace
}  // namespace paceline
