// The torch ops in `paceline_cpu` (`start`, `linear`, `embed`, `head`, `greedy`, `argmax`, `attention`) and the classes `Weight` and `Layers`.
#include <torch/library.h>

#include <cstring>

#include "layers_class.h"

namespace paceline {
namespace {

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

// The kernels' name and the number of threads.
std::tuple<std::string, int64_t> running() { return {started().kernels->name, started().team->size()}; }

// x · wᵀ + bias for x [T, k].
at::Tensor linear(const at::Tensor& x, const WeightPtr& weight) {
  Machine& m = started();
  std::lock_guard<std::mutex> lock(m.one_at_a_time);
  const Matrix& w = weight->matrix;
  TORCH_CHECK(x.dim() == 2 && x.size(1) == w.k, "[T, ", w.k, "] expected");
  at::Tensor out = at::empty({x.size(0), w.n}, x.options());
  m.product->run(w, {floats(x), w.k}, static_cast<int>(x.size(0)), out.mutable_data_ptr<float>(), w.n);
  return out;
}

// The weights of the outputs `ids` [T], [T, k]: rows of a table of embeddings.
at::Tensor embed(const at::Tensor& ids, const WeightPtr& weight) {
  Machine& m = started();
  std::lock_guard<std::mutex> lock(m.one_at_a_time);
  const Matrix& w = weight->matrix;
  const int n = static_cast<int>(ids.numel());
  at::Tensor out = at::empty({n, w.k}, at::kFloat);
  const int64_t* id = ids.const_data_ptr<int64_t>();
  float* to = out.mutable_data_ptr<float>();
  for (int i = 0; i < n; ++i) TORCH_CHECK_INDEX(id[i] >= 0 && id[i] < w.n, "id ", id[i], " is outside the table of ", w.n);
  m.team->each(n, [&](int row, int) { unpack_row(w, static_cast<int>(id[row]), to + static_cast<int64_t>(row) * w.k); });
  return out;
}

// The product of the RMSNorm of the rows `rows` [n] of hidden states [T, k] with the head's weight, into `out` [n, V].
void head_product(Machine& m, const at::Tensor& hidden, const at::Tensor& rows, const at::Tensor& norm, double eps, const Matrix& w, float* out) {
  const int64_t n = rows.numel(), *row = rows.const_data_ptr<int64_t>();
  TORCH_CHECK(hidden.dim() == 2 && hidden.size(1) == w.k && norm.numel() == w.k, "hidden states [T, ", w.k, "] expected");
  const float* x = floats(hidden);
  float* picked = m.picked_room.take<float>(n * w.k);
  for (int64_t i = 0; i < n; ++i) {
    TORCH_CHECK_INDEX(row[i] >= 0 && row[i] < hidden.size(0), "row ", row[i], " of ", hidden.size(0));
    std::memcpy(picked + i * w.k, x + row[i] * w.k, w.k * sizeof(float));
  }
  m.product->run(w, {picked, w.k, floats(norm), static_cast<float>(eps)}, static_cast<int>(n), out, w.n);
}

// Logits [n, V] of rows of hidden states: see `head_product`.
at::Tensor head(const at::Tensor& hidden, const at::Tensor& rows, const at::Tensor& norm, double eps, const WeightPtr& weight) {
  Machine& m = started();
  std::lock_guard<std::mutex> lock(m.one_at_a_time);
  at::Tensor out = at::empty({rows.numel(), weight->matrix.n}, hidden.options());
  head_product(m, hidden, rows, norm, eps, weight->matrix, out.mutable_data_ptr<float>());
  return out;
}

// The index of the first of the largest of each row of x [n, wide], into `to`.
void largest_of(Machine& m, const float* x, int64_t n, int64_t wide, int64_t* to) {
  m.team->each(static_cast<int>(n), [&](int row, int) { to[row] = m.kernels->largest(x + row * wide, static_cast<int>(wide)); });
}

// The tokens that `head`'s logits are largest for. The logits lie in memory that is kept: 3 MB of fresh pages in every step
// of 16 sequences took 2 ms of 40.
std::vector<int64_t> greedy(const at::Tensor& hidden, const at::Tensor& rows, const at::Tensor& norm, double eps, const WeightPtr& weight) {
  Machine& m = started();
  std::lock_guard<std::mutex> lock(m.one_at_a_time);
  const Matrix& w = weight->matrix;
  std::vector<int64_t> tokens(rows.numel());
  float* logits = m.logits_room.take<float>(rows.numel() * w.n);
  head_product(m, hidden, rows, norm, eps, w, logits);
  largest_of(m, logits, rows.numel(), w.n, tokens.data());
  return tokens;
}

// The index of the first of the largest of each row of x [n, V].
at::Tensor argmax(const at::Tensor& x) {
  Machine& m = started();
  std::lock_guard<std::mutex> lock(m.one_at_a_time);
  TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "[n, V] expected");
  at::Tensor out = at::empty({x.size(0)}, at::kLong);
  largest_of(m, floats(x), x.size(0), x.size(1), out.mutable_data_ptr<int64_t>());
  return out;
}

// Attention of rotated queries [T, H, D], by itself: [T, H · D]. `soft_cap` and `window` 0: none.
at::Tensor attention(const at::Tensor& queries, at::Tensor cache, const at::Tensor& spans, const at::Tensor& tables, double scale,
                     double soft_cap, int64_t window) {
  Machine& m = started();
  std::lock_guard<std::mutex> lock(m.one_at_a_time);
  const int64_t rows = queries.size(0), heads = queries.size(1), size = queries.size(2);
  at::Tensor out = at::empty({rows, heads * size}, queries.options());
  const Attention all{cache_of(cache), floats(queries), heads * size, out.mutable_data_ptr<float>(), static_cast<int>(heads),
                      static_cast<float>(scale), static_cast<float>(soft_cap), static_cast<int>(window)};
  attend_all(*m.kernels, *m.team, all, spans_of(spans, tables, rows), m.attention_room);
  return out;
}

TORCH_LIBRARY(paceline_cpu, library) {
  library.class_<Weight>("Weight").def(torch::init<int64_t, at::Tensor, int64_t, int64_t, std::optional<at::Tensor>, std::optional<at::Tensor>, std::optional<at::Tensor>, std::optional<at::Tensor>>());
  library.class_<Layers>("Layers")
      .def(torch::init<std::vector<int64_t>, std::vector<double>>())
      .def("add", &Layers::add)
      .def("add_rope", &Layers::add_rope)
      .def("run", &Layers::run);
  library.def("start", &start);
  library.def("running", &running);
  library.def("linear", &linear);
  library.def("embed", &embed);
  library.def("head", &head);
  library.def("greedy", &greedy);
  library.def("argmax", &argmax);
  library.def("attention", &attention);
}

}  // namespace
}  // namespace paceline
