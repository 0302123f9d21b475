// A decoder's layers as one call: every product, norm and attention of a step, shared by a team of threads.
#pragma once

#include <vector>

#include "product.h"

namespace paceline {

struct Layer {
  const float* input_norm = nullptr;
  const float* query_norm = nullptr;  // null where the family has none, as the post norms
  const float* key_norm = nullptr;
  const float* attention_post_norm = nullptr;
  const float* mlp_norm = nullptr;
  const float* mlp_post_norm = nullptr;
  Matrix qkv, output, gate_up, down;
  int rope = 0;
  int window = 0;
};

struct Shape {
  int hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, wide = 0;
  float eps = 0, scale = 1, soft_cap = 0;
  bool gelu = false;
};

// A rotation of heads: the frequencies of their pairs of numbers [head_dim / 2], and what cosines and sines are multiplied by.
struct Rope {
  const float* frequencies = nullptr;
  const float* factors = nullptr;  // null: 1
};

struct StepInput {
  int rows = 0;
  float* residual = nullptr;  // [T, hidden], changed in place
  std::vector<Span> spans;
  std::vector<Cache> caches;
};

// Attention of all spans; `room` holds the threads' scratch.
void attend_all(const Kernels& kernels, Team& team, const Attention& attention, const std::vector<Span>& spans, Room& room);

class Steps {
 public:
  Steps(const Kernels& kernels, Team& team, const Shape& shape) : kernels_(kernels), team_(team), shape_(shape), product_(kernels, team) {}
  void run(const std::vector<Layer>& layers, const std::vector<Rope>& ropes, const StepInput& input);

 private:
  void place(const std::vector<Rope>& ropes, const StepInput& input);
  void attention(const Layer& layer, const StepInput& input, const Cache& cache);
  void rotate_and_store(const Layer& layer, const StepInput& input, const Cache& cache, int row);
  void feed_forward(const Layer& layer, const StepInput& input);
  // Add a product to the residual, normed first where the family does.
  void add(const Matrix& w, const Rows& rows, const float* post_norm, const StepInput& input);
  template <class Body>
  void rows(int count, const Body& body);

  const Kernels& kernels_;
  Team& team_;
  const Shape shape_;
  Product product_;
  Room qkv_room_, heads_room_, wide_room_, sums_room_, scratch_room_, turns_room_;
  float *qkv_ = nullptr, *heads_ = nullptr, *turns_ = nullptr;
  std::vector<int64_t> slots_, positions_;  // of each row, its place in the caches and in its sequence
};

}  // namespace paceline
