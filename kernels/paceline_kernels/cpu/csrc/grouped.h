// q4 and q8 weights × activations of 16 bits, both with a scale per group of 32 inputs: for few rows, where a product costs
// what reading its weights costs. A group's sum of whole numbers is exact (below 2^28), groups are added in float32, so the
// weights count as they are, and a row is rounded to 15 bits of each group's largest number.
#pragma once

#include "simd.h"

#if defined(__AVX512VNNI__)
#define PACELINE_BYTES 1
#endif

namespace paceline {
namespace {

// The largest quantised activation: it splits into two signed bytes.
constexpr float kLargest = 32512.0f;

void quantise_groups(const Matrix& w, const float* x, int row, const Activations& to) {
  const int64_t at = static_cast<int64_t>(row) * w.k, groups = w.k / kGroup;
  for (int g = 0; g < groups; ++g, x += kGroup) {
    vf most{};
    for (int i = 0; i < kGroup; i += kLanes) most = larger(most, larger(load(x + i), -load(x + i)));
    const float peak = highest(most), inverse = peak > 0 ? kLargest / peak : 0, scale = peak / kLargest;
    vi total{};
    for (int i = 0; i < kGroup; i += kLanes) {
      const vi q = rounded(load(x + i) * inverse);
      total += q;
#if defined(PACELINE_BYTES)
      const vi low = (q << 24) >> 24;
      put_bytes(low, to.low + at + g * kGroup + i);
      put_bytes((q - low) >> 8, to.high + at + g * kGroup + i);
#else
      put_words(q, to.whole + at + g * kGroup + i);
#endif
    }
    const int sum_of = sum(total);
    to.scale[row * groups + g] = scale;
    to.sum[row * groups + g] = static_cast<float>(sum_of) * scale;
    to.zero[row * groups + g] = -128 * sum_of;
  }
}

template <Kind K>
const uint8_t* group_data(const Matrix& w, int panel, int group) {
  constexpr int64_t bytes = K == Kind::q4 ? 256 : 512;
  return static_cast<const uint8_t*>(w.data) + (static_cast<int64_t>(panel) * (w.k / kGroup) + group) * bytes;
}

template <Kind K>
const f16* group_scales(const Matrix& w, int panel, int group) {
  constexpr int64_t numbers = K == Kind::q4 ? 2 * kIntPanel : kIntPanel;
  return reinterpret_cast<const f16*>(w.groups) + (static_cast<int64_t>(panel) * (w.k / kGroup) + group) * numbers;
}

inline void finish_row(const Matrix& w, int panel, const float* sums, float* out) {
  const int at = panel * kIntPanel, cols = w.n - at < kIntPanel ? w.n - at : kIntPanel;
  for (int c = 0; c < cols; ++c) out[at + c] = sums[c] + (w.bias == nullptr ? 0.0f : w.bias[at + c]);
}

#if defined(PACELINE_BYTES)

// The eight vectors of a group: 16 outputs × 4 inputs each, unsigned.
template <Kind K>
inline void group_vectors(const uint8_t* data, __m512i (&to)[8]) {
  if constexpr (K == Kind::q4) {
    const __m512i half = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const __m512i both = _mm512_loadu_si512(data + 64 * v);
      to[v] = _mm512_and_si512(both, half);
      to[v + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
    }
  } else {
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) to[v] = _mm512_loadu_si512(data + 64 * v);
  }
}

inline __m512i four(const uint8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

// R rows times one panel. The rows' sums of a group don't depend on one another, which hides their latency.
template <Kind K, int R>
void grouped_block(const Matrix& w, const Activations& x, int row, int panel, float* out, int64_t ldo) {
  const int groups = w.k / kGroup;
  const int64_t at = static_cast<int64_t>(row) * w.k;
  const float *scale = x.scale + static_cast<int64_t>(row) * groups, *sums = x.sum + static_cast<int64_t>(row) * groups;
  const int32_t* zero = x.zero + static_cast<int64_t>(row) * groups;
  __m512 acc[R] = {};
  for (int g = 0; g < groups; ++g) {
    __m512i column[8];
    const uint8_t* data = group_data<K>(w, panel, g);
    for (int v = 0; v < (K == Kind::q4 ? 4 : 8); ++v) fetch_ahead(data + 64 * v);
    group_vectors<K>(data, column);
    const f16* numbers = group_scales<K>(w, panel, g);
    fetch_ahead(numbers);
    const __m512 d = (__m512)load(numbers);
    __m512 m{};
    if constexpr (K == Kind::q4) m = (__m512)load(numbers + kIntPanel);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const int64_t from = at + static_cast<int64_t>(r) * w.k + g * kGroup;
      __m512i low = K == Kind::q8 ? _mm512_set1_epi32(zero[r * groups + g]) : _mm512_setzero_si512(), high{};
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v) {
        low = _mm512_dpbusd_epi32(low, column[v], four(x.low + from + 4 * v));
        high = _mm512_dpbusd_epi32(high, column[v], four(x.high + from + 4 * v));
      }
      const __m512 total = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
      acc[r] = _mm512_fmadd_ps(total, _mm512_mul_ps(d, _mm512_set1_ps(scale[r * groups + g])), acc[r]);
      if constexpr (K == Kind::q4) acc[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(sums[r * groups + g]), acc[r]);
    }
  }
  for (int r = 0; r < R; ++r) finish_row(w, panel, reinterpret_cast<const float*>(&acc[r]), out + (row + r) * ldo);
}

