// The torch class `Layers`: a decoder's layers as one call.
#pragma once

#include "tensors.h"

namespace paceline {
namespace {

// A decoder's layers. `numbers` are hidden, heads, kv_heads, head_dim, wide, gelu; `reals` eps, scale, soft_cap (0: none).
struct Layers : torch::CustomClassHolder {
  Layers(std::vector<int64_t> numbers, std::vector<double> reals) {
    TORCH_CHECK(numbers.size() == 6 && reals.size() == 3, "six numbers and three reals expected");
    int* fields[] = {&shape_.hidden, &shape_.heads, &shape_.kv_heads, &shape_.head_dim, &shape_.wide};
    for (int i = 0; i < 5; ++i) *fields[i] = static_cast<int>(numbers[i]);
    shape_.gelu = numbers[5] != 0;
    TORCH_CHECK(shape_.heads / shape_.kv_heads <= 96, "at most 96 heads of queries share one of keys");
    shape_.eps = static_cast<float>(reals[0]);
    shape_.scale = static_cast<float>(reals[1]);
    shape_.soft_cap = static_cast<float>(reals[2]);
  }

  // `norms` are input, query, key, attention post, mlp, mlp post; `weights` qkv, output, gate_up, down.
  void add(std::vector<std::optional<at::Tensor>> norms, std::vector<WeightPtr> weights, int64_t rope, int64_t window) {
    TORCH_CHECK(norms.size() == 6 && weights.size() == 4, "six norms and four weights expected");
    Layer layer;
    const float** places[] = {&layer.input_norm, &layer.query_norm, &layer.key_norm, &layer.attention_post_norm, &layer.mlp_norm, &layer.mlp_post_norm};
    for (int i = 0; i < 6; ++i) *places[i] = floats(norms[i]);
    layer.qkv = weights[0]->matrix;
    layer.output = weights[1]->matrix;
    layer.gate_up = weights[2]->matrix;
    layer.down = weights[3]->matrix;
    layer.rope = static_cast<int>(rope);
    layer.window = static_cast<int>(window);
    layers_.push_back(layer);
    norms_.push_back(std::move(norms));
    weights_.push_back(std::move(weights));
  }

  // A rotation that layers name by its number: `frequencies` [head_dim / 2], and what its cosines and sines are multiplied by.
  void add_rope(at::Tensor frequencies, std::optional<at::Tensor> factors) {
    TORCH_CHECK(frequencies.numel() == shape_.head_dim / 2, shape_.head_dim / 2, " frequencies expected");
    ropes_.push_back({floats(frequencies), floats(factors)});
    rotations_.emplace_back(std::move(frequencies), std::move(factors));
  }

  // Change `residual` [T, hidden] into what the last layer leaves. `spans` [n, 3] int32 are each sequence's first position,
  // rows, and where its blocks begin in `tables` int32.
  void run(at::Tensor residual, const at::Tensor& spans, const at::Tensor& tables, std::vector<at::Tensor> caches) {
    Machine& m = started();
    std::lock_guard<std::mutex> lock(m.one_at_a_time);
    TORCH_CHECK(caches.size() == layers_.size(), "a cache for each layer expected");
    StepInput input;
    input.rows = static_cast<int>(residual.size(0));
    floats(residual);
    input.residual = residual.mutable_data_ptr<float>();
    input.spans = spans_of(spans, tables, input.rows);
    for (auto& c : caches) {
      input.caches.push_back(cache_of(c));
      TORCH_CHECK(input.caches.back().kv_heads == shape_.kv_heads && input.caches.back().head_dim == shape_.head_dim, "another model's cache");
    }
    stepper(m).run(layers_, ropes_, input);
  }

 private:
  Steps& stepper(const Machine& m) {
    if (!steps_ || kernels_ != m.kernels || team_ != m.team.get()) {
      steps_ = std::make_unique<Steps>(*m.kernels, *m.team, shape_);
      kernels_ = m.kernels;
      team_ = m.team.get();
    }
    return *steps_;
  }

  Shape shape_;
  std::vector<Layer> layers_;
  std::vector<std::vector<std::optional<at::Tensor>>> norms_;
  std::vector<std::vector<WeightPtr>> weights_;
  std::vector<Rope> ropes_;
  std::vector<std::pair<at::Tensor, std::optional<at::Tensor>>> rotations_;
  std::unique_ptr<Steps> steps_;
  const Kernels* kernels_ = nullptr;
  const Team* team_ = nullptr;
};

}  // namespace
}  // namespace paceline
