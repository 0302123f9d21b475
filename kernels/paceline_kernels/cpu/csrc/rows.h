// What is done to one row: norms, gates, rotations, stores.
#pragma once

#include "simd.h"

namespace paceline {
namespace {

void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
  vf squares{};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (; i < n; ++i) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
  for (i = 0; i + kLanes <= n; i += kLanes) save(out + i, load(x + i) * scale * load(weight + i));
  for (; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

void add(float* to, const float* x, int n) {
  for (int i = 0; i < n; ++i) to[i] += x[i];
}

inline vf silu(vf x) { return x / (1.0f + exponential(-x)); }

inline vf gelu(vf x) {  // the tanh approximation
  return 0.5f * x * (1.0f + tangent(0.7978845608f * (x + 0.044715f * x * x * x)));
}

template <vf (*Gate)(vf)>
void gate_mul(const float* gate, const float* up, int n, float* out) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) save(out + i, Gate(load(gate + i)) * load(up + i));
  if (i == n) return;
  float tail[kLanes] = {};
  std::memcpy(tail, gate + i, (n - i) * sizeof(float));
  save(tail, Gate(load(tail)));
  for (int j = 0; i < n; ++i, ++j) out[i] = tail[j] * up[i];
}

int largest(const float* x, int n) {
  float most = x[0];
  int i = 0;
  if (n >= kLanes) {
    vf peaks = load(x);
    for (; i + kLanes <= n; i += kLanes) peaks = larger(peaks, load(x + i));
    most = highest(peaks);
  }
  for (; i < n; ++i) most = x[i] > most ? x[i] : most;
  for (i = 0; i < n - 1 && x[i] != most;) ++i;
  return i;
}

// The halves of a head turn against each other.
void rotate(float* head, const float* turn, int size) {
  const int half = size / 2;
  for (int i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * turn[i] - b * turn[i + half];
    head[i + half] = b * turn[i] + a * turn[i + half];
  }
}

template <class T>
void store_as(const float* x, T* to, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) save(to + i, load(x + i));
  for (; i < n; ++i) put(x[i], to + i);
}

void store(const float* x, Kind kind, void* to, int n) {
  if (kind == Kind::f32) std::memcpy(to, x, n * sizeof(float));
  if (kind == Kind::bf16) store_as(x, static_cast<bf16*>(to), n);
  if (kind == Kind::f16) store_as(x, static_cast<f16*>(to), n);
}

}  // namespace
}  // namespace paceline
