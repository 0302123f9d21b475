// Attention straight from the block pool, one KV head of one sequence at a time.
#pragma once

#include "attend_narrow.h"

namespace paceline {
namespace {

int64_t attention_scratch(int, int, int head_dim) {
  const int64_t d = wide(head_dim);
  return many_scratch(d) > narrow_scratch(d) ? many_scratch(d) : narrow_scratch(d);
}

void attend(const Attention& a, const Span& span, int kv_head, float* scratch) {
  const int d = a.cache.head_dim, share = a.heads / a.cache.kv_heads;
  if (span.rows * share <= kFewRows && d % kLanes == 0) return attend_few(a, span, kv_head, scratch);
  // whole numbers keep whole products
  const bool narrow = kNarrowAttention && a.cache.kind != Kind::f32 && d % kGroup == 0;
  const int most = narrow ? kNarrowRows : kQueryRows, step = share < most ? most / share : 1;
  for (int token = 0; token < span.rows; token += step) {
    const int count = span.rows - token < step ? span.rows - token : step;
    if (narrow) attend_narrow(a, span, kv_head, token, count, scratch);
    else attend_many(a, span, kv_head, token, count, scratch);
  }
}

}  // namespace
}  // namespace paceline
