// Attention straight from the block pool, one KV head of one sequence at a time, softmax as it goes (Milakov 2018).
//
// The rows of a chunk and the query heads that share the KV head are one matrix; a tile of keys is transposed once for all
// of them, so that scores and sums are two small products. A decode's few rows read the pool as it is.
#pragma once

#include "float_gemm.h"

namespace paceline {
namespace {

constexpr int kKeys = 64;       // keys of a tile
constexpr int kDirectRows = 16;  // fewer rows than the keys' transposition pays for: decodes
constexpr int kQueryRows = 96;  // rows of scores at once: a tile is packed once for them

inline int wide(int n) { return (n + kFloatPanel - 1) / kFloatPanel * kFloatPanel; }

int64_t attention_scratch(int, int, int head_dim) {
  const int64_t d = wide(head_dim);
  return 2 * kKeys * d + kQueryRows * (2 * d + kKeys + 2);
}

// The rows of a tile of keys in the pool: `at(i)` is key i of a KV head, its value lies `apart` further.
template <class T>
struct TileRows {
  const Cache& cache;
  const int32_t* blocks;
  int kv_head, first;

  const T* at(int i) const {
    const int position = first + i;
    const int64_t slot = static_cast<int64_t>(blocks[position / cache.block_size]) * cache.block_size + position % cache.block_size;
    return reinterpret_cast<const T*>(cache.data) + slot * cache.row() + kv_head * cache.head_dim;
  }
  int apart() const { return cache.kv_heads * cache.head_dim; }
};

// Call `use` with the tile's rows in the type in which the pool keeps them.
template <class Use>
void with_rows(const Cache& cache, const int32_t* blocks, int kv_head, int first, const Use& use) {
  if (cache.kind == Kind::f32) use(TileRows<float>{cache, blocks, kv_head, first});
  if (cache.kind == Kind::bf16) use(TileRows<bf16>{cache, blocks, kv_head, first});
  if (cache.kind == Kind::f16) use(TileRows<f16>{cache, blocks, kv_head, first});
}

// Copy a tile's keys as panels [keys / 32][D][32] and its values as panels [D / 32][keys][32], in float32.
template <class T>
void pack(const TileRows<T>& tile, int count, float* keys, float* values) {
  const int d = tile.cache.head_dim;
  for (int i = 0; i < kKeys; ++i) {
    float* key = keys + (i / kFloatPanel) * d * kFloatPanel + i % kFloatPanel;
    if (i >= count) {  // scores of these are masked, but 0 × nan is nan
      for (int j = 0; j < d; ++j) key[j * kFloatPanel] = 0;
      for (int j = 0; j < wide(d); ++j) values[(j / kFloatPanel * kKeys + i) * kFloatPanel + j % kFloatPanel] = 0;
      continue;
    }
    const T* row = tile.at(i);
    for (int j = 0; j < d; ++j) key[j * kFloatPanel] = value(row[j]);
    row += tile.apart();
    for (int j = 0; j < d; ++j) values[(j / kFloatPanel * kKeys + i) * kFloatPanel + j % kFloatPanel] = value(row[j]);
  }
}

// Scores of a few rows of queries (stride w) straight from the pool's keys; D is a multiple of the lanes.
template <class T>
void score(const TileRows<T>& tile, int count, const float* queries, int w, int rows, float* scores) {
  const int d = tile.cache.head_dim;
  for (int i = 0; i < count; ++i) {
    const T* key = tile.at(i);
    for (int r = 0; r < rows; ++r) {
      vf total{};
      for (int j = 0; j < d; j += kLanes) total += load(queries + r * w + j) * load(key + j);
      scores[r * kKeys + i] = sum(total);
    }
  }
}

// Add the values, weighted by the scores, to the sums of a few rows.
template <class T>
void add_values(const TileRows<T>& tile, int count, const float* scores, int rows, float* summed, int w) {
  const T* values[kKeys];
  for (int i = 0; i < count; ++i) values[i] = tile.at(i) + tile.apart();
  for (int r = 0; r < rows; ++r)
    for (int j = 0; j < tile.cache.head_dim; j += kLanes) {
      vf total = load(summed + r * w + j);
      for (int i = 0; i < count; ++i) total += spread(scores[r * kKeys + i]) * load(values[i] + j);
      save(summed + r * w + j, total);
    }
}

// Mask a row of scores to [from, to), turn it into weights, and scale what was summed before. `state` is maximum and sum.
void weigh(float* scores, int from, int to, float soft_cap, float* state, float* summed, int d) {
  for (int i = 0; i < kKeys; ++i)
    if (i < from || i >= to) scores[i] = -1e30f;
  vf most = spread(state[0]);
  for (int i = 0; i < kKeys; i += kLanes) {
    if (soft_cap > 0) {
      const vf capped = tangent(load(scores + i) * (1 / soft_cap)) * soft_cap, raw = load(scores + i);
      save(scores + i, raw > -1e29f ? capped : raw);
    }
    most = larger(most, load(scores + i));
  }
  float peak = state[0];
  for (int lane = 0; lane < kLanes; ++lane) peak = most[lane] > peak ? most[lane] : peak;
  vf total{};
  for (int i = 0; i < kKeys; i += kLanes) {
    const vf s = load(scores + i);
    const vf e = s > -1e29f ? exponential(s - peak) : vf{};
    save(scores + i, e);
    total += e;
  }
  const float factor = state[0] > -1e29f ? std::exp(state[0] - peak) : 0.0f;
  state[1] = state[1] * factor + sum(total);
  state[0] = peak;
  for (int j = 0; j < d; j += kLanes) save(summed + j, load(summed + j) * factor);
}

// `count` tokens of a span from its token `token` on.
void attend_rows(const Attention& a, const Span& span, int kv_head, int token, int count, float* scratch) {
  const int d = a.cache.head_dim, w = wide(d), share = a.heads / a.cache.kv_heads, rows = count * share;
  float *keys = scratch, *values = keys + kKeys * w, *queries = values + kKeys * w, *summed = queries + kQueryRows * w;
  float *scores = summed + kQueryRows * w, *states = scores + kQueryRows * kKeys;
  for (int r = 0; r < rows; ++r) {
    const float* q = a.queries + (span.first + token + r / share) * a.stride + (kv_head * share + r % share) * d;
    for (int j = 0; j < d; ++j) queries[r * w + j] = q[j] * a.scale;
    std::memset(summed + r * w, 0, w * sizeof(float));
    states[2 * r] = -1e30f;
    states[2 * r + 1] = 0;
  }
  const int start = span.start + token, end = start + count;
  const bool direct = rows <= kDirectRows && d % kLanes == 0;
  const int begin = a.window > 0 && start - a.window + 1 > 0 ? start - a.window + 1 : 0;
  for (int first = begin; first < end; first += kKeys) {
    const int tile = end - first < kKeys ? end - first : kKeys;
    with_rows(a.cache, span.blocks, kv_head, first, [&](const auto& stored) {
      if (direct) return score(stored, tile, queries, w, rows, scores);
      pack(stored, tile, keys, values);
      for (int c = 0; c < kKeys; c += kFloatPanel)
        float_rows<kRows, false>(queries, w, keys + c * d, d, nullptr, scores + c, kKeys, kFloatPanel, rows);
    });
    for (int r = 0; r < rows; ++r) {
      const int position = start + r / share;
      const int from = a.window > 0 ? position - a.window + 1 - first : 0;
      weigh(scores + r * kKeys, from, position + 1 - first, a.soft_cap, states + 2 * r, summed + r * w, w);
    }
    if (direct) {
      with_rows(a.cache, span.blocks, kv_head, first, [&](const auto& stored) { add_values(stored, tile, scores, rows, summed, w); });
      continue;
    }
    for (int c = 0; c < w; c += kFloatPanel)
      float_rows<kRows, true>(scores, kKeys, values + c * kKeys, kKeys, nullptr, summed + c, w, kFloatPanel, rows);
  }
  for (int r = 0; r < rows; ++r) {
    float* out = a.out + (static_cast<int64_t>(span.first + token + r / share) * a.heads + kv_head * share + r % share) * d;
    for (int j = 0; j < d; ++j) out[j] = summed[r * w + j] / states[2 * r + 1];
  }
}

void attend(const Attention& a, const Span& span, int kv_head, float* scratch) {
  const int share = a.heads / a.cache.kv_heads, step = share < kQueryRows ? kQueryRows / share : 1;
  for (int token = 0; token < span.rows; token += step)
    attend_rows(a, span, kv_head, token, span.rows - token < step ? span.rows - token : step, scratch);
}

}  // namespace
}  // namespace paceline
