// Products of float rows with panels of weights, in float32.
#pragma once

#include "widen.h"

namespace paceline {
namespace {

constexpr int kVectors = kFloatPanel / kLanes;
// Rows at once: as many accumulators as the registers hold beside one panel's vectors (32 registers on AVX-512, else 16).
constexpr int kRows = kBytes == 64 ? 12 : kBytes == 32 ? 3 : 1;
// Terms of a sum that are added one after another; such parts are then added: a float32 sum's error grows with its length.
constexpr int kTerms = 128;

// The operands of Σ x[r · ldx + i · step] · w[i · ldw + c]; `step` is the template's.
template <class W>
struct Operands {
  const float* x;
  int64_t ldx;
  const W* w;
  int64_t ldw;
  int k;
};

// out[r, c] (+)= Σ x[r, i] · w[i, c] for `R` rows and `cols` ≤ 32 columns; `First`: w hasn't been read for others.
template <int R, bool Add, int Step, bool First, class W>
void float_block(const Operands<W>& o, const float* bias, float* out, int64_t ldo, int cols) {
  vf sums[R][kVectors] = {};
  const W* w = o.w;
  for (int from = 0; from < o.k; from += kTerms) {
    const int to = o.k - from < kTerms ? o.k : from + kTerms;
    vf acc[R][kVectors] = {};
    for (int i = from; i < to; ++i, w += o.ldw) {
      vf column[kVectors];
      if constexpr (First)
        for (int c = 0; c < kFloatPanel; c += 64 / static_cast<int>(sizeof(W))) fetch_ahead(w + c);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) column[v] = load(w + v * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) acc[r][v] += column[v] * o.x[r * o.ldx + i * Step];
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

template <int R, bool Add, int Step, bool First = false, class W>
void float_rows(Operands<W> o, const float* bias, float* out, int64_t ldo, int cols, int m) {
  for (; m >= R; m -= R, o.x += R * o.ldx, out += R * ldo) float_block<R, Add, Step, First>(o, bias, out, ldo, cols);
  if constexpr (R > 1) {
    if (m > 0) float_rows<(R > 4 ? R - 4 : R - 1), Add, Step, First>(o, bias, out, ldo, cols, m);
  }
}

template <class W>
void float_panel(const Matrix& w, const W* data, int panel, const float* x, int64_t ldx, int m, float* out, int64_t ldo) {
  const int column = panel * kFloatPanel, cols = w.n - column < kFloatPanel ? w.n - column : kFloatPanel;
  const float* bias = w.bias == nullptr ? nullptr : w.bias + column;
  const Operands<W> first{x, ldx, data, kFloatPanel, w.k};
  if (m <= kRows) return float_rows<kRows, false, 1, true>(first, bias, out + column, ldo, cols, m);
  float_block<kRows, false, 1, true>(first, bias, out + column, ldo, cols);
  const Operands<W> others{x + kRows * ldx, ldx, data, kFloatPanel, w.k};
  float_rows<kRows, false, 1>(others, bias, out + column + kRows * ldo, ldo, cols, m - kRows);
}

void gemm(const Matrix& w, const float* x, int64_t ldx, int m, int first, int last, float* out, int64_t ldo, float* scratch) {
  for (int panel = first; panel < last; ++panel) {
    const int64_t at = static_cast<int64_t>(panel) * kFloatPanel * w.k;
    if (w.kind == Kind::f32) float_panel(w, static_cast<const float*>(w.data) + at, panel, x, ldx, m, out, ldo);
    else if (w.kind == Kind::bf16 && m <= kRows) float_panel(w, static_cast<const bf16*>(w.data) + at, panel, x, ldx, m, out, ldo);
    else if (w.kind == Kind::f16 && m <= kRows) float_panel(w, static_cast<const f16*>(w.data) + at, panel, x, ldx, m, out, ldo);
    else {
      widen(w, panel, 0, w.k, scratch);
      float_panel(w, static_cast<const float*>(scratch), panel, x, ldx, m, out, ldo);
    }
  }
}

}  // namespace
}  // namespace paceline
