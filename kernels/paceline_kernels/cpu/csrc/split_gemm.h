// Products by AMX with numbers split into two bfloat16 parts, high and low: x · w ≈ xh · wh + xh · wl + xl · wh, with sums in
// float32. A part has 8 bits of mantissa, so both hold 16, and what is left out is some 2^-16 of a product: for float16
// weights, whose 11 bits one bfloat16 doesn't hold. Three times the work of bfloat16, a fifth of float32's time.
#pragma once

#include "float_gemm.h"

#if defined(__AMX_BF16__)
#include "amx_tiles.h"
#endif

namespace paceline {
namespace {

#if defined(__AMX_BF16__)

constexpr int kPart = kGroup * kFloatPanel;  // numbers of 32 inputs of a panel: two tiles

// Activations as two rows of bfloat16: `high` and `low` [rows][k].
void split(const Matrix& w, const float* x, int row, const Activations& to) {
  auto* high = reinterpret_cast<bf16*>(to.high) + static_cast<int64_t>(row) * w.k;
  auto* low = reinterpret_cast<bf16*>(to.low) + static_cast<int64_t>(row) * w.k;
  for (int i = 0; i < w.k; i += kLanes) {
    const vf all = load(x + i), top = (vf)(((vi)all + 0x8000) & static_cast<int32_t>(0xFFFF0000));
    save(high + i, top);
    save(low + i, all - top);
  }
}

// Two rows of numbers become one row of pairs.
inline vi paired(vf first, vf second) { return (vi)(((__m512i)_mm512_srli_epi32((__m512i)first, 16))) | ((vi)second & static_cast<int32_t>(0xFFFF0000)); }

// 32 inputs [32][32] as four tiles [2 halves of the outputs][high, low][16 pairs of inputs][16 outputs].
void split_part(const float* from, uint16_t* to) {
  const vi top = vi{} + static_cast<int32_t>(0xFFFF0000);
  for (int i = 0; i < kGroup; i += 2)
    for (int half = 0; half < 2; ++half) {
      const vf a = load(from + i * kFloatPanel + half * kIntPanel), b = load(from + (i + 1) * kFloatPanel + half * kIntPanel);
      const vf ah = (vf)(((vi)a + 0x8000) & top), bh = (vf)(((vi)b + 0x8000) & top);
      const vf al = (vf)((vi)(a - ah) + 0x8000), bl = (vf)((vi)(b - bh) + 0x8000);
      uint16_t* tile = to + half * kPart + i * kIntPanel;
      const vi high = paired(ah, bh), low = paired(al, bl);
      std::memcpy(tile, &high, sizeof high);
      std::memcpy(tile + kPart / 2, &low, sizeof low);
    }
}

// Two tiles of rows times two tiles of outputs: tiles 0 to 3 sum, 4 and 5 hold rows, 6 and 7 weights.
template <bool Two>
void split_block(const Activations& x, int row, int k, const uint16_t* parts, float* sums) {
  const auto* high = reinterpret_cast<const uint16_t*>(x.high) + static_cast<int64_t>(row) * k;
  const auto* low = reinterpret_cast<const uint16_t*>(x.low) + static_cast<int64_t>(row) * k;
  const int64_t stride = 2 * k, below = static_cast<int64_t>(kTileRows) * k;
  _tile_zero(0);
  _tile_zero(1);
  if (Two) _tile_zero(2);
  if (Two) _tile_zero(3);
  for (int i = 0; i < k; i += kGroup, parts += 2 * kPart) {
    _tile_loadd(4, high + i, stride);
    _tile_loadd(6, parts + kPart / 2, 64);  // low parts of the weights first: the high ones are needed twice
    _tile_loadd(7, parts + kPart + kPart / 2, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (Two) {
      _tile_loadd(5, high + below + i, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_loadd(6, parts, 64);
    _tile_loadd(7, parts + kPart, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(4, low + i, stride);
    if (Two) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      _tile_loadd(5, low + below + i, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  constexpr int64_t bytes = kFloatPanel * sizeof(float);
  _tile_stored(0, sums, bytes);
  _tile_stored(1, sums + kIntPanel, bytes);
  if (Two) _tile_stored(2, sums + kTileRows * kFloatPanel, bytes);
  if (Two) _tile_stored(3, sums + kTileRows * kFloatPanel + kIntPanel, bytes);
}

void gemm_split(const Matrix& w, const Activations& x, int row, int m, int first, int last, float* out, int64_t ldo, float* scratch) {
  const TileConfig config;
  _tile_loadconfig(&config);
  alignas(64) float sums[2 * kTileRows * kFloatPanel];
  float* wide = scratch + static_cast<int64_t>(kFloatPanel) * w.k;
  auto* parts = reinterpret_cast<uint16_t*>(scratch);
  for (int panel = first; panel < last; ++panel) {
    for (int i = 0; i < w.k; i += kGroup) {
      widen(w, panel, i, kGroup, wide);
      split_part(wide, parts + static_cast<int64_t>(i) * 2 * kFloatPanel);
    }
    const int column = panel * kFloatPanel, cols = w.n - column < kFloatPanel ? w.n - column : kFloatPanel;
    for (int r = 0; r < m; r += 2 * kTileRows) {
      const int rows = m - r < 2 * kTileRows ? m - r : 2 * kTileRows;
      if (rows > kTileRows) split_block<true>(x, row + r, w.k, parts, sums);
      else split_block<false>(x, row + r, w.k, parts, sums);
      for (int i = 0; i < rows; ++i) {
        float* to = out + (row + r + i) * ldo + column;
        if (w.bias == nullptr) std::memcpy(to, sums + i * kFloatPanel, cols * sizeof(float));
        else for (int c = 0; c < cols; ++c) to[c] = sums[i * kFloatPanel + c] + w.bias[column + c];
      }
    }
  }
  _tile_release();
}

constexpr auto kSplitGemm = gemm_split;
constexpr auto kSplitRow = split;
// Beyond these rows rounding the weights to bfloat16 costs less than the integer products save.
constexpr int kMostGroupedRows = 8;

#else

constexpr decltype(Kernels::gemm_split) kSplitGemm = nullptr;
constexpr decltype(Kernels::split) kSplitRow = nullptr;
// Beyond these rows widening the weights to float32 costs less than the integer products take longer.
constexpr int kMostGroupedRows = kBytes == 64 ? 48 : 16;

#endif

}  // namespace
}  // namespace paceline
