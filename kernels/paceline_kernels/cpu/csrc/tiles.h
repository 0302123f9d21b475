// Rows and weights as the tiles that AMX multiplies, in bfloat16: each number rounded to one, or as a sum of two or three.
//
// A bfloat16 has 8 bits: a float16 number is the sum of two and a float32 number that of three, exactly but for parts that
// underflow. Rows lie as [row / 16][k / 32][parts][16][32], so that a product reads them from front to back, and two panels
// of 16 outputs of a weight as [k / 32][parts][2][16 pairs of inputs][16 outputs][2]; the first part is the largest.
#pragma once

#include <type_traits>

#include "amx_tiles.h"
#include "float_gemm.h"

namespace paceline {
namespace {

#if defined(__AMX_BF16__)

constexpr int kTile = kTileRows * kGroup;  // numbers of a tile

inline void save_narrow(uint16_t* to, vf low, vf high) {
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  std::memcpy(to, &both, sizeof both);
}

inline void save_narrow(uint16_t* to, vf x) {
  const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(to, &half, sizeof half);
}

// The nearest number of 8 bits; half goes away from zero.
inline vf top(vf x) { return (vf)(((vi)x + 0x8000) & static_cast<int32_t>(0xFFFF0000)); }

// The larger of magnitudes seen before and those of x, as bits: infinity and what isn't a number are the largest.
inline vi larger_bits(vi most, vf x) { return (vi)_mm512_max_epu32((__m512i)most, (__m512i)((vi)x & 0x7FFFFFFF)); }

// Whether products of numbers so large with weights below 2^32 stay far from infinity, in whatever order they are summed:
// that of the parts of a number may only be infinite where plain float32 would be.
inline bool tame(vi most) { return _mm512_cmpge_epu32_mask((__m512i)most, _mm512_set1_epi32(0x5F800000)) == 0; }  // 2^64

// Two times 16 numbers of a row of a tile as parts, `apart` numbers from one to the next.
template <int Parts>
inline void save_parts(uint16_t* to, int64_t apart, vf low, vf high) {
#pragma GCC unroll 3
  for (int part = 0; part < Parts; ++part, to += apart) {
    const vf a = part < Parts - 1 ? top(low) : low, b = part < Parts - 1 ? top(high) : high;
    save_narrow(to, a, b);
    low -= a;
    high -= b;
  }
}

// A row [k] as parts; false if it isn't tame, which matters where there is more than one.
template <int Parts>
bool split_row(const float* x, int k, int row, uint16_t* tiles) {
  uint16_t* to = tiles + static_cast<int64_t>(row / kTileRows) * kTileRows * k * Parts + row % kTileRows * kGroup;
  vi most{};
  for (int i = 0; i < k; i += kGroup, to += Parts * kTile) {
    const vf low = load(x + i), high = load(x + i + kLanes);
    most = larger_bits(larger_bits(most, low), high);
    save_parts<Parts>(to, kTile, low, high);
  }
  return Parts == 1 || tame(most);
}

// Two inputs of 16 outputs, rounded.
inline void save_pair(uint16_t* to, vf first, vf second) {
  const __m512i low = _mm512_srli_epi32((__m512i)((vi)first + 0x8000), 16);
  const __m512i high = (__m512i)((vi)second + 0x8000);
  _mm512_store_si512(to, _mm512_ternarylogic_epi32(high, _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000)), low, 0xEA));
}

template <int Left>
inline __m512i shifted(__m512i x) {
  if constexpr (Left >= 0) return _mm512_slli_epi32(x, Left);
  else return _mm512_srli_epi32(x, -Left);
}

// Bits [At, At + Bits) of each lane as 1 + number / 2^Bits: they go to the top of a mantissa, which saves a conversion.
template <int Bits, int At>
inline vf fraction(__m512i lanes) {
  constexpr int mask = ((1 << Bits) - 1) << (23 - Bits);
  return (vf)_mm512_ternarylogic_epi32(shifted<23 - Bits - At>(lanes), _mm512_set1_epi32(mask), _mm512_set1_epi32(0x3F800000), 0xEA);
}

// Four inputs of 16 outputs out of one vector: number j's bits are at 8j + At.
template <int Bits, int At>
inline void narrow_four(__m512i lanes, vf scale, vf minimum, uint16_t* to) {
  save_pair(to, fraction<Bits, At>(lanes) * scale + minimum, fraction<Bits, At + 8>(lanes) * scale + minimum);
  save_pair(to + kGroup, fraction<Bits, At + 16>(lanes) * scale + minimum, fraction<Bits, At + 24>(lanes) * scale + minimum);
}

// A group of 32 inputs of a panel of 16 outputs as one tile.
template <Kind K>
void narrow_group(const Matrix& w, int panel, int group, uint16_t* to) {
  constexpr float numbers_of = K == Kind::q4 ? 16.0f : 256.0f;
  const f16* numbers = group_scales<K>(w, panel, group);
  const vf d = load(numbers), scale = d * numbers_of, minimum = (K == Kind::q4 ? load(numbers + kIntPanel) : d * -128.0f) - scale;
  const uint8_t* data = group_data<K>(w, panel, group);
#pragma GCC unroll 8
  for (int v = 0; v < (K == Kind::q4 ? 4 : 8); ++v, to += 2 * kGroup) {
    fetch_ahead(data + 64 * v);
    const __m512i lanes = _mm512_loadu_si512(data + 64 * v);
    if constexpr (K == Kind::q4) {
      narrow_four<4, 0>(lanes, scale, minimum, to);
      narrow_four<4, 4>(lanes, scale, minimum, to + kTile / 2);
    } else {
      narrow_four<8, 0>(lanes, scale, minimum, to);
    }
  }
}

