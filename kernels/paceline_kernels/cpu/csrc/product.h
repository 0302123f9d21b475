// Products of rows with packed weights, shared by a team of threads.
#pragma once

#include "kernels.h"
#include "team.h"

namespace paceline {

// Bytes that grow to the largest need and are kept.
class Room {
 public:
  ~Room() { release(); }
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(count * static_cast<int64_t>(sizeof(T))));
  }

 private:
  void* take_bytes(int64_t bytes);
  void release();
  void* data_ = nullptr;
  int64_t size_ = 0;
};

// Rows [m, k] of a product, `apart` numbers from one to the next; with `norm` [k] their RMSNorm is what is multiplied.
struct Rows {
  const float* x = nullptr;
  int64_t apart = 0;
  const float* norm = nullptr;
  float eps = 0;
};

// Products of any kind by a team, in the way that is the quickest for so many rows.
class Product {
 public:
  Product(const Kernels& kernels, Team& team) : kernels_(kernels), team_(team) {}
  void run(const Matrix& w, const Rows& rows, int m, float* out, int64_t ldo);
  // Add the product to `to` [m, n], which is contiguous.
  void add(const Matrix& w, const Rows& rows, int m, float* to);
  // Add to `to` the product of `down` with the gated halves of the product of `gate_up`; false, and nothing is done, where
  // the kernels don't do both at once, or what is gated isn't tame.
  bool add_gated(const Matrix& gate_up, const Matrix& down, const Rows& rows, int m, bool gelu, float* to);

 private:
  enum class Way { whole, integer, grouped, tiles };
  // Rows in the form that a way wants; `whole` those that are multiplied as they are.
  struct Prepared {
    Way way;
    Rows whole;
    Activations parts;
    const uint16_t* tiles = nullptr;
  };
  Way way(const Matrix& w, int m) const;
  const Tiles* tiles(const Matrix& w) const { return kernels_.tiles[w.parts() - 1]; }
  // Rows that aren't tame go the way of whole numbers instead of that of tiles.
  Prepared prepared(Way way, const Matrix& w, const Rows& rows, int m);
  Activations parts(Way way, const Matrix& w, int m);
  void multiply(const Matrix& w, const Prepared& rows, int m, const Target& to);
  // Call body(row, rows, first panel, last panel, scratch) for pieces of a product with m rows and so many panels.
  template <class Body>
  void pieces(int m, int block, int panels, int even, int64_t room, const Body& body);

  const Kernels& kernels_;
  Team& team_;
  Room whole_, low_, high_, scale_, sum_, zero_, scratch_, tiles_, gated_, rows_, sums_;
};

}  // namespace paceline
