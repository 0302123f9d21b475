// A prompt's attention by AMX in bfloat16, over keys and values of 16 bits, with softmax as it goes (Milakov 2018): queries,
// keys, values and weights are rounded to bfloat16, sums and the softmax are in float32.
//
// The query heads that share a KV head are rows, token by token; keys and values are laid out as the second operands of both
// products once for all of them. Scores are in powers of two: the logarithm of e is part of the queries' scale.
#pragma once

#include "attend_many.h"
#include "narrow_gemm.h"

namespace paceline {
namespace {

#if defined(__AMX_BF16__)

constexpr int kNarrowRows = 384;  // at once: their sums and queries (150 KiB) leave room for the rest in the second-level cache
constexpr int kPairRows = 2 * kTileRows;

constexpr int64_t narrow_scratch(int64_t d) {
  const int64_t halves = kNarrowRows * d + 2 * kKeys * d + kPairRows * kKeys;
  return kNarrowRows * (d + kLanes + 3) + kPairRows * kKeys + halves / 2 + 64;
}

struct NarrowRows {
  int count, padded, d;
  float *summed, *scores, *total, *most;  // [rows][d], [32][kKeys], [rows][kLanes] (to be added up), [rows]
  int32_t *from, *to;                     // the first and last position that a row sees
  uint16_t *queries, *keys, *values, *weights;
};

NarrowRows lay_out_narrow(const Attention& a, const Span& span, int kv_head, int token, int count, float* scratch) {
  const int d = a.cache.head_dim, share = a.heads / a.cache.kv_heads;
  NarrowRows rows{count * share, (count * share + kPairRows - 1) / kPairRows * kPairRows, d};
  rows.summed = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~uintptr_t{63});
  rows.scores = rows.summed + kNarrowRows * d;
  rows.total = rows.scores + kPairRows * kKeys;
  rows.most = rows.total + kNarrowRows * kLanes;
  rows.from = reinterpret_cast<int32_t*>(rows.most + kNarrowRows);
  rows.to = rows.from + kNarrowRows;
  rows.queries = reinterpret_cast<uint16_t*>(rows.to + kNarrowRows);
  rows.keys = rows.queries + kNarrowRows * d;
  rows.values = rows.keys + kKeys * d;
  rows.weights = rows.values + kKeys * d;
  std::memset(rows.summed, 0, static_cast<size_t>(rows.padded) * d * sizeof(float));
  std::memset(rows.total, 0, static_cast<size_t>(rows.padded) * kLanes * sizeof(float));
  for (int r = 0; r < rows.padded; ++r) {
    const int last = r < rows.count ? r : rows.count - 1;  // a row beyond the last repeats it, and is dropped
    const int position = span.start + token + last / share;
    const float* q = a.queries + (span.first + token + last / share) * a.stride + (kv_head * share + last % share) * d;
    uint16_t* to = rows.queries + r / kTileRows * kTileRows * d + r % kTileRows * kGroup;
    const vf scale = spread(a.scale * kLog2e);
    for (int j = 0; j < d; j += kGroup, to += kTile) save_narrow(to, load(q + j) * scale, load(q + j + kLanes) * scale);
    rows.most[r] = kSeen;  // above what is hidden: a row that has seen nothing yet weighs it with nothing
    rows.from[r] = a.window > 0 && position - a.window + 1 > 0 ? position - a.window + 1 : 0;
    rows.to[r] = position;
  }
  return rows;
}

// Sixteen keys [16][d] as tiles of pairs of numbers, [d / 32][16 pairs][16 keys][2], `apart` between the tiles.
template <class T>
void pair_keys(const T* const* keys, int count, int d, int64_t apart, uint16_t* to) {
  for (int j = 0; j < d; j += kGroup, to += apart) {
    vf block[kLanes] = {};
#pragma GCC unroll 16
    for (int n = 0; n < kLanes; ++n) {
      if (n >= count) break;
      const T* key = keys[n] + j;
      const __m512bh both = _mm512_cvtne2ps_pbh((__m512)load(key + kLanes), (__m512)load(key));
      std::memcpy(&block[n], &both, sizeof both);
    }
    transpose(block);
    for (int n = 0; n < kLanes; ++n) save(reinterpret_cast<float*>(to + n * kGroup), block[n]);
  }
}

// Two values [2][32] as a row of pairs of two tiles.
template <class T>
void pair_values(const T* first, const T* second, uint16_t* to) {
  for (int j = 0; j < kGroup; j += kLanes, to += kTile)
    save_pair(to, first == nullptr ? vf{} : load(first + j), second == nullptr ? vf{} : load(second + j));
}

// Keys `first` and on as [kKeys / 32][d / 32][2] tiles, values as [d / 32][kKeys / 32][2]: the two are what a product's step
// multiplies at once. What is beyond `count` is zero.
template <class T>
void lay_out_tile(const Cache& cache, const int32_t* blocks, int kv_head, int first, int count, const NarrowRows& rows) {
  const int d = rows.d;
  const T* at[kKeys];
  PoolRows<T> pool(cache, blocks, kv_head, first);
  for (int i = 0; i < count; ++i) at[i] = pool.next();
  for (int i = 0; i < kKeys; i += kTileRows)
    pair_keys(at + i, count - i, d, 2 * kTile, rows.keys + i / kPairRows * kPairRows * d + i / kTileRows % 2 * kTile);
  for (int i = 0; i < kKeys; i += 2)
    for (int j = 0; j < d; j += kGroup) {
      const T *one = i < count ? at[i] + pool.apart() + j : nullptr, *two = i + 1 < count ? at[i + 1] + pool.apart() + j : nullptr;
      pair_values(one, two, rows.values + j * kKeys + i / kGroup * 2 * kTile + i % kGroup / 2 * kGroup);
    }
}

void lay_out_tile(const Cache& cache, const int32_t* blocks, int kv_head, int first, int count, const NarrowRows& rows) {
  if (cache.kind == Kind::f16) lay_out_tile<f16>(cache, blocks, kv_head, first, count, rows);
  else lay_out_tile<bf16>(cache, blocks, kv_head, first, count, rows);
}

// Hide what rows `row` and on (32 of them) don't see of their scores with keys `first` and on.
void hide_rows(const NarrowRows& rows, int row, int first) {
  for (int r = 0; r < kPairRows; ++r) {
    const vi from = vi{} + rows.from[row + r], to = vi{} + rows.to[row + r];
    vi key = vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first;
    for (int i = 0; i < kKeys; i += kLanes, key += kLanes) {
      float* at = rows.scores + r * kKeys + i;
      save(at, (key >= from) & (key <= to) ? load(at) : spread(kHidden));
    }
  }
}

void cap_rows(const NarrowRows& rows, float cap) {
  for (int i = 0; i < kPairRows * kKeys; i += kLanes) {
    const vf score = load(rows.scores + i);
    save(rows.scores + i, score > kSeen ? tangent(score * (1 / (cap * kLog2e))) * (cap * kLog2e) : score);
  }
}

// Sixteen rows' scores become weights, as tiles [kKeys / 32][16][32]; what the rows had summed is scaled to the new maximum.
void weigh_rows(const NarrowRows& rows, int row, const float* scores, uint16_t* weights) {
  vf peaks[kLanes];
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) {
    peaks[r] = load(scores + r * kKeys);
    for (int i = kLanes; i < kKeys; i += kLanes) peaks[r] = larger(peaks[r], load(scores + r * kKeys + i));
  }
  const vf before = load(rows.most + row), most = larger(before, folded<larger>(peaks)), factors = power_of_two(before - most);
  save(rows.most + row, most);
  alignas(64) float factor[kLanes];
  save(factor, factors);
  const bool same = _mm512_cmp_ps_mask((__m512)factors, _mm512_set1_ps(1.0f), _CMP_NEQ_OQ) == 0;
  for (int r = 0; r < kLanes; ++r, scores += kKeys) {
    const vf peak = spread(rows.most[row + r]);
    float* total = rows.total + (row + r) * kLanes;
    vf sums = load(total) * factor[r];
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; i += kGroup) {
      const vf low = power_of_two(load(scores + i) - peak), high = power_of_two(load(scores + i + kLanes) - peak);
      save_narrow(weights + i / kGroup * kTile + r * kGroup, low, high);
      sums += low + high;
    }
    save(total, sums);
    if (same) continue;
    float* summed = rows.summed + (row + r) * rows.d;
    for (int j = 0; j < rows.d; j += kLanes) save(summed + j, load(summed + j) * factor[r]);
  }
}

