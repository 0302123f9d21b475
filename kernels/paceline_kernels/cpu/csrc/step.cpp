#include "step.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace paceline {
namespace {

// Rows of a block of a product: their quantised bytes (2 · 256 · 576) stay in the second-level cache over all panels.
constexpr int kBlockRows = 256;
// Fewer rows leave most of a tile empty.
constexpr int kSplitRows = 8;
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

Product::Way Product::way(const Matrix& w, int m) const {
  if (w.integer()) return Way::integer;
  if (w.grouped() && m <= kernels_.grouped_rows) return Way::grouped;
  const bool splits = kernels_.gemm_split != nullptr && w.kind != Kind::f32 && w.k % kGroup == 0;
  return splits && m >= kSplitRows ? Way::split : Way::whole;
}

Activations Product::prepared(Way way, const Matrix& w, const float* x, int64_t ldx, int m) {
  if (way == Way::whole) return {};
  const int wide = w.integer() ? w.kp : w.k, bytes = way == Way::split ? 2 : 1;
  const int64_t rows = static_cast<int64_t>(ceil_div(m, 2 * kTileRows)) * 2 * kTileRows, groups = way == Way::grouped ? w.k / kGroup : 1;
  const Activations to{whole_.take<int16_t>(rows * wide), low_.take<uint8_t>(bytes * rows * wide), high_.take<uint8_t>(bytes * rows * wide),
                       scale_.take<float>(m * groups), sum_.take<float>(m * groups), zero_.take<int32_t>(m * groups)};
  const auto prepare = way == Way::integer ? kernels_.quantise : way == Way::grouped ? kernels_.quantise_groups : kernels_.split;
  team_.each(ceil_div(m, kRowsPerTask), [&](int task, int) {
    for (int row = task * kRowsPerTask; row < std::min(m, (task + 1) * kRowsPerTask); ++row) prepare(w, x + row * ldx, row, to);
  });
  return to;
}

void Product::run(const Matrix& w, const float* x, int64_t ldx, int m, float* out, int64_t ldo) {
  const Way way = this->way(w, m);
  const Activations rows = prepared(way, w, x, ldx, m);
  const bool narrow = way == Way::integer || way == Way::grouped;
  const int panels = narrow ? w.panels() : w.float_panels(), blocks = ceil_div(m, kBlockRows);
  int each = std::max(1, ceil_div(panels * blocks, team_.size() * kShares));
  if (narrow) each += each % 2;  // two panels share a tile of rows
  const int pieces = ceil_div(panels, std::min(each, panels));
  const int64_t room = gemm_scratch(w.k);
  float* scratch = narrow || w.kind == Kind::f32 ? nullptr : scratch_.take<float>(room * team_.size());
  team_.each(blocks * pieces, [&](int task, int worker) {
    const int row = task / pieces * kBlockRows, count = std::min(kBlockRows, m - row);
    const int first = task % pieces * each, last = std::min(panels, first + each);
    float* own = scratch + worker * room;
    switch (way) {
      case Way::whole: return kernels_.gemm(w, x + row * ldx, ldx, count, first, last, out + row * ldo, ldo, own);
      case Way::integer: return kernels_.gemm_int(w, rows, row, count, first, last, out, ldo);
      case Way::grouped: return kernels_.gemm_grouped(w, rows, row, count, first, last, out, ldo);
      case Way::split: return kernels_.gemm_split(w, rows, row, count, first, last, out, ldo, own);
    }
  });
}

void attend_all(const Kernels& kernels, Team& team, const Attention& attention, const std::vector<Span>& spans, Room& room) {
  const int kv_heads = attention.cache.kv_heads;
  std::vector<Span> pieces;
  for (const Span& span : spans)
    for (int token = 0; token < span.rows; token += kTokensPerTask)
      pieces.push_back({span.blocks, span.first + token, span.start + token, std::min(kTokensPerTask, span.rows - token)});
  // the longest first, so that none is left over at the end
  std::stable_sort(pieces.begin(), pieces.end(), [](const Span& a, const Span& b) { return a.rows * (a.start + a.rows) > b.rows * (b.start + b.rows); });
  const int64_t scratch = kernels.attention_scratch(attention.heads, kv_heads, attention.cache.head_dim);
  float* all = room.take<float>(team.size() * scratch);
  team.each(static_cast<int>(pieces.size()) * kv_heads, [&](int task, int worker) {
    kernels.attend(attention, pieces[task / kv_heads], task % kv_heads, all + worker * scratch);
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
  attend_all(kernels_, team_, attention, input.spans, scratch_room_);
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
