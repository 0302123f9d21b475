// A prompt's attention by AMX, over keys and values of 16 bits: as `attend_many.h`, with both products in bfloat16 parts as
// `split_gemm.h` has them. The sums are kept turned, [d][rows], so that the weights, [keys][rows], are again what is paired.
#pragma once

#include "attend_many.h"
#include "split_gemm.h"

namespace paceline {
namespace {

#if defined(__AMX_BF16__)

// Keys [kKeys][d] and turned values [d][kKeys] in parts, queries and weights in tiles, a block of products.
constexpr int64_t split_scratch(int64_t d) {
  return many_scratch(d) + 2 * kKeys * d + kQueryRows * d + kKeys * kFloatPanel + 2 * kTileRows * kFloatPanel + 64;
}

struct Parts {
  Activations keys, values;
  uint16_t *queries, *weights;
  float* sums;
};

Parts lay_out_parts(const ManyRows& rows, float* scratch) {
  auto* bytes = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~uintptr_t{63});
  const int64_t tile = static_cast<int64_t>(kKeys) * rows.d * sizeof(uint16_t);
  Parts parts;
  parts.keys.high = bytes;
  parts.keys.low = bytes + tile;
  parts.values.high = bytes + 2 * tile;
  parts.values.low = bytes + 3 * tile;
  parts.queries = reinterpret_cast<uint16_t*>(bytes + 4 * tile);
  parts.weights = parts.queries + 2 * kQueryRows * rows.d;
  parts.sums = reinterpret_cast<float*>(parts.weights + 2 * kKeys * kFloatPanel);
  for (int panel = 0; panel < rows.panels(); ++panel)
    for (int j = 0; j < rows.d; j += kGroup)
      split_part(rows.queries + (panel * rows.d + j) * kFloatPanel, parts.queries + (panel * rows.d + j) * 2 * kFloatPanel);
  return parts;
}

inline void save_parts(vf all, bf16* high, bf16* low) {
  const vf top = (vf)(((vi)all + 0x8000) & static_cast<int32_t>(0xFFFF0000));
  save(high, top);
  save(low, all - top);
}

// Bring a tile of keys and values [kKeys][d] into parts, the values turned. Rows beyond `count` are zeros: 0 × nan is nan.
void split_tile(float* keys, float* values, int count, int d, const Parts& parts) {
  std::memset(keys + count * d, 0, (kKeys - count) * d * sizeof(float));
  std::memset(values + count * d, 0, (kKeys - count) * d * sizeof(float));
  auto *key_high = reinterpret_cast<bf16*>(parts.keys.high), *key_low = reinterpret_cast<bf16*>(parts.keys.low);
  auto *value_high = reinterpret_cast<bf16*>(parts.values.high), *value_low = reinterpret_cast<bf16*>(parts.values.low);
  for (int i = 0; i < kKeys * d; i += kLanes) save_parts(load(keys + i), key_high + i, key_low + i);
  for (int i = 0; i < kKeys; i += kLanes)
    for (int j = 0; j < d; j += kLanes) {
      vf block[kLanes];
#pragma GCC unroll 16
      for (int n = 0; n < kLanes; ++n) block[n] = load(values + (i + n) * d + j);
      transpose(block);
#pragma GCC unroll 16
      for (int n = 0; n < kLanes; ++n) save_parts(block[n], value_high + (j + n) * kKeys + i, value_low + (j + n) * kKeys + i);
    }
}

// Add to a panel's turned sums [d][32] the values weighted by `scores` [kKeys][32].
void add_split_values(const Parts& parts, const float* scores, const float* factors, int d, float* summed) {
  for (int i = 0; i < kKeys; i += kGroup) split_part(scores + i * kFloatPanel, parts.weights + i * 2 * kFloatPanel);
  for (int j = 0; j < d; j += 2 * kTileRows) {
    split_block<true>(parts.values, j, kKeys, parts.weights, parts.sums);
    for (int i = 0; i < 2 * kTileRows; ++i)
      for (int c = 0; c < kFloatPanel; c += kLanes) {
        float* to = summed + (j + i) * kFloatPanel + c;
        save(to, load(to) * load(factors + c) + load(parts.sums + i * kFloatPanel + c));
      }
  }
}

// `count` tokens of a span from its token `token` on.
void attend_split(const Attention& a, const Span& span, int kv_head, int token, int count, float* scratch) {
  const TileConfig config;
  _tile_loadconfig(&config);
  const int d = a.cache.head_dim, share = a.heads / a.cache.kv_heads;
  float *keys = scratch, *values = keys + kKeys * d;
  const ManyRows rows = lay_out(a, span, kv_head, token, count, values + kKeys * d);
  const Parts parts = lay_out_parts(rows, scratch + many_scratch(d));
  std::memset(rows.summed, 0, rows.panels() * kFloatPanel * d * sizeof(float));
  const int start = span.start + token, end = start + count;
  for (int first = rows.from[0]; first < end; first += kKeys) {
    const int tile = end - first < kKeys ? end - first : kKeys;
    copy_tile(a.cache, span.blocks, kv_head, first, tile, keys, values);
    split_tile(keys, values, tile, d, parts);
    for (int panel = 0; panel < rows.panels(); ++panel) {
      float* scores = rows.scores + panel * kKeys * kFloatPanel;
      for (int i = 0; i < kKeys; i += 2 * kTileRows)
        split_block<true>(parts.keys, i, d, parts.queries + panel * d * 2 * kFloatPanel, scores + i * kFloatPanel);
      if (first + kKeys > start || a.window > 0) hide(rows, panel, first, kKeys, scores);
      alignas(64) float factors[kFloatPanel];
      weigh_columns(rows, panel, kKeys, a.soft_cap, scores, factors);
      add_split_values(parts, scores, factors, d, rows.summed + panel * kFloatPanel * d);
    }
  }
  _tile_release();
  for (int r = 0; r < rows.count; ++r) {
    float* out = a.out + (static_cast<int64_t>(span.first + token + r / share) * a.heads + kv_head * share + r % share) * d;
    const float *summed = rows.summed + r / kFloatPanel * kFloatPanel * d + r % kFloatPanel, inverse = 1.0f / rows.total[r];
    for (int j = 0; j < d; ++j) out[j] = summed[j * kFloatPanel] * inverse;
  }
}

constexpr bool kSplitsAttention = true;

#else

constexpr bool kSplitsAttention = false;
constexpr int64_t split_scratch(int64_t) { return 0; }
inline void attend_split(const Attention&, const Span&, int, int, int, float*) {}

#endif

}  // namespace
}  // namespace paceline
