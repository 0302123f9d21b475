// Products by AMX in bfloat16: rows are rounded to it once, weights (bfloat16, q4, q8) panel by panel while they are used,
// sums are float32. For more than a few rows.
//
// Rows lie as the tiles that are loaded, [row / 16][k / 32][16][32], so that a product reads them from front to back, and a
// weight's two panels of 16 outputs as [k / 32][2][16 pairs of inputs][16 outputs][2].
#pragma once

#include "rows.h"
#include "split_gemm.h"

namespace paceline {
namespace {

#if defined(__AMX_BF16__)

constexpr int kTile = kTileRows * kGroup;  // numbers of a tile
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

inline void save_narrow(uint16_t* to, vf low, vf high) {
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  std::memcpy(to, &both, sizeof both);
}

inline void save_narrow(uint16_t* to, vf x) {
  const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(to, &half, sizeof half);
}

void narrow(const float* x, int k, int row, uint16_t* tiles) {
  uint16_t* to = tiles + static_cast<int64_t>(row / kTileRows) * kTileRows * k + row % kTileRows * kGroup;
  for (int i = 0; i < k; i += kGroup, to += kTile) save_narrow(to, load(x + i), load(x + i + kLanes));
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
    const __m512i first = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)data));
    const __m512i second = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(data + kFloatPanel)));
    _mm512_store_si512(to, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
  }
}

// Groups [from, to) of two panels.
void narrow_panels(const Matrix& w, int left, int right, int from, int to, uint16_t* tiles) {
  for (int group = from; group < to; ++group, tiles += 2 * kTile) {
    const auto one = w.kind == Kind::q4 ? narrow_group<Kind::q4> : w.kind == Kind::q8 ? narrow_group<Kind::q8> : pair_rows;
    one(w, left, group, tiles);
    one(w, right, group, tiles + kTile);
  }
}

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

// Groups [from, until) of two panels of 16 outputs.
struct Piece {
  int left = 0, right = 0, from = 0, until = 0;

  int steps() const { return until - from; }
};

// The pieces of a product's weights as tiles, one after another. With few rows widening takes longer than multiplying: then
// the next piece is widened, group by group, beside the tiles of this one.
class Widened {
 public:
  Widened(const Matrix& w, int most, bool ahead, float* scratch) : w_(w), ahead_(ahead), rooms_{reinterpret_cast<uint16_t*>(scratch), reinterpret_cast<uint16_t*>(scratch) + most * 2 * kTile} {}

  // Go on to `now`, which was `later` before; `later` is empty after the last.
  const uint16_t* next(const Piece& now, const Piece& later) {
    room_ ^= ahead_;
    uint16_t* tiles = rooms_[room_];
    narrow_panels(w_, now.left, now.right, now.from + done_, now.until, tiles + done_ * 2 * kTile);
    later_ = later;
    done_ = 0;
    return tiles;
  }

  // Widen one more group of what comes next.
  void step() {
    if (!ahead_ || done_ >= later_.steps()) return;
    const int group = later_.from + done_;
    narrow_panels(w_, later_.left, later_.right, group, group + 1, rooms_[room_ ^ 1] + done_ * 2 * kTile);
    ++done_;
  }

 private:
  const Matrix& w_;
  const bool ahead_;
  uint16_t* rooms_[2];
  int room_ = 0, done_ = 0;
  Piece later_;
};

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
  Widened weights(w, most, m <= 2 * kTileRows, scratch);
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
                      weights.step();
                    });
    }
  }
  _tile_release();
}

// The sums of a block are gated while the next one is multiplied.
template <vf (*Gate)(vf)>
void gemm_gated(const Matrix& w, const uint16_t* rows, int row, int m, int first, int last, uint16_t* gated, float* scratch) {
  const TileConfig config;
  _tile_loadconfig(&config);
  alignas(64) float sums[2][2 * kTileRows * kFloatPanel];
  const int64_t below = static_cast<int64_t>(kTileRows) * w.k;
  const int half = w.n / 2, steps = w.k / kGroup, each = (2 * kTileRows + steps - 1) / steps;
  const auto piece = [&](int panel) { return panel < last ? Piece{panel, panel + half / kIntPanel, 0, steps} : Piece{}; };
  Widened weights(w, steps, m <= 2 * kTileRows, scratch);
  rows += row / kTileRows * below;
  Gated before;
  int turn = 0;
  for (int panel = first; panel < last; ++panel) {
    const uint16_t* tiles = weights.next(piece(panel), piece(panel + 1));
    for (int r = 0; r < m; r += 2 * kTileRows, turn ^= 1) {
      const int count = m - r < 2 * kTileRows ? m - r : 2 * kTileRows;
      narrow_rows(rows + r / kTileRows * below, below, count, steps, tiles, false, sums[turn], kFloatPanel * sizeof(float), [&](int step) {
        for (int i = step * each; i < before.rows && i < (step + 1) * each; ++i) before.save<Gate>(i);
        weights.step();
      });
      before = Gated(sums[turn], row + r, count, panel * kIntPanel, half, gated);
    }
  }
  for (int i = 0; i < before.rows; ++i) before.save<Gate>(i);
  _tile_release();
}

constexpr auto kNarrowRow = narrow;
constexpr auto kNarrowGemm = gemm_narrow;
constexpr auto kSiluGemm = gemm_gated<rough_silu>;
constexpr auto kGeluGemm = gemm_gated<gelu>;

#else

constexpr decltype(Kernels::narrow) kNarrowRow = nullptr;
constexpr decltype(Kernels::gemm_narrow) kNarrowGemm = nullptr;
constexpr decltype(Kernels::gemm_silu) kSiluGemm = nullptr, kGeluGemm = nullptr;

#endif

}  // namespace
}  // namespace paceline
