// A prompt's attention by AMX, with softmax as it goes (Milakov 2018): queries, keys, values and weights are rounded to bfloat16
// where keys and values have 16 bits, and sums of three bfloat16 parts where they have 32. Sums are float32, as the softmax is,
// which for bfloat16 is taken to some 13 bits.
//
// The query heads that share a KV head are rows, token by token; keys and values are laid out as the second operands of both
// products once for all of them. Scores for bfloat16 are in powers of two: the logarithm of e is part of the queries' scale.
#pragma once

#include "attend_many.h"
#include "split_gemm.h"

namespace paceline {
namespace {

#if defined(__AMX_BF16__)

constexpr int kRowsAtOnce = 384;  // their sums and queries (150 KiB in bfloat16) leave room for the rest in the second-level cache
constexpr int kPairRows = 2 * kTileRows;

constexpr int64_t tiled_scratch(int64_t d, int parts) {
  const int64_t halves = (kRowsAtOnce * d + 2 * kKeys * d + kPairRows * kKeys) * parts;
  return kRowsAtOnce * (d + kLanes + 3) + kPairRows * (kKeys + d) + halves / 2 + 64;
}

struct TiledRows {
  int count, padded, d;
  float *summed, *scores, *added, *total, *most;  // [rows][d], [32][kKeys], [32][d], [rows][kLanes] (to be added up), [rows]
  int32_t *from, *to;                             // the first and last position that a row sees
  uint16_t *queries, *keys, *values, *weights;
  vi largest{};  // the bits of the largest of queries, keys and values
};

template <int Parts>
TiledRows lay_out_tiled(const Attention& a, const Span& span, int kv_head, int token, int count, float* scratch) {
  const int d = a.cache.head_dim, share = a.heads / a.cache.kv_heads;
  TiledRows rows{count * share, (count * share + kPairRows - 1) / kPairRows * kPairRows, d};
  rows.summed = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~uintptr_t{63});
  rows.scores = rows.summed + kRowsAtOnce * d;
  rows.added = rows.scores + kPairRows * kKeys;
  rows.total = rows.added + kPairRows * d;
  rows.most = rows.total + kRowsAtOnce * kLanes;
  rows.from = reinterpret_cast<int32_t*>(rows.most + kRowsAtOnce);
  rows.to = rows.from + kRowsAtOnce;
  rows.queries = reinterpret_cast<uint16_t*>(rows.to + kRowsAtOnce);
  rows.keys = rows.queries + kRowsAtOnce * d * Parts;
  rows.values = rows.keys + kKeys * d * Parts;
  rows.weights = rows.values + kKeys * d * Parts;
  std::memset(rows.summed, 0, static_cast<size_t>(rows.padded) * d * sizeof(float));
  std::memset(rows.total, 0, static_cast<size_t>(rows.padded) * kLanes * sizeof(float));
  const vf scale = spread(Parts == 1 ? a.scale * kLog2e : a.scale);
  for (int r = 0; r < rows.padded; ++r) {
    const int last = r < rows.count ? r : rows.count - 1;  // a row beyond the last repeats it, and is dropped
    const int position = span.start + token + last / share;
    const float* q = a.queries + (span.first + token + last / share) * a.stride + (kv_head * share + last % share) * d;
    uint16_t* to = rows.queries + r / kTileRows * kTileRows * d * Parts + r % kTileRows * kGroup;
    for (int j = 0; j < d; j += kGroup, to += Parts * kTile) {
      const vf low = load(q + j) * scale, high = load(q + j + kLanes) * scale;
      rows.largest = larger_bits(larger_bits(rows.largest, low), high);
      save_parts<Parts>(to, kTile, low, high);
    }
    rows.most[r] = kSeen;  // above what is hidden: a row that has seen nothing yet weighs it with nothing
    rows.from[r] = a.window > 0 && position - a.window + 1 > 0 ? position - a.window + 1 : 0;
    rows.to[r] = position;
  }
  return rows;
}

// Sixteen keys [16][d] as tiles of pairs of numbers, [d / 32][parts][16 pairs][16 keys][2], two tiles apart.
template <int Parts, class T>
void pair_keys(const T* const* keys, int count, int d, uint16_t* to, vi& largest) {
  for (int j = 0; j < d; j += kGroup, to += Parts * 2 * kTile) {
    alignas(64) uint16_t rows[Parts][kTileRows][kGroup] = {};
    for (int n = 0; n < kLanes && n < count; ++n) {
      const vf low = load(keys[n] + j), high = load(keys[n] + j + kLanes);
      if (Parts > 1) largest = larger_bits(larger_bits(largest, low), high);
      save_parts<Parts>(rows[0][n], kTile, low, high);
    }
    for (int part = 0; part < Parts; ++part) {
      vf block[kLanes];
#pragma GCC unroll 16
      for (int n = 0; n < kLanes; ++n) std::memcpy(&block[n], rows[part][n], sizeof block[n]);
      transpose(block);
      for (int n = 0; n < kLanes; ++n) save(reinterpret_cast<float*>(to + part * 2 * kTile + n * kGroup), block[n]);
    }
  }
}

// Two values [2][32] as a row of pairs of two tiles, parts two tiles apart.
template <int Parts, class T>
void pair_values(const T* first, const T* second, uint16_t* to, vi& largest) {
  for (int j = 0; j < kGroup; j += kLanes, to += kTile) {
    const vf one = first == nullptr ? vf{} : load(first + j), two = second == nullptr ? vf{} : load(second + j);
    if constexpr (Parts == 1) {
      save_pair(to, one, two);
    } else {
      largest = larger_bits(larger_bits(largest, one), two);
      save_pair_parts<Parts>(to, 2 * kTile, one, two);
    }
  }
}

// Keys `first` and on as [kKeys / 32][d / 32][parts][2] tiles, values as [d / 32][kKeys / 32][parts][2]: the two are what a
// product's step multiplies at once. What is beyond `count` is zero.
template <int Parts, class T>
void lay_out_tile(const Cache& cache, const int32_t* blocks, int kv_head, int first, int count, TiledRows& rows) {
  const int d = rows.d;
  const T* at[kKeys];
  PoolRows<T> pool(cache, blocks, kv_head, first);
  for (int i = 0; i < count; ++i) at[i] = pool.next();
  for (int i = 0; i < kKeys; i += kTileRows)
    pair_keys<Parts>(at + i, count - i, d, rows.keys + i / kPairRows * kPairRows * d * Parts + i / kTileRows % 2 * kTile, rows.largest);
  for (int i = 0; i < kKeys; i += 2)
    for (int j = 0; j < d; j += kGroup) {
      const T *one = i < count ? at[i] + pool.apart() + j : nullptr, *two = i + 1 < count ? at[i + 1] + pool.apart() + j : nullptr;
      pair_values<Parts>(one, two, rows.values + (j * kKeys + i / kGroup * 2 * kTile) * Parts + i % kGroup / 2 * kGroup, rows.largest);
    }
}

template <int Parts>
void lay_out_tile(const Cache& cache, const int32_t* blocks, int kv_head, int first, int count, TiledRows& rows) {
  if constexpr (Parts == 3) lay_out_tile<3, float>(cache, blocks, kv_head, first, count, rows);
  else if (cache.kind == Kind::f16) lay_out_tile<1, f16>(cache, blocks, kv_head, first, count, rows);
  else lay_out_tile<1, bf16>(cache, blocks, kv_head, first, count, rows);
}

// Hide what rows `row` and on (32 of them) don't see of their scores with keys `first` and on.
void hide_rows(const TiledRows& rows, int row, int first) {
  for (int r = 0; r < kPairRows; ++r) {
    const vi from = vi{} + rows.from[row + r], to = vi{} + rows.to[row + r];
    vi key = vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first;
    for (int i = 0; i < kKeys; i += kLanes, key += kLanes) {
      float* at = rows.scores + r * kKeys + i;
      save(at, (key >= from) & (key <= to) ? load(at) : spread(kHidden));
    }
  }
}

void cap_rows(const TiledRows& rows, float cap) {
  for (int i = 0; i < kPairRows * kKeys; i += kLanes) save(rows.scores + i, capped(load(rows.scores + i), cap));
}

// What a score that lies `below` the highest weighs; nothing where it is hidden, far below any.
template <int Parts>
inline vf weight_of(vf below) {
  if constexpr (Parts == 1) return power_of_two(below);
  else return below > kSeen / 2 ? exponential(below) : vf{};
}

// Sixteen rows' scores become weights, as tiles [kKeys / 32][parts][16][32]; what the rows had summed is scaled to the new
// maximum.
template <int Parts>
void weigh_rows(const TiledRows& rows, int row, const float* scores, uint16_t* weights) {
  vf peaks[kLanes];
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) {
    peaks[r] = load(scores + r * kKeys);
    for (int i = kLanes; i < kKeys; i += kLanes) peaks[r] = larger(peaks[r], load(scores + r * kKeys + i));
  }
  const vf before = load(rows.most + row), most = larger(before, folded<larger>(peaks)), factors = weight_of<Parts>(before - most);
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
      const vf low = weight_of<Parts>(load(scores + i) - peak), high = weight_of<Parts>(load(scores + i + kLanes) - peak);
      save_parts<Parts>(weights + i / kGroup * kTile * Parts + r * kGroup, kTile, low, high);
      sums += low + high;
    }
    save(total, sums);
    if (same) continue;
    float* summed = rows.summed + (row + r) * rows.d;
    for (int j = 0; j < rows.d; j += kLanes) save(summed + j, load(summed + j) * factor[r]);
  }
}