template <Kind K, int R>
void grouped_rows(const Matrix& w, const Activations& x, int row, int m, int panel, float* out, int64_t ldo) {
  for (; m >= R; m -= R, row += R) grouped_block<K, R>(w, x, row, panel, out, ldo);
  if constexpr (R > 1) {
    if (m > 0) grouped_rows<K, R / 2>(w, x, row, m, panel, out, ldo);
  }
}

constexpr int kGroupedRows = 8;

#else

// The group's numbers as bytes [8][16][4], unsigned.
template <Kind K>
const uint8_t* group_bytes(const uint8_t* data, uint8_t* scratch) {
  if constexpr (K == Kind::q8) return data;
  for (int i = 0; i < 256; ++i) {
    scratch[i] = data[i] & 15;
    scratch[i + 256] = data[i] >> 4;
  }
  return scratch;
}

// Sums of 16 outputs over a group, of one row.
inline void group_sums(const uint8_t* bytes, const int16_t* x, int32_t* total) {
#if defined(__AVX2__)
  __m256i acc[4] = {};  // of four outputs, two sums each
  for (int v = 0; v < 8; ++v, bytes += 64) {
    int64_t inputs;
    std::memcpy(&inputs, x + 4 * v, 8);
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const __m256i weights = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(bytes + 16 * q)));
      acc[q] = _mm256_add_epi32(acc[q], _mm256_madd_epi16(weights, _mm256_set1_epi64x(inputs)));
    }
  }
  for (int q = 0; q < 4; q += 2) {
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_hadd_epi32(acc[q], acc[q + 1]), 0xD8);
    _mm256_storeu_si256((__m256i*)(total + 4 * q), pairs);
  }
#else
  for (int n = 0; n < kIntPanel; ++n) total[n] = 0;
  for (int v = 0; v < 8; ++v)
    for (int n = 0; n < kIntPanel; ++n)
      for (int j = 0; j < 4; ++j) total[n] += bytes[64 * v + 4 * n + j] * x[4 * v + j];
#endif
}

template <Kind K, int>
void grouped_rows(const Matrix& w, const Activations& x, int row, int m, int panel, float* out, int64_t ldo) {
  const int groups = w.k / kGroup;
  for (int r = row; r < row + m; ++r) {
    alignas(64) float sums[kIntPanel] = {};
    for (int g = 0; g < groups; ++g) {
      alignas(64) uint8_t scratch[512];
      alignas(64) int32_t total[kIntPanel];
      const int64_t at = static_cast<int64_t>(r) * groups + g;
      group_sums(group_bytes<K>(group_data<K>(w, panel, g), scratch), x.whole + at * kGroup, total);
      const f16* numbers = group_scales<K>(w, panel, g);
      const int32_t zero = K == Kind::q8 ? x.zero[at] : 0;
      const float scale = x.scale[at], sum_of = x.sum[at];
      for (int c = 0; c < kIntPanel; c += kLanes) {
        vi whole;
        std::memcpy(&whole, total + c, sizeof whole);
        vf s = load(sums + c) + __builtin_convertvector(whole + zero, vf) * (load(numbers + c) * scale);
        if constexpr (K == Kind::q4) s += load(numbers + kIntPanel + c) * sum_of;
        save(sums + c, s);
      }
    }
    finish_row(w, panel, sums, out + r * ldo);
  }
}

constexpr int kGroupedRows = 1;

#endif

template <Kind K>
void grouped_panels(const Matrix& w, const Activations& x, int row, int m, int first, int last, float* out, int64_t ldo) {
  for (int panel = first; panel < last; ++panel) grouped_rows<K, kGroupedRows>(w, x, row, m, panel, out, ldo);
}

void gemm_grouped(const Matrix& w, const Activations& x, int row, int m, int first, int last, float* out, int64_t ldo) {
  if (w.kind == Kind::q4) grouped_panels<Kind::q4>(w, x, row, m, first, last, out, ldo);
  else grouped_panels<Kind::q8>(w, x, row, m, first, last, out, ldo);
}

}  // namespace
}  // namespace paceline
