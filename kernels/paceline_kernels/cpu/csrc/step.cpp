#include "step.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace paceline {
namespace {

// Rows that one task rotates or gates: some microseconds' work.
constexpr int kRowsPerTask = 4;
// Tokens of a task of a prompt's attention: many, since keys and values are laid out once for all of them, but no more than
// leave each thread several tasks.
constexpr int kFewestTokens = 32, kMostTokens = 128, kTasks = 8;
// Keys and values of a sequence, all heads', that stay in a second-level cache of 2 MiB: one thread reads them from front to
// back and attends with one head after another, where there are sequences enough for all threads.
constexpr int64_t kTogetherBytes = 1 << 20;

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

void attend_all(const Kernels& kernels, Team& team, const Attention& attention, const std::vector<Span>& spans, Room& room) {
  const int kv_heads = attention.cache.kv_heads, all_rows = spans.empty() ? 0 : spans.back().first + spans.back().rows;
  const int tokens = std::clamp(all_rows * kv_heads / (team.size() * kTasks), kFewestTokens, kMostTokens);
  const int64_t position_bytes = attention.cache.row() * (attention.cache.kind == Kind::f32 ? 4 : 2);
  const bool enough = static_cast<int>(spans.size()) >= team.size() * kTasks / 2;
  const auto together = [&](const Span& span) { return enough && span.rows == 1 && span.start * position_bytes <= kTogetherBytes; };
  std::vector<Span> pieces;
  for (const Span& span : spans)
    for (int token = 0; token < span.rows; token += tokens)
      pieces.push_back({span.blocks, span.first + token, span.start + token, std::min(tokens, span.rows - token), together(span)});
  // the longest first, so that none is left over at the end
  std::stable_sort(pieces.begin(), pieces.end(), [](const Span& a, const Span& b) { return a.rows * (a.start + a.rows) > b.rows * (b.start + b.rows); });
  const int64_t scratch = kernels.attention_scratch(attention.heads, kv_heads, attention.cache.head_dim);
  float* all = room.take<float>(team.size() * scratch);
  // first and last head of each piece's tasks
  std::vector<std::array<int, 3>> tasks;
  for (int piece = 0; piece < static_cast<int>(pieces.size()); ++piece)
    for (int head = 0, each = pieces[piece].together ? kv_heads : 1; head < kv_heads; head += each) tasks.push_back({piece, head, head + each});
  team.each(static_cast<int>(tasks.size()), [&](int task, int worker) {
    const auto [piece, first, last] = tasks[task];
    for (int head = first; head < last; ++head) kernels.attend(attention, pieces[piece], head, all + worker * scratch);
  });
}

template <class Body>
void Steps::rows(int count, const Body& body) {
  team_.each(ceil_div(count, kRowsPerTask), [&](int task, int) {
    for (int row = task * kRowsPerTask; row < std::min(count, (task + 1) * kRowsPerTask); ++row) body(row);
  });
}

// Where each row's keys go, and the turns of each rope: [rope][T][cosines, sines][head_dim / 2].
void Steps::place(const std::vector<Rope>& ropes, const StepInput& input) {
  slots_.clear();
  positions_.clear();
  const int size = input.caches.front().block_size, half = shape_.head_dim / 2;
  for (const Span& span : input.spans)
    for (int position = span.start; position < span.start + span.rows; ++position) {
      positions_.push_back(position);
      slots_.push_back(static_cast<int64_t>(span.blocks[position / size]) * size + position % size);
    }
  turns_ = turns_room_.take<float>(static_cast<int64_t>(ropes.size()) * input.rows * shape_.head_dim);
  rows(input.rows, [&](int row) {
    for (size_t rope = 0; rope < ropes.size(); ++rope) {
      float* turn = turns_ + (static_cast<int64_t>(rope) * input.rows + row) * shape_.head_dim;
      for (int i = 0; i < half; ++i) {
        const float angle = static_cast<float>(positions_[row]) * ropes[rope].frequencies[i];
        const float factor = ropes[rope].factors == nullptr ? 1.0f : ropes[rope].factors[i];
        turn[i] = std::cos(angle) * factor;
        turn[i + half] = std::sin(angle) * factor;
      }
    }
  });
}

void Steps::run(const std::vector<Layer>& layers, const std::vector<Rope>& ropes, const StepInput& input) {
  if (input.rows == 0) return;
  const Shape& s = shape_;
  place(ropes, input);
  const int64_t t = input.rows, qkv = (s.heads + 2 * s.kv_heads) * static_cast<int64_t>(s.head_dim);
  qkv_ = qkv_room_.take<float>(t * qkv);
  heads_ = heads_room_.take<float>(t * s.heads * s.head_dim);
  for (size_t i = 0; i < layers.size(); ++i) {
    attention(layers[i], input, input.caches[i]);
    feed_forward(layers[i], input);
  }
}

void Steps::attention(const Layer& layer, const StepInput& input, const Cache& cache) {
  const Shape& s = shape_;
  const int64_t stride = (s.heads + 2 * s.kv_heads) * static_cast<int64_t>(s.head_dim), all = static_cast<int64_t>(s.heads) * s.head_dim;
  product_.run(layer.qkv, {input.residual, s.hidden, layer.input_norm, s.eps}, input.rows, qkv_, stride);
  rows(input.rows, [&](int row) { rotate_and_store(layer, input, cache, row); });
  const Attention attention{cache, qkv_, stride, heads_, s.heads, s.scale, s.soft_cap, layer.window};
  attend_all(kernels_, team_, attention, input.spans, scratch_room_);
  add(layer.output, {heads_, all}, layer.attention_post_norm, input);
}

void Steps::add(const Matrix& w, const Rows& from, const float* post_norm, const StepInput& input) {
  if (post_norm == nullptr) return product_.add(w, from, input.rows, input.residual);
  const Shape& s = shape_;
  float* sums = sums_room_.take<float>(static_cast<int64_t>(input.rows) * s.hidden);
  product_.run(w, from, input.rows, sums, s.hidden);
  rows(input.rows, [&](int row) {
    float* x = sums + row * static_cast<int64_t>(s.hidden);
    kernels_.rms_norm(x, post_norm, s.hidden, s.eps, x);
    kernels_.add(input.residual + row * static_cast<int64_t>(s.hidden), x, s.hidden);
  });
}

void Steps::rotate_and_store(const Layer& layer, const StepInput& input, const Cache& cache, int row) {
  const Shape& s = shape_;
  const int d = s.head_dim;
  float* heads = qkv_ + row * static_cast<int64_t>(s.heads + 2 * s.kv_heads) * d;
  const float* turn = turns_ + (static_cast<int64_t>(layer.rope) * input.rows + row) * d;
  for (int h = 0; h < s.heads + s.kv_heads; ++h) {
    const float* norm = h < s.heads ? layer.query_norm : layer.key_norm;
    if (norm != nullptr) kernels_.rms_norm(heads + h * d, norm, d, s.eps, heads + h * d);
    kernels_.rotate(heads + h * d, turn, d);
  }
  const int bytes = cache.kind == Kind::f32 ? 4 : 2;
  kernels_.store(heads + s.heads * d, cache.kind, cache.data + slots_[row] * cache.row() * bytes, 2 * s.kv_heads * d);
}

void Steps::feed_forward(const Layer& layer, const StepInput& input) {
  const Shape& s = shape_;
  const Rows from{input.residual, s.hidden, layer.mlp_norm, s.eps};
  if (layer.mlp_post_norm == nullptr && product_.add_gated(layer.gate_up, layer.down, from, input.rows, s.gelu, input.residual)) return;
  const int64_t stride = 2LL * s.wide;
  float* wide = wide_room_.take<float>(input.rows * stride);
  product_.run(layer.gate_up, from, input.rows, wide, stride);
  const auto gate = s.gelu ? kernels_.gelu_mul : kernels_.silu_mul;
  rows(input.rows, [&](int row) { gate(wide + row * stride, wide + row * stride + s.wide, s.wide, wide + row * stride); });
  add(layer.down, {wide, stride}, layer.mlp_post_norm, input);
}

}  // namespace paceline
