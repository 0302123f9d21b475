// A decode's attention: few rows of queries, so that it costs what reading the keys and values costs.
#pragma once

#include "float_gemm.h"

namespace paceline {
namespace {

constexpr int kKeys = 64;     // keys of a tile
constexpr int kFewRows = 16;  // rows for which laying out panels wouldn't pay
constexpr float kHidden = -1e30f, kSeen = -1e29f;

inline int wide(int n) { return (n + kFloatPanel - 1) / kFloatPanel * kFloatPanel; }

inline vf capped(vf score, float cap) { return score > kSeen ? tangent(score * (1 / cap)) * cap : score; }

// Keys of one KV head in the pool, one after another from `position` on; a key's value lies `apart` further.
template <class T>
class PoolRows {
 public:
  PoolRows(const Cache& cache, const int32_t* blocks, int kv_head, int position)
      : cache_(cache), block_(blocks + position / cache.block_size), slot_(position % cache.block_size), head_(kv_head * cache.head_dim) {}

  const T* next() {
    const T* row = reinterpret_cast<const T*>(cache_.data) + (static_cast<int64_t>(*block_) * cache_.block_size + slot_) * cache_.row() + head_;
    if (++slot_ == cache_.block_size) {
      slot_ = 0;
      ++block_;
    }
    return row;
  }
  int apart() const { return cache_.kv_heads * cache_.head_dim; }