void pair_rows(const Matrix& w, int panel, int group, uint16_t* to) {
  const uint16_t* data = static_cast<const uint16_t*>(w.data) + (static_cast<int64_t>(panel / 2) * w.k + group * kGroup) * kFloatPanel + panel % 2 * kIntPanel;
  for (int i = 0; i < kGroup; i += 2, data += 2 * kFloatPanel, to += kGroup) {
    fetch_ahead(data);
    fetch_ahead(data + kFloatPanel);
    const __m512i first = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)data));
    const __m512i second = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(data + kFloatPanel)));
    _mm512_store_si512(to, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
  }
}

// Two inputs of 16 outputs as pairs of their upper halves.
inline void save_tops(uint16_t* to, vf first, vf second) {
  const __m512i low = _mm512_srli_epi32((__m512i)first, 16);
  _mm512_store_si512(to, _mm512_ternarylogic_epi32((__m512i)second, _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000)), low, 0xEA));
}

// Groups [from, until) of two panels of 16 outputs.
struct Piece {
  int left = 0, right = 0, from = 0, until = 0;

  int steps() const { return until - from; }
};

// The same as parts, `apart` numbers from one to the next; there must be enough of them for what the numbers hold.
template <int Parts>
inline void save_pair_parts(uint16_t* to, int64_t apart, vf first, vf second) {
#pragma GCC unroll 3
  for (int part = 0; part < Parts - 1; ++part, to += apart) {
    const vf a = top(first), b = top(second);
    save_tops(to, a, b);
    first -= a;
    second -= b;
  }
  save_tops(to, first, second);  // no more than 8 bits are left
}

// Pairs of inputs [from, until) of a group of two panels as parts.
template <int Parts, class W>
void split_pairs(const Matrix& w, const Piece& piece, int group, int from, int until, uint16_t* to) {
  const auto inputs_of = [&](int panel) {
    return static_cast<const W*>(w.data) + (static_cast<int64_t>(panel / 2) * w.k + group * kGroup + 2 * from) * kFloatPanel + panel % 2 * kIntPanel;
  };
  const W* at[2] = {inputs_of(piece.left), inputs_of(piece.right)};
  for (int pair = from; pair < until; ++pair)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      fetch_ahead(at[half]);
      fetch_ahead(at[half] + kFloatPanel);
      save_pair_parts<Parts>(to + half * kTile + pair * kGroup, 2 * kTile, load(at[half]), load(at[half] + kFloatPanel));
      at[half] += 2 * kFloatPanel;
    }
}

// Step `turn` of `Turns` in which a group of two panels becomes tiles.
template <int Parts, int Turns>
void lay_out_group(const Matrix& w, const Piece& piece, int group, int turn, uint16_t* to) {
  constexpr int kPairs = kGroup / 2;
  if constexpr (Parts > 1) {
    using W = std::conditional_t<Parts == 3, float, f16>;
    split_pairs<Parts, W>(w, piece, group, turn * kPairs / Turns, (turn + 1) * kPairs / Turns, to);
  } else {
    const auto one = w.kind == Kind::q4 ? narrow_group<Kind::q4> : w.kind == Kind::q8 ? narrow_group<Kind::q8> : pair_rows;
    one(w, piece.left, group, to);
    one(w, piece.right, group, to + kTile);
  }
}

// The pieces of a product's weights as tiles, one after another. With few rows laying them out takes longer than multiplying:
// then the next piece is laid out, group by group, beside the tiles of this one.
template <int Parts>
class Widened {
 public:
  static constexpr int kTurns = Parts * (Parts + 1) / 2;  // products of a step
  static constexpr int64_t kOfGroup = 2 * Parts * kTile;

  Widened(const Matrix& w, int most, bool ahead, float* scratch) : w_(w), ahead_(ahead), rooms_{reinterpret_cast<uint16_t*>(scratch), reinterpret_cast<uint16_t*>(scratch) + most * kOfGroup} {}

  // Go on to `now`, which was `later` before; `later` is empty after the last.
  const uint16_t* next(const Piece& now, const Piece& later) {
    room_ ^= ahead_;
    uint16_t* tiles = rooms_[room_];
    for (; done_ < now.steps(); ++done_) lay_out_group<Parts, 1>(w_, now, now.from + done_, 0, tiles + done_ * kOfGroup);
    later_ = later;
    done_ = 0;
    return tiles;
  }

  // Lay out one more group of what comes next, in so many turns.
  void step(int turn) {
    if (!ahead_ || done_ >= later_.steps()) return;
    lay_out_group<Parts, kTurns>(w_, later_, later_.from + done_, turn, rooms_[room_ ^ 1] + done_ * kOfGroup);
    done_ += turn == kTurns - 1;
  }

 private:
  const Matrix& w_;
  const bool ahead_;
  uint16_t* rooms_[2];
  int room_ = 0, done_ = 0;
  Piece later_;
};
#endif

}  // namespace
}  // namespace paceline
