// The tiles' shape, the same for every product: sixteen rows of 64 bytes each.
#pragma once

#include <cstdint>

#include "simd.h"

namespace paceline {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

}  // namespace
}  // namespace paceline
