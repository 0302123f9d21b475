// Products by AMX with numbers as sums of bfloat16 parts: float16 weights as two, float32 ones as three, activations as many
// as the weights. What two parts multiply is summed but for the smallest: x · w ≈ xh · wh + xh · wl + xl · wh with two, which
// leaves out some 2^-16 of a product, and with three the six products that leave out 2^-24 (Henry, Tang, Heinecke: Leveraging
// the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations, ARITH 2019). A tile's product is
// sixteen times as quick as float32's, so six are more than twice as quick.
//
// Sums are float32, of kSplitInputs inputs at a time, in an order that doesn't depend on how many rows there are. AMX takes
// what is below 2^-126 for zero.
#pragma once

#include "narrow_gemm.h"

namespace paceline {
namespace {

#if defined(__AMX_BF16__)

// The parts of a row and of the weights that one product is of; 0 is the largest. Small terms come first.
struct Term {
  int row, weight;
};
constexpr Term kOfTwo[] = {{0, 1}, {0, 0}, {1, 0}}, kOfThree[] = {{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 2}, {0, 0}};

// Term I of a step: tiles 0 to 3 sum, 4 and 5 hold rows, 6 and 7 weights. What the term before has loaded stays.
template <int Parts, bool Two, int I>
inline void split_term(const uint16_t* rows, int64_t below, const uint16_t* weights) {
  constexpr const Term* terms = Parts == 3 ? kOfThree : kOfTwo;
  constexpr Term term = terms[I], before = I == 0 ? Term{-1, -1} : terms[I - (I > 0)];
  if (term.row != before.row) _tile_loadd(4, rows + term.row * kTile, 64);
  if (term.weight != before.weight) _tile_loadd(6, weights + term.weight * 2 * kTile, 64);
  _tile_dpbf16ps(0, 4, 6);
  if (term.weight != before.weight) _tile_loadd(7, weights + term.weight * 2 * kTile + kTile, 64);
  _tile_dpbf16ps(1, 4, 7);
  if (!Two) return;
  if (term.row != before.row) _tile_loadd(5, rows + below + term.row * kTile, 64);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Sums [32 or 16][32] of one or two tiles of rows, `below` numbers apart; `stride` in bytes. `beside(step, turn)` is done after each term: with two
// tiles of rows the tiles' unit needs 64 cycles for it, in which the others have nothing to do.
template <int Parts, bool Two, class Beside>
void split_block(const uint16_t* rows, int64_t below, int steps, const uint16_t* weights, float* sums, int64_t stride, const Beside& beside) {
  _tile_zero(0);
  _tile_zero(1);
  if (Two) _tile_zero(2);
  if (Two) _tile_zero(3);
  for (int i = 0; i < steps; ++i, rows += Parts * kTile, weights += 2 * Parts * kTile) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
      ((split_term<Parts, Two, I>(rows, below, weights), beside(i, I)), ...);
    }(std::make_integer_sequence<int, Parts*(Parts + 1) / 2>{});
  }
  float* under = sums + kTileRows * stride / static_cast<int64_t>(sizeof(float));
  _tile_stored(0, sums, stride);
  _tile_stored(1, sums + kIntPanel, stride);
  if (Two) _tile_stored(2, under, stride);
  if (Two) _tile_stored(3, under + kIntPanel, stride);
}

// A block's sums [rows][32] of some inputs, which are added to those of the inputs before, `so_far` (null: there are none),
// and left there or, after the last inputs, where the product's sums go.
struct Sums {
  const float* sums = nullptr;
  float *so_far = nullptr, *to = nullptr;
  int row = 0, rows = 0, panel = 0;  // the left panel of 16 outputs

  template <class Finish>
  void settle(int r, const Finish& finish) const {
    vf left = load(sums + r * kFloatPanel), right = load(sums + r * kFloatPanel + kIntPanel);
    if (so_far != nullptr) {
      left += load(so_far + r * kFloatPanel);
      right += load(so_far + r * kFloatPanel + kIntPanel);
    }
    if (to == nullptr) return finish(row + r, panel, left, right);
    save(to + r * kFloatPanel, left);
    save(to + r * kFloatPanel + kIntPanel, right);
  }
};

// Leaves sums in rows of a matrix, with the weights' bias.
struct Leave {
  const Matrix& w;
  const Target& to;

  void operator()(int row, int panel, vf left, vf right) const {
    half(row, panel * kIntPanel, left);
    half(row, panel * kIntPanel + kIntPanel, right);
  }

 private:
  void half(int row, int column, vf sums) const {
    const int count = w.n - column;
    float* out = to.out + row * to.ldo + column;
    if (count <= 0) return;
    if (w.bias != nullptr) sums += load_some(w.bias + column, count);
    if (to.add) sums += load_some(out, count);
    if (count >= kLanes) save(out, sums);
    else std::memcpy(out, &sums, count * sizeof(float));
  }
};

// Lets the right half of sums through the gate of the left one, and splits them as rows [k] of the next product.
template <int Parts, vf (*Gate)(vf)>
struct LetThrough {
  uint16_t* tiles;
  int k;
  vi& most;

