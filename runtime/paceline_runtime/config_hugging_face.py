"""A decoder's configuration out of a Hugging Face `config.json`. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline_runtime.config_rope import rope_from_json
from paceline_runtime.json_fields import JsonFields
from paceline_runtime.model_config import MAX_LAYERS, LayerConfig, ModelConfig, RopeConfig, bounded
from paceline_runtime.model_errors import ModelFormatError, UnsupportedModel

__all__ = ["config_from_hugging_face"]

# What is written in files, and what the decoder calls it. Gemma's first releases say "gelu" and mean the approximation
# (https://github.com/huggingface/transformers/pull/29402).
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_GEMMA_ACTIVATIONS = {**_ACTIVATIONS, "gelu": "gelu_tanh"}


def config_from_hugging_face(document: Mapping[str, Any]) -> ModelConfig:
    """Return the decoder of a parsed `config.json`. Raises `UnsupportedModel` or `ModelFormatError`, naming the field."""
    names = document.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _FAMILIES:
        raise UnsupportedModel(f"architecture {names!r} isn't supported, only {', '.join(_FAMILIES)}")
    fields = JsonFields(document, "config.json")
    if document.get("quantization_config"):
        raise UnsupportedModel("quantised Hugging Face weights (quantization_config) aren't supported, only GGUF ones")
    if fields.get("use_bidirectional_attention", bool, False):
        raise UnsupportedModel("attention in both directions (use_bidirectional_attention) isn't supported")
    bounded("layers", fields.get("num_hidden_layers", int), MAX_LAYERS)
    family = _FAMILIES[names[0]]
    return ModelConfig(architecture=names[0], **_sizes(fields, family), **family.options(fields))


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture's name implies. `options` are its declared differences."""

    options: Callable[[JsonFields], dict[str, Any]]
    tied: bool = False  # what a file that says nothing means
    eps: float = 1e-6
    positions: int = 2048
    head_dim: int | None = None  # None: hidden_size / num_attention_heads


