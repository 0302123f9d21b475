#include "product.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace paceline {
namespace {

// Rows of a block of a product: their quantised bytes (2 · 256 · 576) stay in the second-level cache over all panels.
constexpr int kBlockRows = 256;
// The same for rows as tiles: so many bytes of them leave half of a second-level cache of 2 MiB free. A panel is widened
// once for each block, so the larger the better.
constexpr int kBlockBytes = 1 << 20;
// Fewer rows leave most of a tile empty; with float32, whose weights must be split, up to 16 are as quick whole.
constexpr int kFewestForTiles = 5, kFewestForThreeParts = 17;
// Tasks per thread: enough that a thread which lost its core leaves little behind, few enough that sharing costs nothing.
constexpr int kShares = 6;
// Rows that one task prepares: some microseconds' work.
constexpr int kRowsPerTask = 4;
constexpr int kPair = 2 * kTileRows;

int ceil_div(int a, int b) { return (a + b - 1) / b; }
int64_t padded(int rows) { return static_cast<int64_t>(ceil_div(rows, kPair)) * kPair; }

int tiles_block(const Matrix& w) { return std::max(kPair, kBlockBytes / (2 * w.parts() * w.k) / kPair * kPair); }

// Floats of scratch that a thread needs for a block of rows as tiles.
int64_t tiles_scratch(const Matrix& w) { return w.parts() == 1 ? gemm_scratch(w.k) : split_scratch(w.parts(), tiles_block(w)); }

}  // namespace

void* Room::take_bytes(int64_t bytes) {
  if (bytes > size_) {
    release();
    size_ = (bytes + bytes / 4 + 63) / 64 * 64;
    data_ = std::aligned_alloc(64, static_cast<size_t>(size_));
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_, 0, static_cast<size_t>(size_));
  }
  return data_;
}

void Room::release() {
  std::free(data_);
  data_ = nullptr;
  size_ = 0;
}

Product::Way Product::way(const Matrix& w, int m) const {
  if (w.integer()) return Way::integer;
  if (w.grouped() && m <= kernels_.grouped_rows) return Way::grouped;
  const int fewest = w.kind == Kind::f32 ? kFewestForThreeParts : kFewestForTiles;
  return tiles(w) == nullptr || !w.tame || w.k % kGroup != 0 || m < fewest ? Way::whole : Way::tiles;
}

Activations Product::parts(Way way, const Matrix& w, int m) {
  const int wide = w.integer() ? w.kp : w.k;
  const int64_t rows = padded(m), groups = way == Way::grouped ? w.k / kGroup : 1;
  return {whole_.take<int16_t>(rows * wide), low_.take<uint8_t>(rows * wide), high_.take<uint8_t>(rows * wide),
          scale_.take<float>(m * groups), sum_.take<float>(m * groups), zero_.take<int32_t>(m * groups)};
}

Product::Prepared Product::prepared(Way way, const Matrix& w, const Rows& rows, int m) {
  if (way == Way::whole && rows.norm == nullptr) return {way, rows, {}};
  const Activations to = way == Way::whole || way == Way::tiles ? Activations{} : parts(way, w, m);
  uint16_t* tiles = way == Way::tiles ? tiles_.take<uint16_t>(padded(m) * w.k * w.parts()) : nullptr;
  std::atomic<bool> tame = true;
  float* normed = rows.norm == nullptr ? nullptr : rows_.take<float>(static_cast<int64_t>(way == Way::whole ? m : team_.size()) * w.k);
  team_.each(ceil_div(m, kRowsPerTask), [&](int task, int worker) {
    for (int row = task * kRowsPerTask; row < std::min(m, (task + 1) * kRowsPerTask); ++row) {
      const float* x = rows.x + row * rows.apart;
      if (rows.norm != nullptr) {
        float* own = normed + static_cast<int64_t>(way == Way::whole ? row : worker) * w.k;
        kernels_.rms_norm(x, rows.norm, w.k, rows.eps, own);
        x = own;
      }
      switch (way) {
        case Way::whole: break;
        case Way::integer: kernels_.quantise(w, x, row, to); break;
        case Way::grouped: kernels_.quantise_groups(w, x, row, to); break;
        case Way::tiles:
          if (!this->tiles(w)->rows(x, w.k, row, tiles)) tame = false;
          break;
      }
    }
  });
  return tame ? Prepared{way, {normed, w.k}, to, tiles} : prepared(Way::whole, w, rows, m);
}

