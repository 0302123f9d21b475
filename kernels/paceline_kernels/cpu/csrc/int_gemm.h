// int8 weights × activations of 16 bits: a row is quantised with one scale to some 13 to 15 bits, so that its rounding is far
// below the weights' own. Where bytes are multiplied (VNNI, AMX) it is two bytes, high and low, each product in one pass;
// both are kept unsigned (+128), which the sums of the weights take back. Every instruction set gives the same numbers.
#pragma once

#include "grouped.h"

#if defined(__AMX_INT8__)
#include "amx_tiles.h"
#endif

namespace paceline {
namespace {

// The largest quantised activation: 32512 splits into two signed bytes; 2^31 / (127 · k) can't overflow a sum.
inline float largest_activation(int k) {
  const int bound = static_cast<int>(2147483647LL / (127LL * k));
  return static_cast<float>(bound < 32512 ? bound : 32512);
}

void quantise(const Matrix& w, const float* x, int row, const Activations& to) {
  vf most{};
  int i = 0;
  for (; i + kLanes <= w.k; i += kLanes) most = larger(most, larger(load(x + i), -load(x + i)));
  float peak = highest(most);
  for (; i < w.k; ++i) peak = std::fabs(x[i]) > peak ? std::fabs(x[i]) : peak;
  const float top = largest_activation(w.kp), inverse = peak > 0 ? top / peak : 0;
  to.scale[row] = peak / top;
  const int64_t at = static_cast<int64_t>(row) * w.kp;
  for (i = 0; i < w.kp; i += kLanes) {
    const vi q = rounded(load_some(x + i, w.k - i) * inverse);
#if defined(PACELINE_BYTES)
    const vi low = (q << 24) >> 24;
    put_bytes(low ^ 0x80, to.low + at + i);
    put_bytes(((q - low) >> 8) ^ 0x80, to.high + at + i);
#else
    put_words(q, to.whole + at + i);
#endif
  }
}

inline int columns(const Matrix& w, int panel) {
  const int left = w.n - panel * kIntPanel;
  return left < kIntPanel ? left : kIntPanel;
}

inline const int8_t* panel_data(const Matrix& w, int panel) {
  return static_cast<const int8_t*>(w.data) + static_cast<int64_t>(panel) * kIntPanel * w.kp;
}

#if defined(PACELINE_BYTES)

// Turn a row's two sums into floats and write them.
inline void finish(const Matrix& w, int panel, __m512i high, __m512i low, float scale, float* out) {
  const int at = panel * kIntPanel, cols = columns(w, panel);
  const __m512i offset = _mm512_slli_epi32(_mm512_loadu_si512(w.sums + at), 7);
  const __m512 h = _mm512_cvtepi32_ps(_mm512_sub_epi32(high, offset)), l = _mm512_cvtepi32_ps(_mm512_sub_epi32(low, offset));
  const __m512 both = _mm512_fmadd_ps(h, _mm512_set1_ps(256), l);
  const __mmask16 mask = static_cast<__mmask16>((1u << cols) - 1);
  __m512 y = _mm512_mul_ps(both, _mm512_mul_ps(_mm512_loadu_ps(w.scales + at), _mm512_set1_ps(scale)));
  if (w.bias != nullptr) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, w.bias + at));
  _mm512_mask_storeu_ps(out + at, mask, y);
}

