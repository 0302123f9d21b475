// Attention straight from the block pool, one KV head of one sequence at a time.
#pragma once

#include "attend_tiles.h"

namespace paceline {
namespace {

int64_t attention_scratch(int, int, int head_dim) {
  const int64_t d = wide(head_dim);
  return many_scratch(d) > tiled_scratch(d, 3) ? many_scratch(d) : tiled_scratch(d, 3);
}

void attend(const Attention& a, const Span& span, int kv_head, float* scratch) {
  const int d = a.cache.head_dim, share = a.heads / a.cache.kv_heads;
  if (span.rows * share <= kFewRows && d % kLanes == 0) return attend_few(a, span, kv_head, scratch);
  const auto by = [&](int most, int from, int to, const auto& some) {
    const int step = share < most ? most / share : 1;
    for (int token = from; token < to; token += step) some(token, to - token < step ? to - token : step);
  };
  const auto many = [&](int token, int count) { attend_many(a, span, kv_head, token, count, scratch); };
  if (!kTiledAttention || d % kGroup != 0) return by(kQueryRows, 0, span.rows, many);
  const auto tiled = a.cache.kind == Kind::f32 ? attend_tiled<3> : attend_tiled<1>;
  by(kRowsAtOnce, 0, span.rows, [&](int token, int count) {
    if (!tiled(a, span, kv_head, token, count, scratch)) by(kQueryRows, token, token + count, many);
  });
}

}  // namespace
}  // namespace paceline
