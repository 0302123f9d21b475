// What the torch ops and classes share: the machine's team and kernels, and how tensors become plain memory.
#pragma once

#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>

#include <memory>
#include <mutex>
#include <string>

#include "step.h"

namespace paceline {
namespace {

struct Machine {
  const Kernels* kernels = nullptr;
  std::unique_ptr<Team> team;
  std::unique_ptr<Product> product;
  Room attention_room, picked_room, logits_room;
  std::mutex one_at_a_time;  // steps and products of several threads share the team
};

Machine& machine() {
  static auto* it = new Machine;  // never freed: helpers may run until the process ends
  return *it;
}

Machine& started() {
  TORCH_CHECK(machine().kernels != nullptr, "start() comes before the first product");
  return machine();
}

const float* floats(const at::Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous(), "float32 and contiguous expected");
  return x.const_data_ptr<float>();
}

const float* floats(const std::optional<at::Tensor>& x) { return x.has_value() ? floats(*x) : nullptr; }

Kind kind_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return Kind::f32;
    case at::kBFloat16: return Kind::bf16;
    case at::kHalf: return Kind::f16;
    default: TORCH_CHECK(false, "float32, bfloat16 or float16 expected");
  }
}

// Whether all numbers are below 2^32, and numbers at all.
bool is_tame(const at::Tensor& x) {
  const auto [least, most] = at::aminmax(x);
  return least.item<float>() > -0x1p32f && most.item<float>() < 0x1p32f;
}

// A packed weight; keeps its tensors alive. `kind` is a number of `Kind`; see `Matrix` for `scales` and `sums`, and `groups`.
struct Weight : torch::CustomClassHolder {
  Weight(int64_t kind, at::Tensor data, int64_t n, int64_t k, std::optional<at::Tensor> scales, std::optional<at::Tensor> sums,
         std::optional<at::Tensor> groups, std::optional<at::Tensor> bias)
      : data_(std::move(data)), scales_(std::move(scales)), sums_(std::move(sums)), groups_(std::move(groups)), bias_(std::move(bias)) {
    TORCH_CHECK(data_.is_contiguous(), "packed data is contiguous");
    matrix.kind = static_cast<Kind>(kind);
    matrix.n = static_cast<int>(n);
    matrix.k = static_cast<int>(k);
    matrix.kp = matrix.grouped() ? matrix.k : static_cast<int>(data_.numel() / (matrix.panels() * matrix.panel()));
    TORCH_CHECK(!matrix.grouped() || (matrix.k % kGroup == 0 && groups_.has_value()), "weights in groups have whole groups");
    matrix.data = data_.const_data_ptr();
    matrix.scales = floats(scales_);
    matrix.sums = sums_.has_value() ? sums_->const_data_ptr<int32_t>() : nullptr;
    matrix.groups = groups_.has_value() ? reinterpret_cast<const uint16_t*>(groups_->const_data_ptr<at::Half>()) : nullptr;
    matrix.bias = floats(bias_);
    matrix.tame = matrix.parts() == 1 || is_tame(data_);
  }
  Matrix matrix;

 private:
  at::Tensor data_;
  std::optional<at::Tensor> scales_, sums_, groups_, bias_;
};

using WeightPtr = c10::intrusive_ptr<Weight>;

// A cache [B, S, 2, K, D].
Cache cache_of(at::Tensor& t) {
  TORCH_CHECK(t.is_contiguous() && t.dim() == 5 && t.size(2) == 2, "a contiguous cache [B, S, 2, K, D] expected");
  return {static_cast<char*>(t.mutable_data_ptr()), kind_of(t), static_cast<int>(t.size(1)), static_cast<int>(t.size(3)), static_cast<int>(t.size(4))};
}

// The sequences of a step: `spans` [n, 3] int32 are first position, rows, and where the blocks begin in `tables` int32.
std::vector<Span> spans_of(const at::Tensor& spans, const at::Tensor& tables, int64_t all) {
  const int32_t *rows = spans.const_data_ptr<int32_t>(), *blocks = tables.const_data_ptr<int32_t>();
  std::vector<Span> found;
  int first = 0;
  for (int64_t i = 0; i < spans.size(0); ++i, rows += 3) {
    found.push_back({blocks + rows[2], first, rows[0], rows[1]});
    first += rows[1];
  }
  TORCH_CHECK(first == all, "the spans have ", first, " rows, the step ", all);
  return found;
}

}  // namespace
}  // namespace paceline