// The product of two tiles of rows with `steps` tiles of what is laid out in parts; added to `sums` for one part only.
template <int Parts>
void multiply_pair(const uint16_t* rows, int steps, const uint16_t* laid_out, bool add, float* sums, int64_t columns) {
  const int64_t below = static_cast<int64_t>(steps) * kTile * Parts, stride = columns * sizeof(float);
  if constexpr (Parts == 1) narrow_block<true>(rows, below, steps, laid_out, add, sums, stride, nothing);
  else split_block<Parts, true>(rows, below, steps, laid_out, sums, stride, [](int, int) {});
}

// The rows [row, row + 32) with the tile of keys from `first` on.
template <int Parts>
void attend_pair(const Attention& a, const TiledRows& rows, int row, int first, bool hides) {
  const int d = rows.d;
  for (int i = 0; i < kKeys; i += kPairRows)
    multiply_pair<Parts>(rows.queries + row * d * Parts, d / kGroup, rows.keys + i * d * Parts, false, rows.scores + i, kKeys);
  if (a.soft_cap > 0) cap_rows(rows, Parts == 1 ? a.soft_cap * kLog2e : a.soft_cap);
  if (hides) hide_rows(rows, row, first);
  for (int half = 0; half < 2; ++half)
    weigh_rows<Parts>(rows, row + half * kTileRows, rows.scores + half * kTileRows * kKeys, rows.weights + half * kTileRows * kKeys * Parts);
  float *summed = rows.summed + row * d, *to = Parts == 1 ? summed : rows.added;
  for (int j = 0; j < d; j += kPairRows) multiply_pair<Parts>(rows.weights, kKeys / kGroup, rows.values + j * kKeys * Parts, true, to + j, d);
  if (Parts > 1)
    for (int i = 0; i < kPairRows * d; i += kLanes) save(summed + i, load(summed + i) + load(to + i));
}

