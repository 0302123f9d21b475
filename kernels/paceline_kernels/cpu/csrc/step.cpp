#include "step.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace paceline {
namespace {

// Rows of a block of a product: their quantised bytes (2 · 256 · 576) stay in the second-level cache over all panels.
constexpr int kBlockRows = 256;
// Tasks per thread: enough that a thread which lost its core leaves little behind, few enough that sharing costs nothing.
constexpr int kShares = 6;
// Rows that one task norms, rotates or gates: some microseconds' work.
constexpr int kRowsPerTask = 4;
constexpr int kTokensPerTask = 32;  // of a prompt's attention: 96 rows of scores where three heads share a KV head

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

void* Room::take_bytes(int64_t bytes) {
  if (bytes > size_) {
    release();
    size_ = (bytes + bytes / 4 + 63) / 64 * 64;
    data_ = std::aligned_alloc(64, static_cast<size_t>(size_));
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_, 0, static_cast<size_t>(size_));
  }
  return data_;
}

void Room::release() {
  std::free(data_);
  data_ = nullptr;
  size_ = 0;
}

Activations Product::quantised(const Matrix& w, const float* x, int64_t ldx, int m) {
  const int64_t count = static_cast<int64_t>(ceil_div(m, kTileRows)) * kTileRows * w.kp;
  const Activations to{whole_.take<int16_t>(count), low_.take<uint8_t>(count), high_.take<uint8_t>(count), scale_.take<float>(m)};
  team_.each(ceil_div(m, kRowsPerTask), [&](int task, int) {
    for (int row = task * kRowsPerTask; row < std::min(m, (task + 1) * kRowsPerTask); ++row)
      kernels_.quantise(w, x + row * ldx, row, to);
  });
  return to;
}

void Product::run(const Matrix& w, const float* x, int64_t ldx, int m, float* out, int64_t ldo) {
  const Activations quantised = w.integer() ? this->quantised(w, x, ldx, m) : Activations{};
  const int panels = w.panels(), blocks = ceil_div(m, kBlockRows);
  int each = std::max(1, ceil_div(panels * blocks, team_.size() * kShares));
  if (w.integer()) each += each % 2;  // two panels share a tile of rows
  const int pieces = ceil_div(panels, std::min(each, panels));
  team_.each(blocks * pieces, [&](int task, int) {
    const int row = task / pieces * kBlockRows, count = std::min(kBlockRows, m - row);
    const int first = task % pieces * each, last = std::min(panels, first + each);
    if (w.integer()) kernels_.gemm_int(w, quantised, row, count, first, last, out, ldo);
    else kernels_.gemm(w, x + row * ldx, ldx, count, first, last, out + row * ldo, ldo);
  });
}

template <class Body>
void Steps::rows(int count, const Body& body) {
  team_.each(ceil_div(count, kRowsPerTask), [&](int task, int) {
    for (int row = task * kRowsPerTask; row < std::min(count, (task + 1) * kRowsPerTask); ++row) body(row);
  });
}

void Steps::run(const std::vector<Layer>& layers, const StepInput& input) {
  const Shape& s = shape_;
  const int64_t t = input.rows, qkv = (s.heads + 2 * s.kv_heads) * static_cast<int64_t>(s.head_dim);
  normed_ = normed_room_.take<float>(t * s.hidden);
  qkv_ = qkv_room_.take<float>(t * qkv);
  heads_ = heads_room_.take<float>(t * s.heads * s.head_dim);
  wide_ = wide_room_.take<float>(t * 2 * s.wide);
  scratch_ = scratch_room_.take<float>(team_.size() * kernels_.attention_scratch(s.heads, s.kv_heads, s.head_dim));
  for (size_t i = 0; i < layers.size(); ++i) {
    const Layer& layer = layers[i];
    const auto norm = [&](const float* weight) {
      rows(input.rows, [&, weight](int r) {
        kernels_.rms_norm(input.residual + r * static_cast<int64_t>(s.hidden), weight, s.hidden, s.eps, normed_ + r * static_cast<int64_t>(s.hidden));
      });
    };
    const auto add = [&](const float* post) {
      rows(input.rows, [&, post](int r) {
        float* x = normed_ + r * static_cast<int64_t>(s.hidden);
        if (post != nullptr) kernels_.rms_norm(x, post, s.hidden, s.eps, x);
        kernels_.add(input.residual + r * static_cast<int64_t>(s.hidden), x, s.hidden);
      });
    };
    norm(layer.input_norm);
    attention(layer, input, input.caches[i]);
    add(layer.attention_post_norm);
    norm(layer.mlp_norm);
    feed_forward(layer, input.rows);
    add(layer.mlp_post_norm);
  }
}

void Steps::attention(const Layer& layer, const StepInput& input, const Cache& cache) {
  const Shape& s = shape_;
  const int64_t stride = (s.heads + 2 * s.kv_heads) * static_cast<int64_t>(s.head_dim), all = static_cast<int64_t>(s.heads) * s.head_dim;
  product_.run(layer.qkv, normed_, s.hidden, input.rows, qkv_, stride);
  rows(input.rows, [&](int row) { rotate_and_store(layer, input, cache, row); });
  const Attention attention{cache, qkv_, stride, heads_, s.heads, s.scale, s.soft_cap, layer.window};
  std::vector<Span> pieces;
  for (const Span& span : input.spans)
    for (int token = 0; token < span.rows; token += kTokensPerTask)
      pieces.push_back({span.blocks, span.first + token, span.start + token, std::min(kTokensPerTask, span.rows - token)});
  const int64_t scratch = kernels_.attention_scratch(s.heads, s.kv_heads, s.head_dim);
  team_.each(static_cast<int>(pieces.size()) * s.kv_heads, [&](int task, int worker) {
    kernels_.attend(attention, pieces[task / s.kv_heads], task % s.kv_heads, scratch_ + worker * scratch);
  });
  product_.run(layer.output, heads_, all, input.rows, normed_, s.hidden);
}

void Steps::rotate_and_store(const Layer& layer, const StepInput& input, const Cache& cache, int row) {
  const Shape& s = shape_;
  const int d = s.head_dim;
  float* heads = qkv_ + row * static_cast<int64_t>(s.heads + 2 * s.kv_heads) * d;
  for (int h = 0; h < s.heads + s.kv_heads; ++h) {
    const float* norm = h < s.heads ? layer.query_norm : layer.key_norm;
    if (norm != nullptr) kernels_.rms_norm(heads + h * d, norm, d, s.eps, heads + h * d);
    kernels_.rotate(heads + h * d, input.cos[layer.rope] + static_cast<int64_t>(row) * d, input.sin[layer.rope] + static_cast<int64_t>(row) * d, d);
  }
  const int bytes = cache.kind == Kind::f32 ? 4 : 2;
  kernels_.store(heads + s.heads * d, cache.kind, cache.data + input.slots[row] * cache.row() * bytes, 2 * s.kv_heads * d);
}

void Steps::feed_forward(const Layer& layer, int count) {
  const Shape& s = shape_;
  const int64_t stride = 2LL * s.wide;
  product_.run(layer.gate_up, normed_, s.hidden, count, wide_, stride);
  const auto gate = s.gelu ? kernels_.gelu_mul : kernels_.silu_mul;
  rows(count, [&](int row) { gate(wide_ + row * stride, wide_ + row * stride + s.wide, s.wide, wide_ + row * stride); });
  product_.run(layer.down, wide_, stride, count, normed_, s.hidden);
}

}  // namespace paceline