template <class Body>
void Product::pieces(int m, int block, int panels, int even, int64_t room, const Body& body) {
  const int blocks = ceil_div(m, block);
  const int rows = static_cast<int>(padded(ceil_div(m, blocks)));  // as even as whole tiles allow
  int each = std::max(1, ceil_div(panels * blocks, team_.size() * kShares));
  each += each % even;
  const int parts = ceil_div(panels, std::min(each, panels));
  float* scratch = room == 0 ? nullptr : scratch_.take<float>(room * team_.size());
  team_.each(ceil_div(m, rows) * parts, [&](int task, int worker) {
    const int row = task / parts * rows, first = task % parts * each;
    body(row, std::min(rows, m - row), first, std::min(panels, first + each), scratch + worker * room);
  });
}

void Product::multiply(const Matrix& w, const Prepared& rows, int m, const Target& to) {
  const bool bytes = rows.way == Way::integer || rows.way == Way::grouped, tiles = rows.way == Way::tiles;
  const int panels = bytes ? w.panels() : w.float_panels(), block = tiles ? tiles_block(w) : kBlockRows;
  const int64_t room = tiles ? tiles_scratch(w) : bytes || w.kind == Kind::f32 ? 0 : gemm_scratch(w.k);
  // two panels of bytes share a tile of rows
  pieces(m, block, panels, bytes ? 2 : 1, room, [&](int row, int count, int first, int last, float* scratch) {
    switch (rows.way) {
      case Way::whole: return kernels_.gemm(w, rows.whole.x + row * rows.whole.apart, rows.whole.apart, count, first, last, to.out + row * to.ldo, to.ldo, scratch);
      case Way::integer: return kernels_.gemm_int(w, rows.parts, row, count, first, last, to.out, to.ldo);
      case Way::grouped: return kernels_.gemm_grouped(w, rows.parts, row, count, first, last, to.out, to.ldo);
      case Way::tiles: return this->tiles(w)->gemm(w, rows.tiles, row, count, first, last, to, scratch);
    }
  });
}

void Product::run(const Matrix& w, const Rows& rows, int m, float* out, int64_t ldo) {
  multiply(w, prepared(way(w, m), w, rows, m), m, {out, ldo, false});
}

void Product::add(const Matrix& w, const Rows& rows, int m, float* to) {
  const Prepared ready = prepared(way(w, m), w, rows, m);
  if (ready.way == Way::tiles && w.bias == nullptr) return multiply(w, ready, m, {to, w.n, true});
  float* sums = sums_.take<float>(static_cast<int64_t>(m) * w.n);
  multiply(w, ready, m, {sums, w.n, false});
  team_.each(ceil_div(m, kRowsPerTask), [&](int task, int) {
    const int64_t from = static_cast<int64_t>(task) * kRowsPerTask * w.n;
    kernels_.add(to + from, sums + from, std::min(kRowsPerTask, m - task * kRowsPerTask) * w.n);
  });
}

bool Product::add_gated(const Matrix& gate_up, const Matrix& down, const Rows& rows, int m, bool gelu, float* to) {
  const bool both = way(gate_up, m) == Way::tiles && way(down, m) == Way::tiles && gate_up.parts() == down.parts();
  if (!both || gate_up.bias != nullptr || down.bias != nullptr) return false;
  const Prepared ready = prepared(Way::tiles, gate_up, rows, m);
  if (ready.way != Way::tiles) return false;
  uint16_t* gated = gated_.take<uint16_t>(padded(m) * down.k * down.parts());
  const auto gemm = gelu ? tiles(gate_up)->gelu : tiles(gate_up)->silu;
  std::atomic<bool> tame = true;
  pieces(m, tiles_block(gate_up), down.k / kIntPanel, 1, tiles_scratch(gate_up), [&](int row, int count, int first, int last, float* scratch) {
    if (!gemm(gate_up, ready.tiles, row, count, first, last, gated, scratch)) tame = false;
  });
  if (tame) multiply(down, {Way::tiles, {}, {}, gated}, m, {to, down.n, true});
  return tame;
}

}  // namespace paceline