// `count` tokens of a span from its token `token` on; false, and nothing is left, if parts can't stand for the numbers.
template <int Parts>
bool attend_tiled(const Attention& a, const Span& span, int kv_head, int token, int count, float* scratch) {
  const TileConfig config;
  _tile_loadconfig(&config);
  const int d = a.cache.head_dim, share = a.heads / a.cache.kv_heads, end = span.start + token + count;
  TiledRows rows = lay_out_tiled<Parts>(a, span, kv_head, token, count, scratch);
  for (int first = rows.from[0]; first < end; first += kKeys) {
    lay_out_tile<Parts>(a.cache, span.blocks, kv_head, first, end - first < kKeys ? end - first : kKeys, rows);
    for (int row = 0; row < rows.padded; row += kPairRows) {
      const int last = row + kPairRows - 1;
      if (rows.to[last] < first || rows.from[row] >= first + kKeys) continue;
      attend_pair<Parts>(a, rows, row, first, rows.to[row] < first + kKeys - 1 || rows.from[last] > first);
    }
  }
  _tile_release();
  if (Parts > 1 && !tame(rows.largest)) return false;
  for (int r = 0; r < rows.count; ++r) {
    float* out = a.out + (static_cast<int64_t>(span.first + token + r / share) * a.heads + kv_head * share + r % share) * d;
    const float inverse = 1.0f / sum(load(rows.total + r * kLanes));
    for (int j = 0; j < d; j += kLanes) save(out + j, load(rows.summed + r * d + j) * inverse);
  }
  return true;
}

constexpr bool kTiledAttention = true;

#else

constexpr bool kTiledAttention = false;
constexpr int kRowsAtOnce = kQueryRows;
constexpr int64_t tiled_scratch(int64_t, int) { return 0; }
template <int Parts>
bool attend_tiled(const Attention&, const Span&, int, int, int, float*) { return false; }

#endif

}  // namespace
}  // namespace paceline
