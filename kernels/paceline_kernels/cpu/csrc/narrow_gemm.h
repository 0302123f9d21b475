// Products by AMX in bfloat16: rows are rounded to it once, weights (bfloat16, q4, q8) panel by panel while they are used,
// sums are float32. For more than a few rows.
#pragma once

#include "rows.h"
#include "tiles.h"

namespace paceline {
namespace {

#if defined(__AMX_BF16__)

// Inputs at a time: 32 outputs' weights for them (40 KiB) stay in the first-level cache (48 KiB) over all rows.
constexpr int kInputs = 640;

constexpr float kLog2e = 1.44269504f;

// 2^x to some 13 bits, more than a bfloat16 has: the polynomial is that of least relative error on [-1/2, 1/2].
inline vf power_of_two(vf x) {
  const vf rest = (vf)_mm512_reduce_ps((__m512)x, 0);
  vf p = spread(0.0554906f);
  p = p * rest + 0.2422111f;
  p = p * rest + 0.6931471f;
  p = p * rest + 1.0f;
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)(x - rest));
}

// To some 12 bits, for what is rounded to bfloat16.
inline vf rough_silu(vf x) { return x * (vf)_mm512_rcp14_ps((__m512)(1.0f + power_of_two(x * -kLog2e))); }

// Add to the sums [32 or 16][32] of one or two tiles of rows, `below` numbers apart; `stride` in bytes. `beside(step)` is done
// in each step: the tiles' unit needs 64 cycles for one with two tiles of rows, in which the others have nothing to do.
template <bool Two, class Beside>
void narrow_block(const uint16_t* rows, int64_t below, int steps, const uint16_t* weights, bool add, float* sums, int64_t stride, const Beside& beside) {
  float* under = sums + kTileRows * stride / static_cast<int64_t>(sizeof(float));
  if (add) {
    _tile_loadd(0, sums, stride);
    _tile_loadd(1, sums + kIntPanel, stride);
    if (Two) _tile_loadd(2, under, stride);
    if (Two) _tile_loadd(3, under + kIntPanel, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (Two) _tile_zero(2);
    if (Two) _tile_zero(3);
  }
  for (int i = 0; i < steps; ++i, rows += kTile, weights += 2 * kTile) {
    _tile_loadd(6, weights, 64);
    _tile_loadd(4, rows, 64);
    _tile_loadd(7, weights + kTile, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (Two) _tile_loadd(5, rows + below, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (Two) _tile_dpbf16ps(2, 5, 6);
    if (Two) _tile_dpbf16ps(3, 5, 7);
    beside(i);
  }
  _tile_stored(0, sums, stride);
  _tile_stored(1, sums + kIntPanel, stride);
  if (Two) _tile_stored(2, under, stride);
  if (Two) _tile_stored(3, under + kIntPanel, stride);
}

inline void nothing(int) {}

template <class Beside>
inline void narrow_rows(const uint16_t* rows, int64_t below, int count, int steps, const uint16_t* weights, bool add, float* sums, int64_t stride, const Beside& beside) {
  if (count > kTileRows) narrow_block<true>(rows, below, steps, weights, add, sums, stride, beside);
  else narrow_block<false>(rows, below, steps, weights, add, sums, stride, beside);
}

// A corner [rows][cols] of a larger matrix to or from [32][32].
inline void copy_corner(const float* from, int64_t apart, float* to, int64_t apart_to, int rows, int cols) {
  for (int r = 0; r < rows; ++r) std::memcpy(to + r * apart_to, from + r * apart, cols * sizeof(float));
}

// One block of at most 32 rows by 32 outputs, in place where whole tiles are.
template <class Beside>
void narrow_corner(const uint16_t* rows, int64_t below, int count, int steps, const uint16_t* weights, bool add, float* out, int64_t ldo, int cols, const Beside& beside) {
  if (count % kTileRows == 0 && cols == kFloatPanel) return narrow_rows(rows, below, count, steps, weights, add, out, ldo * sizeof(float), beside);
  alignas(64) float sums[2 * kTileRows * kFloatPanel];
  if (add) copy_corner(out, ldo, sums, kFloatPanel, count, cols);
  narrow_rows(rows, below, count, steps, weights, add, sums, kFloatPanel * sizeof(float), beside);
  copy_corner(sums, kFloatPanel, out, ldo, count, cols);
}

// Fetch two rows of sums [32][32] in each step: no processor foresees so long strides.
inline void fetch_sums(const float* sums, int64_t ldo, int step) {
  if (step >= kTileRows) return;
  const float* row = sums + 2 * step * ldo;
  for (int line = 0; line < kFloatPanel; line += kLanes) {
    _mm_prefetch(row + line, _MM_HINT_T0);
    _mm_prefetch(row + ldo + line, _MM_HINT_T0);
  }
}

// A block of sums [rows][32] with the gate in front, which becomes 16 inputs from `column` on of the next product, which has k.
struct Gated {
  const float* sums = nullptr;
  int rows = 0;
  uint16_t* to = nullptr;
  int64_t below = 0;

  Gated() = default;
  Gated(const float* sums, int row, int rows, int column, int k, uint16_t* tiles)
      : sums(sums), rows(rows),
        to(tiles + static_cast<int64_t>(row / kTileRows) * kTileRows * k + column / kGroup * kTile + column % kGroup),
        below(static_cast<int64_t>(kTileRows) * k) {}

  // The gate's product with what it lets through, of row r.
  template <vf (*Gate)(vf)>
  void save(int r) const {
    const float* row = sums + r * kFloatPanel;
    save_narrow(to + r / kTileRows * below + r % kTileRows * kGroup, Gate(load(row)) * load(row + kIntPanel));
  }
};

// Start the sums of a panel with its bias.
void begin_with_bias(const Matrix& w, int column, int cols, int m, float* out, int64_t ldo) {
  for (int r = 0; r < m; ++r) std::memcpy(out + r * ldo + column, w.bias + column, cols * sizeof(float));
}

void gemm_narrow(const Matrix& w, const uint16_t* rows, int row, int m, int first, int last, const Target& to, float* scratch) {
  const TileConfig config;
  _tile_loadconfig(&config);
  const int64_t below = static_cast<int64_t>(kTileRows) * w.k;
  const int groups = w.k / kGroup, most = groups < kInputs / kGroup ? groups : kInputs / kGroup, parts = (groups + most - 1) / most;
  const auto piece = [&](int number) {
    const int panel = first + number / parts, from = number % parts * most;
    return panel < last ? Piece{2 * panel, 2 * panel + 1, from, groups - from < most ? groups : from + most} : Piece{};
  };
  Widened<1> weights(w, most, m <= 2 * kTileRows, scratch);
  rows += row / kTileRows * below;
  float* out = to.out + row * to.ldo;
  for (int number = 0; number < (last - first) * parts; ++number) {
    const Piece now = piece(number);
    const uint16_t* tiles = weights.next(now, piece(number + 1));
    const int column = now.left * kIntPanel, cols = w.n - column < kFloatPanel ? w.n - column : kFloatPanel;
    if (w.bias != nullptr && now.from == 0) begin_with_bias(w, column, cols, m, out, to.ldo);
    const bool add = to.add || w.bias != nullptr || now.from > 0;
    for (int r = 0; r < m; r += 2 * kTileRows) {
      float* block = out + r * to.ldo + column;
      const float* next = m - r >= 4 * kTileRows ? block + 2 * kTileRows * to.ldo : nullptr;
      narrow_corner(rows + r / kTileRows * below + now.from * kTile, below, m - r < 2 * kTileRows ? m - r : 2 * kTileRows, now.steps(), tiles, add, block, to.ldo, cols,
                    [&](int step) {
                      if (next != nullptr) fetch_sums(next, to.ldo, step);
                      weights.step(0);
                    });
    }
  }
  _tile_release();
}

// The sums of a block are gated while the next one is multiplied.
template <vf (*Gate)(vf)>
bool gemm_gated(const Matrix& w, const uint16_t* rows, int row, int m, int first, int last, uint16_t* gated, float* scratch) {
  const TileConfig config;
  _tile_loadconfig(&config);
  alignas(64) float sums[2][2 * kTileRows * kFloatPanel];
  const int64_t below = static_cast<int64_t>(kTileRows) * w.k;
  const int half = w.n / 2, steps = w.k / kGroup, each = (2 * kTileRows + steps - 1) / steps;
  const auto piece = [&](int panel) { return panel < last ? Piece{panel, panel + half / kIntPanel, 0, steps} : Piece{}; };
  Widened<1> weights(w, steps, m <= 2 * kTileRows, scratch);
  rows += row / kTileRows * below;
  Gated before;
  int turn = 0;
  for (int panel = first; panel < last; ++panel) {
    const uint16_t* tiles = weights.next(piece(panel), piece(panel + 1));
    for (int r = 0; r < m; r += 2 * kTileRows, turn ^= 1) {
      const int count = m - r < 2 * kTileRows ? m - r : 2 * kTileRows;
      narrow_rows(rows + r / kTileRows * below, below, count, steps, tiles, false, sums[turn], kFloatPanel * sizeof(float), [&](int step) {
        for (int i = step * each; i < before.rows && i < (step + 1) * each; ++i) before.save<Gate>(i);
        weights.step(0);
      });
      before = Gated(sums[turn], row + r, count, panel * kIntPanel, half, gated);
    }
  }
  for (int i = 0; i < before.rows; ++i) before.save<Gate>(i);
  _tile_release();
  return true;
}

constexpr Tiles kNarrowTiles = {split_row<1>, gemm_narrow, gemm_gated<rough_silu>, gemm_gated<gelu>};

#endif

}  // namespace
}  // namespace paceline
