// One output's weights out of a packed matrix of any kind.
#include "simd.h"

namespace paceline {
namespace {

template <class W>
void float_row(const Matrix& w, int output, float* to) {
  const W* data = static_cast<const W*>(w.data) + static_cast<int64_t>(output / kFloatPanel) * kFloatPanel * w.k + output % kFloatPanel;
  for (int i = 0; i < w.k; ++i) to[i] = value(data[static_cast<int64_t>(i) * kFloatPanel]);
}

void int8_row(const Matrix& w, int output, float* to) {
  const int8_t* data = static_cast<const int8_t*>(w.data) + static_cast<int64_t>(output / kIntPanel) * kIntPanel * w.kp + output % kIntPanel * 4;
  for (int i = 0; i < w.k; ++i) to[i] = static_cast<float>(data[i / 4 * 4 * kIntPanel + i % 4]) * w.scales[output];
}

void grouped_row(const Matrix& w, int output, float* to) {
  const bool four = w.kind == Kind::q4;
  const int groups = w.k / kGroup, lane = output % kIntPanel;
  const int64_t first = static_cast<int64_t>(output / kIntPanel) * groups;
  for (int g = 0; g < groups; ++g) {
    const uint8_t* data = static_cast<const uint8_t*>(w.data) + (first + g) * (four ? 256 : 512) + 4 * lane;
    const uint16_t* numbers = w.groups + (first + g) * (four ? 2 * kIntPanel : kIntPanel) + lane;
    const float scale = half_to_float(numbers[0]), minimum = four ? half_to_float(numbers[kIntPanel]) : -128 * scale;
    for (int i = 0; i < kGroup; ++i) {
      const int quad = four ? i % 16 / 4 : i / 4;
      const uint8_t byte = data[quad * 64 + i % 4];
      to[g * kGroup + i] = static_cast<float>(four ? (i < 16 ? byte & 15 : byte >> 4) : byte) * scale + minimum;
    }
  }
}

}  // namespace

void unpack_row(const Matrix& w, int output, float* to) {
  switch (w.kind) {
    case Kind::f32: return float_row<float>(w, output, to);
    case Kind::bf16: return float_row<bf16>(w, output, to);
    case Kind::f16: return float_row<f16>(w, output, to);
    case Kind::int8: return int8_row(w, output, to);
    case Kind::q4:
    case Kind::q8: return grouped_row(w, output, to);
  }
}

}  // namespace paceline