 private:
  const Cache& cache_;
  const int32_t* block_;
  int slot_, head_;
};

// Copy n numbers in float32, and zeros up to the panel's width.
template <class T>
inline void copy_row(const T* from, int n, float* to) {
  int j = 0;
  for (; j + kLanes <= n; j += kLanes) save(to + j, load(from + j));
  for (; j < n; ++j) to[j] = value(from[j]);
  for (; j < wide(n); ++j) to[j] = 0;
}

template <class T>
inline void fetch(const T* row, int n) {
  for (int j = 0; j < n; j += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(row + j, 0, 2);
}

// What is read of a sequence: keys [begin, end) of one KV head and their values. `together`: one thread does all heads, one
// after another, and the first fetches all heads' keys and values.
struct Reading {
  const int32_t* blocks;
  int kv_head, begin, end;
  bool together;
};

// So many keys before they are read they are fetched, since no processor foresees where a block table leads.
constexpr int kKeysAhead = 32;

template <class T>
void copy_rows(const Cache& cache, const Reading& read, int first, int count, float* keys, float* values) {
  const int d = cache.head_dim, w = wide(d);
  const bool fetches = !read.together || read.kv_head == 0;
  int fetched = first == read.begin ? first : first + kKeysAhead;
  PoolRows<T> rows(cache, read.blocks, read.kv_head, first), later(cache, read.blocks, read.kv_head, fetched < read.end ? fetched : first);
  for (int i = 0; i < count; ++i) {
    for (; fetches && fetched < read.end && fetched <= first + i + kKeysAhead; ++fetched) {
      const T* soon = later.next();
      fetch(soon, read.together ? static_cast<int>(cache.row()) : d);
      if (!read.together) fetch(soon + later.apart(), d);
    }
    const T* row = rows.next();
    copy_row(row, d, keys + i * w);
    copy_row(row + rows.apart(), d, values + i * w);
  }
}

// Keys `first` and on, `count` of them, and their values, as [count][wide(d)] in float32.
void copy_tile(const Cache& cache, const Reading& read, int first, int count, float* keys, float* values) {
  const auto copy = cache.kind == Kind::f32 ? copy_rows<float> : cache.kind == Kind::bf16 ? copy_rows<bf16> : copy_rows<f16>;
  copy(cache, read, first, count, keys, values);
}

// Scores of a row of queries [d] with keys [count][w], some kLanes of them at a time.
void score_row(const float* query, const float* keys, int count, int d, int w, float* scores) {
  for (int i = 0; i < count; i += kLanes) {
    vf acc[kLanes] = {};
    const float* key = keys + i * w;  // rows beyond the last are scratch of the same tile: masked later
    for (int j = 0; j < d; j += kLanes) {
      const vf q = load(query + j);
#pragma GCC unroll 16
      for (int n = 0; n < kLanes; ++n) acc[n] += q * load(key + n * w + j);
    }
    save(scores + i, folded<plus>(acc));
  }
}

// Add to the sums of R rows the values [count][w] weighted by the scores [R][kKeys].
template <int R>
void add_values(const float* scores, const float* values, int count, int w, float* summed) {
  constexpr int kColumns = 2;  // vectors at once: R · 2 sums stay in registers, and their additions overlap
  for (int j = 0; j < w; j += kColumns * kLanes) {
    vf acc[R][kColumns];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kColumns; ++c) acc[r][c] = load(summed + r * w + j + c * kLanes);
    for (int i = 0; i < count; ++i) {
      vf v[kColumns];
      for (int c = 0; c < kColumns; ++c) v[c] = load(values + i * w + j + c * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < kColumns; ++c) acc[r][c] += v[c] * scores[r * kKeys + i];
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kColumns; ++c) save(summed + r * w + j + c * kLanes, acc[r][c]);
  }
}

void add_all_values(const float* scores, const float* values, int count, int w, int rows, float* summed) {
  for (; rows >= 4; rows -= 4, scores += 4 * kKeys, summed += 4 * w) add_values<4>(scores, values, count, w, summed);
  if (rows == 3) add_values<3>(scores, values, count, w, summed);
  if (rows == 2) add_values<2>(scores, values, count, w, summed);
  if (rows == 1) add_values<1>(scores, values, count, w, summed);
}

// Mask a row of scores to [from, to), turn it into weights, and scale what was summed before. `state` is maximum and sum.
void weigh_row(float* scores, int from, int to, float soft_cap, float* state, float* summed, int w) {
  for (int i = 0; i < kKeys; ++i)
    if (i < from || i >= to) scores[i] = kHidden;
  vf most = spread(state[0]);
  for (int i = 0; i < kKeys; i += kLanes) {
    if (soft_cap > 0) save(scores + i, capped(load(scores + i), soft_cap));
    most = larger(most, load(scores + i));
  }
  const float peak = highest(most);
  vf total{};
  for (int i = 0; i < kKeys; i += kLanes) {
    const vf s = load(scores + i);
    const vf e = s > kSeen ? exponential(s - peak) : vf{};
    save(scores + i, e);
    total += e;
  }
  const float factor = state[0] > kSeen ? std::exp(state[0] - peak) : 0.0f;
  state[1] = state[1] * factor + sum(total);
  state[0] = peak;
  if (factor == 1.0f) return;
  for (int j = 0; j < w; j += kLanes) save(summed + j, load(summed + j) * factor);
}

// All tokens of a span; its rows are kFewRows at most, and d is a multiple of the lanes.
void attend_few(const Attention& a, const Span& span, int kv_head, float* scratch) {
  const int d = a.cache.head_dim, w = wide(d), share = a.heads / a.cache.kv_heads, rows = span.rows * share;
  float *keys = scratch, *values = keys + kKeys * w, *queries = values + kKeys * w, *summed = queries + kFewRows * w;
  float *scores = summed + kFewRows * w, *states = scores + kFewRows * kKeys;
  for (int r = 0; r < rows; ++r) {
    const float* q = a.queries + (span.first + r / share) * a.stride + (kv_head * share + r % share) * d;
    for (int j = 0; j < d; ++j) queries[r * w + j] = q[j] * a.scale;
    std::memset(summed + r * w, 0, w * sizeof(float));
    states[2 * r] = kHidden;
    states[2 * r + 1] = 0;
  }
  const int end = span.start + span.rows, begin = a.window > 0 && span.start - a.window + 1 > 0 ? span.start - a.window + 1 : 0;
  const Reading read{span.blocks, kv_head, begin, end, span.together};
  for (int first = begin; first < end; first += kKeys) {
    const int count = end - first < kKeys ? end - first : kKeys;
    copy_tile(a.cache, read, first, count, keys, values);
    for (int r = 0; r < rows; ++r) {
      const int position = span.start + r / share, from = a.window > 0 ? position - a.window + 1 - first : 0;
      score_row(queries + r * w, keys, count, d, w, scores + r * kKeys);
      weigh_row(scores + r * kKeys, from, position + 1 - first, a.soft_cap, states + 2 * r, summed + r * w, w);
    }
    add_all_values(scores, values, count, w, rows, summed);
  }
  for (int r = 0; r < rows; ++r) {
    float* out = a.out + (static_cast<int64_t>(span.first + r / share) * a.heads + kv_head * share + r % share) * d;
    for (int j = 0; j < d; ++j) out[j] = summed[r * w + j] / states[2 * r + 1];
  }
}

}  // namespace
}  // namespace paceline
