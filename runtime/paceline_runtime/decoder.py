"""The decoder: one ragged forward over all tokens of a step.

Projections run over every token of the step at once, attention per sequence over its own blocks (selective batching:
Yu et al., Orca, OSDI 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline_kernels import (
    AttentionBatch,
    Gather,
    add_rms_norm,
    gelu_tanh_mul,
    paged_attention,
    rms_norm,
    rope_and_cache,
    rope_rows,
    silu_mul,
)
from paceline_kernels.cpu.layers import LayerParts, LayerShape, NativeLayers
from paceline_kernels.cpu.native import in_use
from paceline_kernels.cpu.packed import FLOATS, PackedLinear
from paceline_runtime.decoder_weights import DecoderLayer, WeightLoader
from paceline_runtime.embedding_table import make_table
from paceline_runtime.heap import give_back_heap
from paceline_runtime.model_config import ModelConfig
from paceline_runtime.parallel_group import SOLO, TensorGroup
from paceline_runtime.quantised_linear import head_maker, projection_maker
from paceline_runtime.weights import WeightSource

__all__ = ["Decoder"]

_GATES = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


class Decoder:
    """A decoder of any supported family with its weights on one device, in one dtype.

    `quantization` (see `quantised_linear`) keeps the matrices in fewer bits. With `as_stored` the native CPU kernels, where
    they run, keep each matrix in the form in which it lies in its file, which changes no weight, and if any of them is
    narrower than float32, by that or by `quantization`, keys and values are kept in float16 (`kv_dtype`). As one of several
    ranks of `group` it is given the `config` and the `weights` of its own part.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None = None,
        as_stored: bool = False,
        group: TensorGroup = SOLO,
    ) -> None:
        self.config = config
        self._group = group
        self.dtype = dtype
        self.device = device
        native = group.size == 1 and device.type == "cpu" and dtype in FLOATS and in_use()
        stored = native and as_stored and quantization is None
        load = WeightLoader(config, weights, dtype, device, projection_maker(quantization), as_stored=stored)
        packed = native and config.tie_embeddings
        self._embedding = make_table(load.stored_table() if packed else load.table(), quantization, packed=packed)
        self._layers = tuple(load.layer(index) for index in range(config.num_layers))
        self._norm = load.norm("model.norm")
        self._wide_norm = self._norm.float().contiguous()
        self._head, extra = (
            self._embedding.tied_head() if config.tie_embeddings else (load.head(head_maker(quantization)), 0)
        )
        self._rotations = load.rotations()
        self._gather = Gather()
        self._gate = _GATES[config.activation]
        self._scale = config.attention_scale or 1 / math.sqrt(config.head_dim)
        # rounded as the weights are, which is how the models were trained
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self._native = self._native_layers() if native else None
        narrow = load.narrow or (as_stored and quantization is not None)
        self.kv_dtype = torch.float16 if narrow and self.native else dtype
        self.weight_bytes = load.nbytes + self._embedding.nbytes + extra
        give_back_heap()

    @property
    def native(self) -> bool:
        """Whether the layers run in the native CPU kernels, which need neither groups nor masks of a batch."""
        return self._native is not None

    def _native_layers(self) -> NativeLayers | None:
        """Return the layers as one native call, if every weight is packed for it."""
        config, parts = self.config, []
        for layer, kind in zip(self._layers, config.layers, strict=True):
            weights = (layer.qkv, layer.output, layer.gate_up, layer.down)
            packed = tuple(weight for weight in weights if isinstance(weight, PackedLinear))
            if len(packed) < len(weights):
                return None
            before = (layer.input_norm, layer.query_norm, layer.key_norm)
            norms = (*before, layer.attention_post_norm, layer.mlp_norm, layer.mlp_post_norm)
            parts.append(LayerParts(norms, packed, kind.rope, kind.window))
        shape = LayerShape(
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            gelu=config.activation == "gelu_tanh",
            eps=config.rms_norm_eps,
            scale=self._scale,
            soft_cap=config.attention_cap,
        )
        return NativeLayers(shape, parts, [(r.frequencies, r.factors) for r in self._rotations])

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, kv: Sequence[torch.Tensor], rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the step's tokens, write their KV, return logits [n, vocab] (float32) of `rows` [n] (None: of all).

        `token_ids` [T] follow the rows of `batch`; `kv` holds each layer's cache.
        """
        return self.logits(self.hidden(token_ids, batch, kv), rows)

    @torch.inference_mode()
    def hidden(self, token_ids: torch.Tensor, batch: AttentionBatch, kv: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the step's tokens, write their KV, return what the last layer leaves [T, hidden], before its norm."""
        config, eps = self.config, self.config.rms_norm_eps
        residual = self._embedding.embed(token_ids, self._group)  # [T, hidden]
        if self._embedding_scale != 1:
            residual = residual * self._embedding_scale
        if self._native is not None:
            return self._native.run(residual.float(), batch, kv)
        rotations = [rope_rows(batch.positions, r.frequencies, self.dtype, r.factors) for r in self._rotations]
        hidden = torch.zeros_like(residual)
        for layer, kind, cache in zip(self._layers, config.layers, kv, strict=True):
            normed = add_rms_norm(hidden, residual, layer.input_norm, eps)
            qkv = layer.qkv(normed).view(len(token_ids), -1, config.head_dim)  # [T, H + 2·K, D]
            self._norm_heads(qkv, layer)
            queries = rope_and_cache(qkv, rotations[kind.rope], cache, batch.slots, config.num_heads)
            heads = paged_attention(
                queries, cache, batch, self._gather, self._scale, window=kind.window, soft_cap=config.attention_cap
            )
            attended = self._group.reduce(layer.output(heads))
            if layer.attention_post_norm is not None:
                attended = rms_norm(attended, layer.attention_post_norm, eps)
            normed = add_rms_norm(attended, residual, layer.mlp_norm, eps)
            hidden = self._group.reduce(layer.down(self._gate(layer.gate_up(normed))))
            if layer.mlp_post_norm is not None:
                hidden = rms_norm(hidden, layer.mlp_post_norm, eps)
        return residual.add_(hidden)

    def _norm_heads(self, qkv: torch.Tensor, layer: DecoderLayer) -> None:
        """Norm each head of queries and keys in place, where the family does."""
        if layer.query_norm is None or layer.key_norm is None:
            return
        heads, eps = self.config.num_heads, self.config.rms_norm_eps
        queries, keys = qkv[:, :heads], qkv[:, heads : heads + self.config.num_kv_heads]
        queries.copy_(rms_norm(queries, layer.query_norm, eps))
        keys.copy_(rms_norm(keys, layer.key_norm, eps))

    @torch.inference_mode()
    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states [n, hidden] after the last norm: what the head sees, and what embeddings are made of."""
        out: torch.Tensor = rms_norm(hidden, self._norm, self.config.rms_norm_eps)
        return out

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits [n, vocab] (float32) of `rows` [n] (None: all) of hidden states [T, hidden] before the last norm."""
        if self._native is not None and isinstance(self._head, PackedLinear):
            every = torch.arange(len(hidden)) if rows is None else rows
            logits = self._head.head(hidden.float(), every, self._wide_norm, self.config.rms_norm_eps)
        else:
            picked = hidden if rows is None else hidden.index_select(0, rows)
            logits = self._group.gather_vocabulary(self._head(self.normed(picked)).float())
        cap = self.config.logits_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    @torch.inference_mode()
    def greedy(self, hidden: torch.Tensor, rows: torch.Tensor) -> list[int]:
        """Return the token that the logits of each of `rows` [n] are largest for, without keeping the logits."""
        if self._native is not None and isinstance(self._head, PackedLinear) and self.config.logits_cap is None:
            return self._head.greedy(hidden.float(), rows, self._wide_norm, self.config.rms_norm_eps)
        tokens: list[int] = self.logits(hidden, rows).argmax(-1).tolist()
        return tokens
