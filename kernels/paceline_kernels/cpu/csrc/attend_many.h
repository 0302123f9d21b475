// A prompt's attention, with softmax as it goes (Milakov 2018).
//
// The query heads that share the KV head are rows of one matrix. A prompt's many rows are columns of the scores instead,
// [keys][rows]: keys and values are then read as they lie, nothing is transposed but the queries, once, and the softmax goes
// down the columns, a vector of rows at a time. A decode's few rows (`attend_few.h`) keep them as rows.
#pragma once

#include "attend_few.h"

namespace paceline {
namespace {

constexpr int kQueryRows = 96;  // rows of scores at once: a tile of keys is widened once for them

constexpr int64_t many_scratch(int64_t w) { return 2 * kKeys * w + kQueryRows * (2 * w + kKeys + 4); }

// Rows of queries as they are worked on: panels [rows / 32][d][32] of queries, sums [rows][w], and of each row its highest
// score, the sum of its weights, and the first and last position that it sees.
struct ManyRows {
  int count, d, w;
  float *queries, *summed, *scores, *most, *total;
  int32_t *from, *to;

  int panels() const { return (count + kFloatPanel - 1) / kFloatPanel; }
};

ManyRows lay_out(const Attention& a, const Span& span, int kv_head, int token, int count, float* scratch) {
  const int d = a.cache.head_dim, w = wide(d), share = a.heads / a.cache.kv_heads;
  ManyRows rows{count * share, d, w, scratch, scratch + kQueryRows * w, scratch + 2 * kQueryRows * w, nullptr, nullptr, nullptr, nullptr};
  rows.most = rows.scores + kQueryRows * kKeys;
  rows.total = rows.most + kQueryRows;
  rows.from = reinterpret_cast<int32_t*>(rows.total + kQueryRows);
  rows.to = rows.from + kQueryRows;
  std::memset(rows.summed, 0, rows.count * w * sizeof(float));
  for (int r = 0; r < rows.panels() * kFloatPanel; ++r) {
    const int last = r < rows.count ? r : rows.count - 1;  // a column beyond the last repeats it, and is dropped
    const int position = span.start + token + last / share;
    const float* q = a.queries + (span.first + token + last / share) * a.stride + (kv_head * share + last % share) * d;
    float* column = rows.queries + r / kFloatPanel * d * kFloatPanel + r % kFloatPanel;
    for (int j = 0; j < d; ++j) column[j * kFloatPanel] = q[j] * a.scale;
    rows.most[r] = kHidden;
    rows.total[r] = 0;
    rows.from[r] = a.window > 0 && position - a.window + 1 > 0 ? position - a.window + 1 : 0;
    rows.to[r] = position;
  }
  return rows;
}

// Hide what a panel's rows don't see of the scores [keys][32] of keys `first` and on.
void hide(const ManyRows& rows, int panel, int first, int keys, float* scores) {
  for (int c = 0; c < kFloatPanel; c += kLanes) {
    vi from, to;
    std::memcpy(&from, rows.from + panel * kFloatPanel + c, sizeof from);
    std::memcpy(&to, rows.to + panel * kFloatPanel + c, sizeof to);
    for (int i = 0; i < keys; ++i) {
      const vi key = vi{} + (first + i);
      const vf score = load(scores + i * kFloatPanel + c);
      save(scores + i * kFloatPanel + c, (key >= from) & (key <= to) ? score : spread(kHidden));
    }
  }
}

// Turn a panel's scores [keys][32] into weights; `factors` [32] are what the sums so far must be multiplied by.
void weigh_columns(const ManyRows& rows, int panel, int keys, float soft_cap, float* scores, float* factors) {
  for (int c = 0; c < kFloatPanel; c += kLanes) {
    float *most = rows.most + panel * kFloatPanel + c, *total = rows.total + panel * kFloatPanel + c;
    const vf before = load(most);
    vf peak = before;
    for (int i = 0; i < keys; ++i) {
      float* at = scores + i * kFloatPanel + c;
      if (soft_cap > 0) save(at, capped(load(at), soft_cap));
      peak = larger(peak, load(at));
    }
    vf sums{};
    for (int i = 0; i < keys; ++i) {
      const vf s = load(scores + i * kFloatPanel + c);
      const vf e = s > kSeen ? exponential(s - peak) : vf{};
      save(scores + i * kFloatPanel + c, e);
      sums += e;
    }
    const vf factor = before > kSeen ? exponential(before - peak) : vf{};
    save(factors + c, factor);
    save(total, load(total) * factor + sums);
    save(most, peak);
  }
}

// Multiply each row of a panel's sums [rows][w] by its factor.
void scale_sums(const ManyRows& rows, int panel, const float* factors) {
  const int first = panel * kFloatPanel, last = rows.count - first < kFloatPanel ? rows.count - first : kFloatPanel;
  for (int r = 0; r < last; ++r) {
    if (factors[r] == 1.0f) continue;
    float* summed = rows.summed + (first + r) * rows.w;
    for (int j = 0; j < rows.w; j += kLanes) save(summed + j, load(summed + j) * factors[r]);
  }
}

// `count` tokens of a span from its token `token` on.
void attend_many(const Attention& a, const Span& span, int kv_head, int token, int count, float* scratch) {
  const int d = a.cache.head_dim, w = wide(d), share = a.heads / a.cache.kv_heads;
  float *keys = scratch, *values = keys + kKeys * w;
  const ManyRows rows = lay_out(a, span, kv_head, token, count, values + kKeys * w);
  const int start = span.start + token, end = start + count;
  const Reading read{span.blocks, kv_head, rows.from[0], end, false};
  for (int first = rows.from[0]; first < end; first += kKeys) {
    const int tile = end - first < kKeys ? end - first : kKeys;
    copy_tile(a.cache, read, first, tile, keys, values);
    for (int panel = 0; panel < rows.panels(); ++panel) {
      float* scores = rows.scores + panel * kKeys * kFloatPanel;
      const Operands<float> products{keys, w, rows.queries + panel * d * kFloatPanel, kFloatPanel, d};
      float_rows<kRows, false, 1>(products, nullptr, scores, kFloatPanel, kFloatPanel, tile);
      if (first + tile > start || a.window > 0) hide(rows, panel, first, tile, scores);
      alignas(64) float factors[kFloatPanel];
      weigh_columns(rows, panel, tile, a.soft_cap, scores, factors);
      scale_sums(rows, panel, factors);
      const int from = panel * kFloatPanel, left = rows.count - from < kFloatPanel ? rows.count - from : kFloatPanel;
      for (int c = 0; c < w; c += kFloatPanel)
        float_rows<kRows, true, kFloatPanel>(Operands<float>{scores, 1, values + c, w, tile}, nullptr, rows.summed + from * w + c, w, kFloatPanel, left);
    }
  }
  for (int r = 0; r < rows.count; ++r) {
    float* out = a.out + (static_cast<int64_t>(span.first + token + r / share) * a.heads + kv_head * share + r % share) * d;
    for (int j = 0; j < d; ++j) out[j] = rows.summed[r * w + j] / rows.total[r];
  }
}

}  // namespace
}  // namespace paceline
