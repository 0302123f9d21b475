// Products of float rows with panels of float32, bfloat16 or float16 weights, widened in registers; sums in float32.
#pragma once

#include "simd.h"

namespace paceline {
namespace {

constexpr int kVectors = kFloatPanel / kLanes;
// Rows at once: as many accumulators as the registers hold beside one panel's vectors (32 registers on AVX-512, else 16).
constexpr int kRows = kBytes == 64 ? 12 : kBytes == 32 ? 3 : 1;
// Terms of a sum that are added one after another; such parts are then added: a float32 sum's error grows with its length.
constexpr int kTerms = 128;

// out[r, c] (+)= Σ x[r, i] · panel[i, c] for `R` rows and `cols` ≤ 32 columns.
template <int R, bool Add, class W>
void float_block(const float* x, int64_t ldx, const W* w, int k, const float* bias, float* out, int64_t ldo, int cols) {
  vf sums[R][kVectors] = {};
  for (int from = 0; from < k; from += kTerms) {
    const int to = k - from < kTerms ? k : from + kTerms;
    vf acc[R][kVectors] = {};
    for (int i = from; i < to; ++i, w += kFloatPanel) {
      vf column[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) column[v] = load(w + v * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) acc[r][v] += column[v] * x[r * ldx + i];
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] += acc[r][v];
  }
  for (int r = 0; r < R; ++r, out += ldo) {
    float row[kFloatPanel];
    std::memcpy(row, sums[r], sizeof row);
    if (bias != nullptr)
      for (int c = 0; c < cols; ++c) row[c] += bias[c];
    if (Add)
      for (int c = 0; c < cols; ++c) out[c] += row[c];
    else
      std::memcpy(out, row, cols * sizeof(float));
  }
}

template <int R, bool Add, class W>
void float_rows(const float* x, int64_t ldx, const W* w, int k, const float* bias, float* out, int64_t ldo, int cols, int m) {
  for (; m >= R; m -= R, x += R * ldx, out += R * ldo) float_block<R, Add>(x, ldx, w, k, bias, out, ldo, cols);
  if constexpr (R > 1) {
    if (m > 0) float_rows<(R > 4 ? R - 4 : R - 1), Add>(x, ldx, w, k, bias, out, ldo, cols, m);
  }
}

template <class W>
void float_panels(const Matrix& w, const float* x, int64_t ldx, int m, int first, int last, float* out, int64_t ldo) {
  for (int panel = first; panel < last; ++panel) {
    const int column = panel * kFloatPanel;
    const W* data = static_cast<const W*>(w.data) + static_cast<int64_t>(column) * w.k;
    const int cols = w.n - column < kFloatPanel ? w.n - column : kFloatPanel;
    const float* bias = w.bias == nullptr ? nullptr : w.bias + column;
    float_rows<kRows, false>(x, ldx, data, w.k, bias, out + column, ldo, cols, m);
  }
}

void gemm(const Matrix& w, const float* x, int64_t ldx, int m, int first, int last, float* out, int64_t ldo) {
  if (w.kind == Kind::f32) float_panels<float>(w, x, ldx, m, first, last, out, ldo);
  if (w.kind == Kind::bf16) float_panels<bf16>(w, x, ldx, m, first, last, out, ldo);
  if (w.kind == Kind::f16) float_panels<f16>(w, x, ldx, m, first, last, out, ldo);
}

}  // namespace
}  // namespace paceline