  void operator()(int row, int panel, vf gate, vf up) const {
    vf left = Gate(gate) * up;
    most = larger_bits(most, left);
    const int column = panel * kIntPanel;
    uint16_t* to = tiles + (static_cast<int64_t>(row / kTileRows) * kTileRows * k + column / kGroup * kTile) * Parts + row % kTileRows * kGroup + column % kGroup;
    for (int part = 0; part < Parts; ++part, to += kTile) {
      const vf a = part < Parts - 1 ? top(left) : left;
      save_narrow(to, a);
      left -= a;
    }
  }
};

// The product of rows with pairs [first, last) of panels of 16 outputs: panel `step` · p with the one `apart` behind it. A
// block's sums settle while the next one is multiplied, and the next weights are laid out then.
template <int Parts, class Finish>
void split_panels(const Matrix& w, const uint16_t* rows, int row, int m, int first, int last, int step, int apart, const Finish& finish, float* scratch) {
  const TileConfig config;
  _tile_loadconfig(&config);
  alignas(64) float sums[2][2 * kTileRows * kFloatPanel];
  const int64_t below = static_cast<int64_t>(kTileRows) * w.k * Parts;
  const int groups = w.k / kGroup, most = kSplitInputs / kGroup, parts = (groups + most - 1) / most;
  const auto piece = [&](int number) {
    const int pair = first + number / parts, left = step * pair, from = number % parts * most;
    return pair < last ? Piece{left, left + apart, from, groups - from < most ? groups : from + most} : Piece{};
  };
  float* all = scratch + Widened<Parts>::kOfGroup * most;
  Widened<Parts> weights(w, most, true, scratch);
  rows += row / kTileRows * below;
  Sums before;
  int turn = 0;
  for (int number = 0; number < (last - first) * parts; ++number) {
    const Piece now = piece(number);
    const uint16_t* tiles = weights.next(now, piece(number + 1));
    const int each = (2 * kTileRows + now.steps() - 1) / now.steps();
    const bool ends = now.until == groups;
    for (int r = 0; r < m; r += 2 * kTileRows, turn ^= 1) {
      const int count = m - r < 2 * kTileRows ? m - r : 2 * kTileRows;
      const auto beside = [&](int step, int term) {
        if (term == 0)
          for (int i = step * each; i < before.rows && i < (step + 1) * each; ++i) before.settle(i, finish);
        weights.step(term);
      };
      const uint16_t* at = rows + r / kTileRows * below + now.from * Parts * kTile;
      if (count > kTileRows) split_block<Parts, true>(at, below, now.steps(), tiles, sums[turn], kFloatPanel * sizeof(float), beside);
      else split_block<Parts, false>(at, below, now.steps(), tiles, sums[turn], kFloatPanel * sizeof(float), beside);
      float* so_far = all + r * kFloatPanel;
      before = {sums[turn], now.from > 0 ? so_far : nullptr, ends ? nullptr : so_far, row + r, count, now.left};
    }
  }
  for (int i = 0; i < before.rows; ++i) before.settle(i, finish);
  _tile_release();
}

template <int Parts>
void gemm_split(const Matrix& w, const uint16_t* rows, int row, int m, int first, int last, const Target& to, float* scratch) {
  split_panels<Parts>(w, rows, row, m, first, last, 2, 1, Leave{w, to}, scratch);
}

template <int Parts, vf (*Gate)(vf)>
bool gemm_gated_split(const Matrix& w, const uint16_t* rows, int row, int m, int first, int last, uint16_t* gated, float* scratch) {
  vi most{};
  split_panels<Parts>(w, rows, row, m, first, last, 1, w.n / kFloatPanel, LetThrough<Parts, Gate>{gated, w.n / 2, most}, scratch);
  return tame(most);
}

template <int Parts>
constexpr Tiles kSplitTiles = {split_row<Parts>, gemm_split<Parts>, gemm_gated_split<Parts, silu>, gemm_gated_split<Parts, gelu>};
constexpr const Tiles* kTiles[] = {&kNarrowTiles, &kSplitTiles<2>, &kSplitTiles<3>};
// Beyond these rows rounding the weights to bfloat16 costs less than the integer products save.
constexpr int kMostGroupedRows = 8;

#else

constexpr const Tiles* kTiles[] = {nullptr, nullptr, nullptr};
// Beyond these rows widening the weights to float32 costs less than the integer products take longer.
constexpr int kMostGroupedRows = kBytes == 64 ? 48 : 16;

#endif

}  // namespace
}  // namespace paceline
