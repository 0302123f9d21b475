"""A decoder's configuration out of GGUF metadata. No torch here.

What the keys mean is llama.cpp's convention: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and, for what
files leave out, https://github.com/ggml-org/llama.cpp/blob/master/src/llama-model.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline_runtime.gguf_file import GgufFile
from paceline_runtime.gguf_vocabulary import special_token_ids
from paceline_runtime.model_config import MAX_LAYERS, LayerConfig, ModelConfig, RopeConfig, bounded
from paceline_runtime.model_errors import ModelFormatError, UnsupportedModel

__all__ = ["config_from_gguf", "gguf_architecture"]

T = TypeVar("T")
# every fourth layer of SmolLM3 isn't rotated; every second of Gemma 2's layers and every sixth of Gemma 3's sees everything
_SMOLLM3_INTERVAL = 4
_GEMMA2_PERIOD = 2
_GEMMA3_PERIOD = 6
# the depths whose scale of q · k is that of hidden_size / heads instead of the head size (27B of Gemma 2 and of Gemma 3)
_GEMMA2_27B_LAYERS = 46
_GEMMA3_27B_LAYERS = 62


def gguf_architecture(file: GgufFile) -> str:
    """Return the architecture's name. Raises `UnsupportedModel` for one that isn't known."""
    architecture = file.value("general.architecture", str)
    if architecture not in _FAMILIES:
        raise UnsupportedModel(f"architecture {architecture!r} isn't supported, only {', '.join(_FAMILIES)}")
    return architecture


@dataclass(frozen=True, slots=True)
class _Fields:
    """Reads `<architecture>.<key>`."""

    file: GgufFile
    architecture: str

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        return self.file.value(f"{self.architecture}.{key}", kind, default)

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.file.metadata

    @property
    def head_dim(self) -> int:
        heads = max(self.get("attention.head_count", int), 1)
        return self.get("attention.key_length", int, self.get("embedding_length", int) // heads)


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Return the decoder of a GGUF header. Raises `UnsupportedModel` or `ModelFormatError`."""
    architecture = gguf_architecture(file)
    fields = _Fields(file, architecture)
    if file.metadata.get(f"{architecture}.expert_count"):
        raise UnsupportedModel("mixture-of-experts models (expert_count) aren't supported")
    if fields.get("attention.value_length", int, fields.head_dim) != fields.head_dim:
        raise UnsupportedModel("values of another size than keys (attention.value_length) aren't supported")
    bounded("layers", fields.get("block_count", int), MAX_LAYERS)
    return ModelConfig(**_common(fields) | _FAMILIES[architecture](fields))


def _common(fields: _Fields) -> dict[str, Any]:
    file, tensors = fields.file, fields.file.tensors
    heads, vocabulary = fields.get("attention.head_count", int), len(file.metadata.get("tokenizer.ggml.tokens", ()))
    return {
        "architecture": fields.architecture,
        "vocab_size": fields.get("vocab_size", int, vocabulary),
        "hidden_size": fields.get("embedding_length", int),
        "intermediate_size": fields.get("feed_forward_length", int),
        "num_layers": fields.get("block_count", int),
        "num_heads": heads,
        "num_kv_heads": fields.get("attention.head_count_kv", int, heads),
        "head_dim": fields.head_dim,
        "max_positions": fields.get("context_length", int, 2048),
        "rms_norm_eps": fields.get("attention.layer_norm_rms_epsilon", float),
        "ropes": (_rope(fields),),
        "tie_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        "output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "eos_token_ids": special_token_ids(file, "eos", "eot", "eom") if vocabulary else (),
    }


def _llama(fields: _Fields) -> dict[str, Any]:
    # the file's order of rotated rows makes sense for whole heads only
    if fields.get("rope.dimension_count", int, fields.head_dim) != fields.head_dim:
        raise UnsupportedModel(f"partly rotated heads (rope.dimension_count) aren't supported in {fields.architecture!r}")
    return {}


def _qwen2(_fields: _Fields) -> dict[str, Any]:
    return {}


def _smollm3(fields: _Fields) -> dict[str, Any]:
    layers = range(fields.get("block_count", int))
    rope = _rope(fields)
    return {
        **_llama(fields),
        "ropes": (rope, RopeConfig(rope.theta, "none")),
        "layers": tuple(LayerConfig(int((index + 1) % _SMOLLM3_INTERVAL == 0)) for index in layers),
    }


def _qwen3(_fields: _Fields) -> dict[str, Any]:
    return {"qk_norm": True}