// R rows times P panels: 2 · R · P sums in registers; several panels hide the latency where there are few rows.
template <int R, int P>
void vnni_block(const Matrix& w, const Activations& x, int row, int panel, float* out, int64_t ldo) {
  __m512i low[R][P] = {}, high[R][P] = {};
  const int8_t* data = panel_data(w, panel);
  const int64_t step = static_cast<int64_t>(kIntPanel) * w.kp, at = static_cast<int64_t>(row) * w.kp;
  for (int i = 0; i < w.kp; i += 4) {
    __m512i column[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      fetch_ahead(data + p * step + i * kIntPanel);
      column[p] = _mm512_loadu_si512(data + p * step + i * kIntPanel);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      int32_t l, h;
      std::memcpy(&l, x.low + at + static_cast<int64_t>(r) * w.kp + i, 4);
      std::memcpy(&h, x.high + at + static_cast<int64_t>(r) * w.kp + i, 4);
      const __m512i lows = _mm512_set1_epi32(l), highs = _mm512_set1_epi32(h);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        low[r][p] = _mm512_dpbusd_epi32(low[r][p], lows, column[p]);
        high[r][p] = _mm512_dpbusd_epi32(high[r][p], highs, column[p]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) finish(w, panel + p, high[r][p], low[r][p], x.scale[row + r], out + (row + r) * ldo);
}

template <int P>
void vnni_rows(const Matrix& w, const Activations& x, int row, int m, int panel, float* out, int64_t ldo) {
  for (; m >= 4; m -= 4, row += 4) vnni_block<4, P>(w, x, row, panel, out, ldo);
  if (m == 3) vnni_block<3, P>(w, x, row, panel, out, ldo);
  if (m == 2) vnni_block<2, P>(w, x, row, panel, out, ldo);
  if (m == 1) vnni_block<1, P>(w, x, row, panel, out, ldo);
}

void vnni_panels(const Matrix& w, const Activations& x, int row, int m, int first, int last, float* out, int64_t ldo) {
  for (; first + 2 <= last; first += 2) vnni_rows<2>(w, x, row, m, first, out, ldo);
  if (first < last) vnni_rows<1>(w, x, row, m, first, out, ldo);
}

#endif
#if defined(__AMX_INT8__)

constexpr int kAmxRows = 4;  // fewer rows leave most of a tile empty

// Sixteen rows times one or two panels: tiles 0–3 sum, 4 and 5 hold the rows' bytes, 6 and 7 the weights. With `Fetch` the
// next two panels are fetched meanwhile: tile loads alone read at a third of what memory gives.
template <bool Two, bool Fetch>
void amx_block(const Matrix& w, const Activations& x, int row, int m, int panel, float* out, int64_t ldo) {
  alignas(64) int32_t sums[4][kTileRows * kIntPanel];
  _tile_zero(0);
  _tile_zero(1);
  if (Two) _tile_zero(2);
  if (Two) _tile_zero(3);
  const uint8_t *low = x.low + static_cast<int64_t>(row) * w.kp, *high = x.high + static_cast<int64_t>(row) * w.kp;
  const int8_t *left = panel_data(w, panel), *right = panel_data(w, panel + 1);
  for (int i = 0; i < w.kp; i += kDepth) {
    if (Fetch)
      for (int line = 0; line < 2 * kDepth * kIntPanel; line += 64)
        _mm_prefetch(left + 2 * (static_cast<int64_t>(w.kp) + i) * kIntPanel + line, _MM_HINT_T1);
    _tile_loadd(4, low + i, w.kp);
    _tile_loadd(5, high + i, w.kp);
    _tile_loadd(6, left + i * kIntPanel, 64);
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 5, 6);
    if (Two) {
      _tile_loadd(7, right + i * kIntPanel, 64);
      _tile_dpbusd(2, 4, 7);
      _tile_dpbusd(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  if (Two) _tile_stored(2, sums[2], 64);
  if (Two) _tile_stored(3, sums[3], 64);
  for (int p = 0; p < (Two ? 2 : 1); ++p)
    for (int r = 0; r < m; ++r)
      finish(w, panel + p, _mm512_load_si512(sums[2 * p + 1] + r * kIntPanel), _mm512_load_si512(sums[2 * p] + r * kIntPanel),
             x.scale[row + r], out + (row + r) * ldo);
}

void amx_panels(const Matrix& w, const Activations& x, int row, int m, int first, int last, float* out, int64_t ldo) {
  const TileConfig config;
  _tile_loadconfig(&config);
  for (int panel = first; panel < last; panel += 2)
    for (int r = 0; r < m; r += kTileRows) {
      const int rows = m - r < kTileRows ? m - r : kTileRows;
      if (panel + 3 < last && r == 0) amx_block<true, true>(w, x, row + r, rows, panel, out, ldo);
      else if (panel + 1 < last) amx_block<true, false>(w, x, row + r, rows, panel, out, ldo);
      else amx_block<false, false>(w, x, row + r, rows, panel, out, ldo);
    }
  _tile_release();
}

#endif
#if !defined(PACELINE_BYTES)

// One row times one panel; `total` [16].
inline void whole_panel(const int8_t* data, const int16_t* x, int kp, int32_t* total) {
#if defined(__AVX2__)
  __m256i acc[4] = {};  // of four outputs, two sums each
  for (int i = 0; i < kp; i += 4, data += 64) {
    int64_t four;
    std::memcpy(&four, x + i, 8);
    const __m256i inputs = _mm256_set1_epi64x(four);
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const __m256i weights = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(data + 16 * q)));
      acc[q] = _mm256_add_epi32(acc[q], _mm256_madd_epi16(weights, inputs));
    }
  }
  alignas(32) int32_t pairs[32];
  for (int q = 0; q < 4; ++q) _mm256_store_si256((__m256i*)(pairs + 8 * q), acc[q]);
  for (int n = 0; n < kIntPanel; ++n) total[n] = pairs[2 * n] + pairs[2 * n + 1];
#else
  for (int n = 0; n < kIntPanel; ++n) total[n] = 0;
  for (int i = 0; i < kp; i += 4)
    for (int n = 0; n < kIntPanel; ++n)
      for (int j = 0; j < 4; ++j) total[n] += data[i * kIntPanel + 4 * n + j] * x[i + j];
#endif
}

void whole_panels(const Matrix& w, const Activations& x, int row, int m, int first, int last, float* out, int64_t ldo) {
  for (int panel = first; panel < last; ++panel)
    for (int r = row; r < row + m; ++r) {
      int32_t total[kIntPanel];
      whole_panel(panel_data(w, panel), x.whole + static_cast<int64_t>(r) * w.kp, w.kp, total);
      for (int c = 0, n = panel * kIntPanel; c < columns(w, panel); ++c, ++n)
        out[r * ldo + n] = static_cast<float>(total[c]) * (w.scales[n] * x.scale[r]) + (w.bias ? w.bias[n] : 0.0f);
    }
}

#endif

void gemm_int(const Matrix& w, const Activations& x, int row, int m, int first, int last, float* out, int64_t ldo) {
#if defined(__AMX_INT8__)
  if (m >= kAmxRows) return amx_panels(w, x, row, m, first, last, out, ldo);
#endif
#if defined(PACELINE_BYTES)
  vnni_panels(w, x, row, m, first, last, out, ldo);
#else
  whole_panels(w, x, row, m, first, last, out, ldo);
#endif
}

}  // namespace
}  // namespace paceline
