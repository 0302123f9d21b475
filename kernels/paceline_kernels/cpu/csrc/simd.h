// Vectors of this translation unit's width, by the compiler's vector extensions: the same code on SSE, AVX2, AVX-512, NEON.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kLanes = kBytes / 4;

using vf = float __attribute__((vector_size(kBytes)));
using vi = int32_t __attribute__((vector_size(kBytes)));

inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// As many of the numbers at p as there are, then zeros.
inline vf load_some(const float* p, int count) {
  if (count >= kLanes) return load(p);
  vf v{};
  if (count > 0) std::memcpy(&v, p, count * sizeof(float));
  return v;
}

inline void save(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

// Fetch into the second-level cache what is read 8 KiB further on: memory answers late, and the processor looks ahead within a
// page of 4 KiB only. A pass of one row over weights of 425 MB took 16.4 ms without it and 14 so.
template <class T>
inline void fetch_ahead(const T* p) {
  __builtin_prefetch(reinterpret_cast<const char*>(p) + 8192, 0, 2);
}

inline vf spread(float x) { return x - vf{}; }

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  uint32_t bits = static_cast<uint32_t>(h & 0x7fff) << 13;
  float value;
  std::memcpy(&value, &bits, 4);
  value *= 0x1p112f;  // moves the exponent's bias, and makes denormals right
  if ((h & 0x7c00) == 0x7c00) value = (h & 0x3ff) ? NAN : INFINITY;
  std::memcpy(&bits, &value, 4);
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t float_to_half(float x) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT), 0));
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  float value;
  std::memcpy(&value, &rest, 4);
  if (rest < 0x38800000) return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(value * 0x1p24f)));
  const uint32_t even = rest >> 13 & 1;
  return static_cast<uint16_t>(sign | ((rest - 0x38000000 + 0xfff + even) >> 13));
#endif
}

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

inline vf load(const bf16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  vi v;
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i].bits) << 16);
  return (vf)v;
#endif
}

inline vf load(const f16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vf v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(p[i].bits);
  return v;
#endif
}

inline float value(float x) { return x; }
inline float value(f16 x) { return half_to_float(x.bits); }
inline float value(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}

inline void put(float x, float* to) { *to = x; }
inline void put(float x, f16* to) { to->bits = float_to_half(x); }
inline void put(float x, bf16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  to->bits = nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float sum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
#endif
}

inline int sum(vi v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
#endif
}

inline float highest(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
#endif
}

// The whole number nearest to x, |x| < 2^22: adding 1.5 · 2^23 leaves it in the mantissa.
inline vi rounded(vf x) { return (vi)(x + 12582912.0f) - 0x4B400000; }

// The low byte, or the low two, of each lane.
inline void put_bytes(vi v, void* to) {
  using Bytes = int8_t __attribute__((vector_size(kLanes)));
  const Bytes bytes = __builtin_convertvector(v, Bytes);
  std::memcpy(to, &bytes, sizeof bytes);
}

inline void put_words(vi v, void* to) {
  using Words = int16_t __attribute__((vector_size(2 * kLanes)));
  const Words words = __builtin_convertvector(v, Words);
  std::memcpy(to, &words, sizeof words);
}

// Rounds to bfloat16, half up.
inline void save(bf16* to, vf x) { put_words(((vi)x + 0x8000) >> 16, to); }

inline void save(f16* to, vf x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) to[i].bits = float_to_half(x[i]);
#endif
}

// Lanes of two vectors a and b that lie `Half` apart: with bit `Half` of the lane clear, a's lane, else b's lane before it
// (`Early`), or a's lane behind it, else b's.
template <int Half, bool Early>
inline vi crossed() {
  vi lanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int own = Early ? lane : lane + Half, other = kLanes + (Early ? lane - Half : lane);
    lanes[lane] = lane & Half ? other : own;
  }
  return lanes;
}

inline vf larger(vf a, vf b) { return a > b ? a : b; }
inline vf smaller(vf a, vf b) { return a < b ? a : b; }
inline vf plus(vf a, vf b) { return a + b; }

// All lanes of each of kLanes vectors put together by `Two`, in the vectors' order: halves of two vectors at a time, so that
// kLanes - 1 operations do it all.
template <vf (*Two)(vf, vf), int Half = 1>
inline vf folded(vf* v) {
  if constexpr (Half == kLanes) {
    return v[0];
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / (2 * Half); ++i) {
      const vf a = v[2 * i], b = v[2 * i + 1];
      v[i] = Two(__builtin_shuffle(a, b, crossed<Half, true>()), __builtin_shuffle(a, b, crossed<Half, false>()));
    }
    return folded<Two, 2 * Half>(v);
  }
}

// Turn kLanes vectors of kLanes numbers, in place.
template <int Half = 1>
inline void transpose(vf* v) {
  if constexpr (Half < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & Half) continue;
      const vf a = v[i], b = v[i + Half];
      v[i] = __builtin_shuffle(a, b, crossed<Half, true>());
      v[i + Half] = __builtin_shuffle(a, b, crossed<Half, false>());
    }
    transpose<2 * Half>(v);
  }
}

// e^x within 2 units of the last place: 2^n · e^r with |r| ≤ ln 2 / 2 (coefficients of Cephes' expf).
inline vf exponential(vf x) {
  x = smaller(larger(x, spread(-87.3f)), spread(88.3f));
  const vf shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 · 2^23 rounds to a whole number
  const vi n = (vi)shifted - 0x4B400000;
  const vf whole = shifted - 12582912.0f;
  const vf r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
  vf p = spread(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (vf)((n + 127) << 23);
}

inline vf tangent(vf x) {  // tanh
  const vf e = exponential(x * 2.0f);
  return 1.0f - 2.0f / (e + 1.0f);
}

}  // namespace
}  // namespace paceline