def _sizes(fields: JsonFields, family: _Family) -> dict[str, Any]:
    heads, hidden = fields.get("num_attention_heads", int), fields.get("hidden_size", int)
    return {
        "vocab_size": fields.get("vocab_size", int),
        "hidden_size": hidden,
        "intermediate_size": fields.get("intermediate_size", int),
        "num_layers": fields.get("num_hidden_layers", int),
        "num_heads": heads,
        "num_kv_heads": fields.get("num_key_value_heads", int, heads),
        "head_dim": fields.get("head_dim", int, family.head_dim or hidden // max(heads, 1)),
        "max_positions": fields.get("max_position_embeddings", int, family.positions),
        "rms_norm_eps": fields.get("rms_norm_eps", float, family.eps),
        "tie_embeddings": fields.get("tie_word_embeddings", bool, family.tied),
        "eos_token_ids": fields.token_ids("eos_token_id"),
    }


def _llama(fields: JsonFields) -> dict[str, Any]:
    bias = fields.get("attention_bias", bool, False)
    return {
        "ropes": (rope_from_json(fields),),
        "activation": _activation(fields, "silu"),
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": fields.get("mlp_bias", bool, False),
    }


def _mistral(fields: JsonFields) -> dict[str, Any]:
    window = fields.optional("sliding_window", int)
    return {
        "ropes": (rope_from_json(fields),),
        "activation": _activation(fields, "silu"),
        "layers": _uniform(fields, window),
    }


def _smollm3(fields: JsonFields) -> dict[str, Any]:
    count, interval = fields.get("num_hidden_layers", int), fields.get("no_rope_layer_interval", int, 4)
    if interval < 1:
        raise ModelFormatError(f"config.json: no_rope_layer_interval must be at least 1, got {interval}")
    rotated = fields.get("no_rope_layers", list, [int((i + 1) % interval != 0) for i in range(count)])  # 1 has rope
    windows = _windows(fields, slides=lambda i: i < len(rotated) and not rotated[i])
    if len(rotated) != count:
        raise ModelFormatError(f"config.json: no_rope_layers has {len(rotated)} items for {count} layers")
    layers = tuple(LayerConfig(0 if on else 1, window) for on, window in zip(rotated, windows, strict=True))
    rope = rope_from_json(fields)
    return {**_llama(fields), "ropes": (rope, RopeConfig(rope.theta, "none")), "layers": layers}


def _qwen2(fields: JsonFields) -> dict[str, Any]:
    return {
        "ropes": (rope_from_json(fields),),
        "activation": _activation(fields, "silu"),
        "layers": _qwen_layers(fields),
        "attention_bias": True,
    }


def _qwen3(fields: JsonFields) -> dict[str, Any]:
    bias = fields.get("attention_bias", bool, False)
    return {**_qwen2(fields), "attention_bias": bias, "output_bias": bias, "qk_norm": True}


def _qwen_layers(fields: JsonFields) -> tuple[LayerConfig, ...]:
    full = fields.get("max_window_layers", int, 28)
    return tuple(LayerConfig(0, window) for window in _windows(fields, slides=lambda i: i >= full))


def _gemma(fields: JsonFields) -> dict[str, Any]:
    bias = fields.get("attention_bias", bool, False)
    return {
        "ropes": (rope_from_json(fields),),
        "activation": _activation(fields, "gelu_pytorch_tanh", _GEMMA_ACTIVATIONS),
        "attention_bias": bias,
        "output_bias": bias,
        "wide_norms": True,
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(max(fields.get("hidden_size", int), 1)),
    }


def _gemma2(fields: JsonFields) -> dict[str, Any]:
    window = fields.get("sliding_window", int, 4096)
    types = fields.layer_types(lambda i: i % 2 == 0)
    return {
        **_gemma(fields),
        "layers": tuple(LayerConfig(0, window if slides else None) for slides in types),
        **_gemma_extras(fields),
        "attention_cap": fields.optional("attn_logit_softcapping", float, 50.0),
        "logits_cap": fields.optional("final_logit_softcapping", float, 30.0),
    }


def _gemma3(fields: JsonFields) -> dict[str, Any]:
    if fields.optional("attn_logit_softcapping", float) is not None:
        raise UnsupportedModel("config.json: attn_logit_softcapping isn't supported in Gemma 3, which has none")
    period, window = fields.get("sliding_window_pattern", int, 6), fields.get("sliding_window", int, 4096)
    if period < 1:
        raise ModelFormatError(f"config.json: sliding_window_pattern must be at least 1, got {period}")
    types = fields.layer_types(lambda i: (i + 1) % period != 0)
    return {
        **_gemma(fields),
        "ropes": _gemma3_ropes(fields),
        "layers": tuple(LayerConfig(int(slides), window if slides else None) for slides in types),
        **_gemma_extras(fields),
        "qk_norm": True,
        "logits_cap": fields.optional("final_logit_softcapping", float),
    }


def _gemma_extras(fields: JsonFields) -> dict[str, Any]:
    scalar = fields.get("query_pre_attn_scalar", float, 256.0)
    return {"post_norms": True, "attention_scale": 1 / math.sqrt(scalar) if scalar > 0 else 0.0}


def _gemma3_ropes(fields: JsonFields) -> tuple[RopeConfig, RopeConfig]:
    """Return the ropes of full and of sliding layers: newer files have both by name, older ones a field for the latter."""
    both = fields.document.get("rope_parameters")
    if isinstance(both, Mapping) and "full_attention" in both:
        parts = [both.get(name) for name in ("full_attention", "sliding_attention")]
        full, sliding = (rope_from_json(fields, part or {}, theta) for part, theta in zip(parts, (1e6, 1e4), strict=True))
        return full, sliding
    return rope_from_json(fields, theta=1e6), RopeConfig(fields.get("rope_local_base_freq", float, 1e4))


def _phi3(fields: JsonFields) -> dict[str, Any]:
    window = fields.optional("sliding_window", int)
    return {
        "ropes": (rope_from_json(fields),),
        "activation": _activation(fields, "silu"),
        "layers": _uniform(fields, window),
        "fused_weights": True,
    }


def _activation(fields: JsonFields, default: str, names: Mapping[str, str] = _ACTIVATIONS) -> str:
    name = fields.get("hidden_activation", str, fields.get("hidden_act", str, default))
    if name not in names:
        raise UnsupportedModel(f"the activation {name!r} isn't supported, only {', '.join(names)}")
    return names[name]


def _uniform(fields: JsonFields, window: int | None) -> tuple[LayerConfig, ...]:
    count: int = fields.get("num_hidden_layers", int)
    return (LayerConfig(0, window),) * count


def _windows(fields: JsonFields, slides: Callable[[int], bool]) -> list[int | None]:
    """Return each layer's window where `use_sliding_window` switches it on."""
    window = fields.optional("sliding_window", int) if fields.get("use_sliding_window", bool, False) else None
    return [window if on else None for on in fields.layer_types(lambda i: window is not None and slides(i))]


_FAMILIES = {
    "LlamaForCausalLM": _Family(_llama),
    "MistralForCausalLM": _Family(_mistral, positions=131_072),
    "SmolLM3ForCausalLM": _Family(_smollm3, tied=True, positions=32_768),
    "Qwen2ForCausalLM": _Family(_qwen2, positions=32_768),
    "Qwen3ForCausalLM": _Family(_qwen3, positions=32_768, head_dim=128),
    "GemmaForCausalLM": _Family(_gemma, tied=True, positions=8192, head_dim=256),
    "Gemma2ForCausalLM": _Family(_gemma2, tied=True, positions=8192, head_dim=256),
    "Gemma3ForCausalLM": _Family(_gemma3, tied=True, positions=131_072, head_dim=256),
    "Phi3ForCausalLM": _Family(_phi3, eps=1e-5, positions=4096),
}
