"""A decoder's weights, taken out of their source in Hugging Face's names, fused and put in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline_kernels.triton_ops.quantised_weights import Int4Weight, Int8GroupWeight, StoredMatrix, join_rows, map_rows
from paceline_runtime.model_config import ModelConfig
from paceline_runtime.rope_frequencies import Rotation, rotated_first, rotation_of
from paceline_runtime.weights import StoredWeights, WeightSource

__all__ = ["DecoderLayer", "Projection", "Projector", "WeightLoader"]


class Projection(Protocol):
    """A product with fixed weights: `Linear`, or a quantised one. `nbytes` is what it keeps."""

    nbytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, [T, out], for `x` [T, in]."""


_NARROW = frozenset({torch.bfloat16, torch.float16, Int4Weight, Int8GroupWeight})
Projector = Callable[[StoredMatrix, torch.Tensor | None], Projection]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights. The norms that a family doesn't have are None."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Projection  # hidden → (H + 2·K) · D, queries, keys, values one after the other
    query_norm: torch.Tensor | None  # [D]
    key_norm: torch.Tensor | None  # [D]
    output: Projection  # H · D → hidden
    attention_post_norm: torch.Tensor | None  # [hidden]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Projection  # hidden → 2 · intermediate, the gate first
    down: Projection  # intermediate → hidden
    mlp_post_norm: torch.Tensor | None  # [hidden]


class WeightLoader:
    """Loads the parts of a decoder one by one. `nbytes` counts what stays in memory.

    With `as_stored` matrices stay as they lie in the files where that is narrower than float32; `narrow` tells if one did.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        project: Projector,
        *,
        as_stored: bool = False,
    ) -> None:
        self._config = config
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._project = project
        self._stored = weights if as_stored and isinstance(weights, StoredWeights) else None
        self.nbytes = 0
        self.narrow = False

    def table(self) -> torch.Tensor:
        """Return the embeddings [vocab, hidden]; who keeps them counts them."""
        return self._read("model.embed_tokens.weight", (self._config.vocab_size, self._config.hidden_size))

    def stored_table(self) -> StoredMatrix:
        """Return the embeddings as `as_stored` says."""
        return self._matrix("model.embed_tokens.weight", (self._config.vocab_size, self._config.hidden_size))

    def norm(self, name: str, size: int | None = None) -> torch.Tensor:
        """Return a norm's weights [size], by default [hidden], as they are multiplied with."""
        config, shape = self._config, (size or self._config.hidden_size,)
        if not config.wide_norms:
            return self._kept(self._read(f"{name}.weight", shape) + config.norm_offset)
        return self._kept(self._weights.tensor(f"{name}.weight", shape).to(self._device, torch.float32) + config.norm_offset)

    def layer(self, index: int) -> DecoderLayer:
        """Return layer `index`."""
        config, prefix = self._config, f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        hidden, wide, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        gates = [(mlp + "gate_proj", wide), (mlp + "up_proj", wide)]
        post, pre = prefix + "post_attention_layernorm", prefix + "pre_feedforward_layernorm"
        rotary_dim = config.ropes[config.layers[index].rope].rotary_dim
        return DecoderLayer(
            input_norm=self.norm(prefix + "input_layernorm"),
            qkv=self._qkv(attention, rotary_dim),
            query_norm=self._head_norm(attention + "q_norm", rotary_dim),
            key_norm=self._head_norm(attention + "k_norm", rotary_dim),
            output=self._linear([(attention + "o_proj", hidden)], heads, bias=config.output_bias),
            attention_post_norm=self.norm(post) if config.post_norms else None,
            mlp_norm=self.norm(pre if config.post_norms else post),
            gate_up=self._linear(gates, hidden, bias=config.mlp_bias),
            down=self._linear([(mlp + "down_proj", hidden)], wide, bias=config.mlp_bias),
            mlp_post_norm=self.norm(prefix + "post_feedforward_layernorm") if config.post_norms else None,
        )

    def head(self, project: Projector) -> Projection:
        """Return the projection to the vocabulary, where it isn't the table of embeddings."""
        shape = (self._config.vocab_size, self._config.hidden_size)
        return self._counted(project(self._joined([self._matrix("lm_head.weight", shape)]), None))

    def rotations(self) -> tuple[Rotation, ...]:
        """Return the rotation of each of the model's ropes."""
        ropes, size = self._config.ropes, self._config.head_dim
        return tuple(rotation_of(rope, size, self._weights.tensor).to(self._device) for rope in ropes)

    def _qkv(self, attention: str, rotary_dim: int | None) -> Projection:
        config = self._config
        parts = [("q_proj", config.num_heads, rotary_dim), ("k_proj", config.num_kv_heads, rotary_dim)]
        weights: list[StoredMatrix] = []
        biases = []
        for name, heads, rotated in [*parts, ("v_proj", config.num_kv_heads, None)]:
            rows = heads * config.head_dim
            weight = self._matrix(f"{attention}{name}.weight", (rows, config.hidden_size))
            weights.append(_matrix_in_order(weight, heads, rotated))
            if config.attention_bias:
                biases.append(_in_order(self._read(f"{attention}{name}.bias", (rows,)), heads, rotated))
        return self._counted(self._project(self._joined(weights), torch.cat(biases) if biases else None))

    def _head_norm(self, name: str, rotary_dim: int | None) -> torch.Tensor | None:
        return _in_order(self.norm(name, self._config.head_dim), 1, rotary_dim) if self._config.qk_norm else None

    def _linear(self, parts: list[tuple[str, int]], inputs: int, *, bias: bool) -> Projection:
        """Return one projection made of `parts` (name, outputs) side by side."""
        weight = self._joined([self._matrix(f"{name}.weight", (outputs, inputs)) for name, outputs in parts])
        joined = torch.cat([self._read(f"{name}.bias", (outputs,)) for name, outputs in parts]) if bias else None
        return self._counted(self._project(weight, joined))

    def _matrix(self, name: str, shape: tuple[int, ...]) -> StoredMatrix:
        return self._read(name, shape) if self._stored is None else self._stored.stored(name, shape)

    def _joined(self, parts: Sequence[StoredMatrix]) -> StoredMatrix:
        """Return matrices side by side: as they are stored if all lie in one narrow form, else in the model's dtype."""
        if self._stored is not None and len({_form(part) for part in parts}) == 1 and _form(parts[0]) in _NARROW:
            self.narrow = True
            return join_rows(parts)
        whole = [part if isinstance(part, torch.Tensor) else part.dequantise() for part in parts]
        return torch.cat([part.to(self._device, self._dtype) for part in whole])

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._weights.tensor(name, shape).to(self._device, self._dtype)

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        self.nbytes += tensor.nbytes
        return tensor

    def _counted(self, projection: Projection) -> Projection:
        self.nbytes += projection.nbytes
        return projection


def _form(weight: StoredMatrix) -> object:
    return weight.dtype if isinstance(weight, torch.Tensor) else type(weight)


def _in_order(rows: torch.Tensor, heads: int, rotary_dim: int | None) -> torch.Tensor:
    return rows if rotary_dim is None else rotated_first(rows, heads, rotary_dim)


def _matrix_in_order(weight: StoredMatrix, heads: int, rotary_dim: int | None) -> StoredMatrix:
    return map_rows(weight, lambda rows: _in_order(rows, heads, rotary_dim))
