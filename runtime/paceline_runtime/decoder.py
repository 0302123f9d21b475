"""The decoder: one ragged forward over all tokens of a step.

Projections run over every token of the step at once, attention per sequence over its own blocks (selective batching:
Yu et al., Orca, OSDI 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline_kernels import (
    AttentionBatch,
    Gather,
    Linear,
    add_rms_norm,
    paged_attention,
    rms_norm,
    rope_and_cache,
    rope_rows,
    silu_mul,
)
from paceline_runtime.model_config import ModelConfig, RopeConfig
from paceline_runtime.parallel_group import SOLO, TensorGroup
from paceline_runtime.weights import WeightSource

__all__ = ["Decoder", "inverse_frequencies"]


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor  # [hidden]
    qkv: Linear  # hidden → (H + 2·K) · D, queries, keys, values one after the other
    output: Linear  # H · D → hidden
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Linear  # hidden → 2 · intermediate, the gate first
    down: Linear  # intermediate → hidden


class Decoder:
    """A Llama-family decoder with its weights on one device, in one dtype.

    As one of several ranks of `group` it is given the `config` and the `weights` of its own part.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorGroup = SOLO,
    ) -> None:
        self.config = config
        self._group = group
        self.dtype = dtype
        self.device = device
        load = _Loader(config, weights, dtype, device)
        self._embedding = load.tensor("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._layers = tuple(load.layer(index) for index in range(config.num_layers))
        self._norm = load.tensor("model.norm.weight", (config.hidden_size,))
        self._head = load.head(self._embedding)
        self._frequencies = load.frequencies().to(device)
        self._gather = Gather()
        self._scale = 1 / math.sqrt(config.head_dim)
        self.weight_bytes = load.nbytes

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, kv: Sequence[torch.Tensor], rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the step's tokens, write their KV, return logits [n, vocab] (float32) of `rows` [n] (None: of all).

        `token_ids` [T] follow the rows of `batch`; `kv` holds each layer's cache.
        """
        hidden = self.hidden(token_ids, batch, kv)
        return self.logits(hidden if rows is None else hidden.index_select(0, rows))

    @torch.inference_mode()
    def hidden(self, token_ids: torch.Tensor, batch: AttentionBatch, kv: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the step's tokens, write their KV, return what the last layer leaves [T, hidden], before its norm."""
        config, eps = self.config, self.config.rms_norm_eps
        rotation = rope_rows(batch.positions, self._frequencies, self.dtype)
        residual = self._group.embed(token_ids, self._embedding)  # [T, hidden]
        hidden = torch.zeros_like(residual)
        for layer, cache in zip(self._layers, kv, strict=True):
            normed = add_rms_norm(hidden, residual, layer.input_norm, eps)
            qkv = layer.qkv(normed).view(len(token_ids), -1, config.head_dim)  # [T, H + 2·K, D]
            queries = rope_and_cache(qkv, rotation, cache, batch.slots, config.num_heads)
            heads = paged_attention(queries, cache, batch, self._gather, self._scale)
            attended = self._group.reduce(layer.output(heads))
            normed = add_rms_norm(attended, residual, layer.mlp_norm, eps)
            hidden = self._group.reduce(layer.down(silu_mul(layer.gate_up(normed))))
        return residual.add_(hidden)

    @torch.inference_mode()
    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states [n, hidden] after the last norm: what the head sees, and what embeddings are made of."""
        return rms_norm(hidden, self._norm, self.config.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab] (float32) of hidden states [n, hidden] (before the last norm)."""
        return self._group.gather_vocabulary(self._head(self.normed(hidden)).float())


class _Loader:
    """Takes weights out of their source in Hugging Face's names, fused and in place."""

    def __init__(self, config: ModelConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self.nbytes = 0

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._weights.tensor(name, shape).to(self._device, self._dtype)
        self.nbytes += tensor.nbytes
        return tensor

    def layer(self, index: int) -> _Layer:
        config, prefix = self._config, f"model.layers.{index}."
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        hidden, wide = config.hidden_size, config.intermediate_size
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = [
            (attention + "q_proj", heads * size),
            (attention + "k_proj", kv_heads * size),
            (attention + "v_proj", kv_heads * size),
        ]
        return _Layer(
            input_norm=self.tensor(prefix + "input_layernorm.weight", (hidden,)),
            qkv=self._linear(qkv, hidden, bias=config.attention_bias),
            output=self._linear([(attention + "o_proj", hidden)], heads * size, bias=config.output_bias),
            mlp_norm=self.tensor(prefix + "post_attention_layernorm.weight", (hidden,)),
            gate_up=self._linear([(mlp + "gate_proj", wide), (mlp + "up_proj", wide)], hidden, bias=config.mlp_bias),
            down=self._linear([(mlp + "down_proj", hidden)], wide, bias=config.mlp_bias),
        )

    def head(self, table: torch.Tensor) -> Linear:
        """Return the projection to the vocabulary; a tied one is packed once more, beside the embedding."""
        if not self._config.tie_embeddings:
            return Linear(self.tensor("lm_head.weight", tuple(table.shape)))
        head = Linear(table)
        self.nbytes += table.nbytes if head.packed else 0
        return head

    def frequencies(self) -> torch.Tensor:
        """Return the rotary frequencies, divided by the weights' own factors where there are some."""
        size, rope = self._config.head_dim, self._config.rope
        frequencies = inverse_frequencies(rope, size)
        if rope.kind == "factors":
            return frequencies / self._weights.tensor("rope_freqs.weight", (size // 2,)).float()
        return frequencies

    def _linear(self, parts: list[tuple[str, int]], inputs: int, *, bias: bool) -> Linear:
        """Return one projection made of `parts` (name, outputs) side by side."""
        weight = torch.cat([self.tensor(f"{name}.weight", (outputs, inputs)) for name, outputs in parts])
        joined = torch.cat([self.tensor(f"{name}.bias", (outputs,)) for name, outputs in parts]) if bias else None
        return Linear(weight, joined)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the rotary frequencies [head_dim / 2] in float32, as `transformers` computes them (models are trained so).

    The llama3 ramp is that of https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py.
    """
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind != "llama3":
        return frequencies
    wavelength = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    ramp = ((rope.original_max_positions / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * frequencies / rope.factor + ramp * frequencies