def _gemma(fields: _Fields) -> dict[str, Any]:
    # the converter has added Gemma's 1 to the norms
    return {
        "activation": "gelu_tanh",
        "wide_norms": True,
        "embedding_scale": math.sqrt(max(fields.get("embedding_length", int), 1)),
    }


def _gemma2(fields: _Fields) -> dict[str, Any]:
    return {
        **_gemma(fields),
        "post_norms": True,
        "layers": _alternating(fields, _GEMMA2_PERIOD, sliding_rope=0),
        "attention_scale": _gemma_scale(fields, _GEMMA2_27B_LAYERS),
        "attention_cap": fields.get("attn_logit_softcapping", float, 50.0),
        "logits_cap": fields.get("final_logit_softcapping", float, 30.0),
    }


def _gemma3(fields: _Fields) -> dict[str, Any]:
    return {
        **_gemma(fields),
        "post_norms": True,
        "qk_norm": True,
        "ropes": (_rope(fields, theta=1e6), RopeConfig(fields.get("rope.freq_base_swa", float, 1e4))),
        "layers": _alternating(fields, _GEMMA3_PERIOD, sliding_rope=1),
        "attention_scale": _gemma_scale(fields, _GEMMA3_27B_LAYERS),
        "logits_cap": fields.get("final_logit_softcapping", float) if fields.has("final_logit_softcapping") else None,
    }


def _alternating(fields: _Fields, default_period: int, sliding_rope: int) -> tuple[LayerConfig, ...]:
    """Return layers of which all but every `period`-th slide."""
    window = fields.get("attention.sliding_window", int)
    key = "attention.sliding_window_pattern"
    period = fields.get(key, int, default_period)
    if period < 1:
        raise ModelFormatError(f"{fields.file.path}: {fields.architecture}.{key} must be at least 1, got {period}")
    slides = [(index + 1) % period != 0 for index in range(fields.get("block_count", int))]
    return tuple(LayerConfig(sliding_rope, window) if on else LayerConfig() for on in slides)


def _gemma_scale(fields: _Fields, layers_27b: int) -> float:
    size: float = fields.head_dim
    if fields.get("block_count", int) == layers_27b:
        size = fields.get("embedding_length", int) / max(fields.get("attention.head_count", int), 1)
    return 1 / math.sqrt(max(size, 1))


def _phi3(fields: _Fields) -> dict[str, Any]:
    window = fields.get("attention.sliding_window", int, 0) or None
    return {
        "fused_weights": True,
        "layers": (LayerConfig(0, window),) * fields.get("block_count", int),
    }


def _rope(fields: _Fields, theta: float = 10_000.0) -> RopeConfig:
    head_dim, tensors = fields.head_dim, fields.file.tensors
    rotated = fields.get("rope.dimension_count", int, head_dim)
    common: dict[str, Any] = {
        "theta": fields.get("rope.freq_base", float, theta),
        "rotary_dim": None if rotated == head_dim else rotated,
    }
    if "rope_freqs.weight" in tensors:
        return RopeConfig(**common, kind="factors", factors_tensor="rope_freqs.weight")
    original = fields.get("rope.scaling.original_context_length", int, fields.get("context_length", int, 2048))
    if "rope_factors_long.weight" in tensors:
        return RopeConfig(
            **common,
            kind="longrope",
            short_factors="rope_factors_short.weight",
            long_factors="rope_factors_long.weight",
            original_max_positions=original,
            attention_factor=fields.get("rope.scaling.attn_factor", float, 1.0),
        )
    kind = fields.get("rope.scaling.type", str, "none")
    if kind == "none":
        return RopeConfig(**common)
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"rope scaling {kind!r} isn't supported, only 'linear', 'yarn' and factors in tensors")
    factor = fields.get("rope.scaling.factor", float)
    if kind == "linear":
        return RopeConfig(**common, kind="linear", factor=factor)
    return RopeConfig(
        **common,
        kind="yarn",
        factor=factor,
        beta_fast=fields.get("rope.scaling.yarn_beta_fast", float, 32.0),
        beta_slow=fields.get("rope.scaling.yarn_beta_slow", float, 1.0),
        original_max_positions=original,
        attention_factor=fields.get("rope.scaling.attn_factor", float, 1.0) * (1 + 0.1 * math.log(max(factor, 1.0))),
    )


_FAMILIES: dict[str, Callable[[_Fields], dict[str, Any]]] = {
    "llama": _llama,  # Mistral too
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
