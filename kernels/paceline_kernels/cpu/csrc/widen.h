// Panels of weights in fewer bits, widened to float32 panels [k][32]: for many rows, where widening costs little beside them.
#pragma once

#include "grouped.h"

namespace paceline {
namespace {

// Four inputs of 16 outputs, byte j of each 32-bit lane for input j: `to` [4][32] gets (bits at `shift`) · scale + minimum.
template <int Bits>
inline void widen_four(const uint8_t* data, int shift, const float* scale, const float* minimum, float* to) {
  for (int c = 0; c < kIntPanel; c += kLanes) {
    vi lanes;
    std::memcpy(&lanes, data + 4 * c, sizeof lanes);
    const vf d = load(scale + c), m = load(minimum + c);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const vi number = (lanes >> (8 * j + shift)) & ((1 << Bits) - 1);
      save(to + j * kFloatPanel + c, __builtin_convertvector(number, vf) * d + m);
    }
  }
}

// A group of 32 inputs of one panel of 16 outputs into the columns [column, column + 16) of `to` [32][32].
template <Kind K>
void widen_group(const Matrix& w, int panel, int group, float* to) {
  alignas(64) float scale[kIntPanel], minimum[kIntPanel];
  const f16* numbers = group_scales<K>(w, panel, group);
  for (int c = 0; c < kIntPanel; c += kLanes) {
    save(scale + c, load(numbers + c));
    save(minimum + c, K == Kind::q4 ? load(numbers + kIntPanel + c) : load(numbers + c) * -128.0f);
  }
  const uint8_t* data = group_data<K>(w, panel, group);
  for (int v = 0; v < (K == Kind::q4 ? 4 : 8); ++v, data += 64, to += 4 * kFloatPanel) {
    if constexpr (K == Kind::q4) {
      widen_four<4>(data, 0, scale, minimum, to);
      widen_four<4>(data, 4, scale, minimum, to + 16 * kFloatPanel);
    } else {
      widen_four<8>(data, 0, scale, minimum, to);
    }
  }
}

template <class W>
void widen_rows(const Matrix& w, int panel, int from, int count, float* to) {
  const W* data = static_cast<const W*>(w.data) + (static_cast<int64_t>(panel) * w.k + from) * kFloatPanel;
  for (int i = 0; i < count * kFloatPanel; i += kLanes) save(to + i, load(data + i));
}

// Inputs [from, from + count) of a float panel, [count][32]; for q4 and q8 both are multiples of the group.
void widen(const Matrix& w, int panel, int from, int count, float* to) {
  if (w.kind == Kind::bf16) widen_rows<bf16>(w, panel, from, count, to);
  if (w.kind == Kind::f16) widen_rows<f16>(w, panel, from, count, to);
  if (!w.grouped()) return;
  for (int i = 0; i < count; i += kGroup)
    for (int half = 0; half < 2; ++half) {
      float* corner = to + i * kFloatPanel + half * kIntPanel;
      if (w.kind == Kind::q4) widen_group<Kind::q4>(w, 2 * panel + half, (from + i) / kGroup, corner);
      else widen_group<Kind::q8>(w, 2 * panel + half, (from + i) / kGroup, corner);
    }
}

}  // namespace
}  // namespace paceline