// The rows [row, row + 32) with the tile of keys from `first` on.
void attend_pair(const Attention& a, const NarrowRows& rows, int row, int first, bool hides) {
  const int d = rows.d;
  for (int i = 0; i < kKeys; i += kPairRows)
    narrow_block<true>(rows.queries + row * d, kTileRows * d, d / kGroup, rows.keys + i * d, false, rows.scores + i, kKeys * sizeof(float), nothing);
  if (hides) hide_rows(rows, row, first);
  if (a.soft_cap > 0) cap_rows(rows, a.soft_cap);
  for (int half = 0; half < 2; ++half)
    weigh_rows(rows, row + half * kTileRows, rows.scores + half * kTileRows * kKeys, rows.weights + half * kTileRows * kKeys);
  for (int j = 0; j < d; j += kPairRows)
    narrow_block<true>(rows.weights, kTileRows * kKeys, kKeys / kGroup, rows.values + j * kKeys, true, rows.summed + row * d + j, d * sizeof(float), nothing);
}

// `count` tokens of a span from its token `token` on.
void attend_narrow(const Attention& a, const Span& span, int kv_head, int token, int count, float* scratch) {
  const TileConfig config;
  _tile_loadconfig(&config);
  const int d = a.cache.head_dim, share = a.heads / a.cache.kv_heads, end = span.start + token + count;
  const NarrowRows rows = lay_out_narrow(a, span, kv_head, token, count, scratch);
  for (int first = rows.from[0]; first < end; first += kKeys) {
    lay_out_tile(a.cache, span.blocks, kv_head, first, end - first < kKeys ? end - first : kKeys, rows);
    for (int row = 0; row < rows.padded; row += kPairRows) {
      const int last = row + kPairRows - 1;
      if (rows.to[last] < first || rows.from[row] >= first + kKeys) continue;
      attend_pair(a, rows, row, first, rows.to[row] < first + kKeys - 1 || rows.from[last] > first);
    }
  }
  _tile_release();
  for (int r = 0; r < rows.count; ++r) {
    float* out = a.out + (static_cast<int64_t>(span.first + token + r / share) * a.heads + kv_head * share + r % share) * d;
    const float inverse = 1.0f / sum(load(rows.total + r * kLanes));
    for (int j = 0; j < d; j += kLanes) save(out + j, load(rows.summed + r * d + j) * inverse);
  }
}

constexpr bool kNarrowAttention = true;

#else

constexpr bool kNarrowAttention = false;
constexpr int kNarrowRows = kQueryRows;
constexpr int64_t narrow_scratch(int64_t) { return 0; }
inline void attend_narrow(const Attention&, const Span&, int, int, int, float*) {}

#endif

}  // namespace
}  // namespace paceline
