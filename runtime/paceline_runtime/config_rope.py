"""Rotary positions out of a `config.json`. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paceline_runtime.json_fields import JsonFields
from paceline_runtime.model_config import RopeConfig
from paceline_runtime.model_errors import ModelFormatError, UnsupportedModel

__all__ = ["longrope_attention_factor", "rope_from_json"]


def rope_from_json(fields: JsonFields, part: Mapping[str, Any] | None = None, theta: float = 10_000.0) -> RopeConfig:
    """Return the rope of a document, or of its `part` for some layers. `theta` is what a document that says nothing means.

    transformers 5 keeps everything in rope_parameters, older ones have rope_theta and more beside rope_scaling.
    """
    if part is None:
        scaling = fields.part("rope_parameters") or fields.part("rope_scaling") or JsonFields({}, fields.where)
    elif isinstance(part, Mapping):
        scaling = JsonFields(part, f"{fields.where}: rope_parameters")
    else:
        raise ModelFormatError(f"{fields.where}: rope_parameters must hold JSON objects")
    kind = scaling.get("rope_type", str, scaling.get("type", str, "default"))
    if kind not in _SCALINGS:
        raise UnsupportedModel(f"rope scaling {kind!r} isn't supported, only {', '.join(_SCALINGS)}")
    plain: dict[str, Any] = {
        "theta": scaling.get("rope_theta", float, theta if part is not None else fields.get("rope_theta", float, theta)),
        "rotary_dim": _rotary_dim(fields, scaling),
    }
    return RopeConfig(**plain, **_SCALINGS[kind](fields, scaling))


def longrope_attention_factor(factor: float, original: int) -> float:
    """Return the attention factor of LongRoPE (Ding et al. 2024, arXiv:2402.13753) for a context `factor` times longer."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _rotary_dim(fields: JsonFields, scaling: JsonFields) -> int | None:
    share = scaling.get("partial_rotary_factor", float, fields.get("partial_rotary_factor", float, 1.0))
    if share == 1.0:
        return None
    if not 0 < share < 1:
        raise ModelFormatError(f"{fields.where}: partial_rotary_factor must be above 0 and at most 1, got {share}")
    heads = max(fields.get("num_attention_heads", int), 1)
    return int(fields.get("head_dim", int, fields.get("hidden_size", int) // heads) * share)


def _default(_fields: JsonFields, _scaling: JsonFields) -> dict[str, Any]:
    return {}


def _linear(_fields: JsonFields, scaling: JsonFields) -> dict[str, Any]:
    return {"kind": "linear", "factor": scaling.get("factor", float)}


def _llama3(_fields: JsonFields, scaling: JsonFields) -> dict[str, Any]:
    return {
        "kind": "llama3",
        "factor": scaling.get("factor", float),
        "low_freq_factor": scaling.get("low_freq_factor", float),
        "high_freq_factor": scaling.get("high_freq_factor", float),
        "original_max_positions": scaling.get("original_max_position_embeddings", int),
    }


def _yarn(fields: JsonFields, scaling: JsonFields) -> dict[str, Any]:
    original = _original_positions(fields, scaling)
    factor = scaling.get("factor", float, fields.get("max_position_embeddings", int) / original)
    return {
        "kind": "yarn",
        "factor": factor,
        "beta_fast": scaling.get("beta_fast", float, 32.0),
        "beta_slow": scaling.get("beta_slow", float, 1.0),
        "truncate": scaling.get("truncate", bool, True),
        "original_max_positions": original,
        "attention_factor": scaling.get("attention_factor", float, _yarn_attention_factor(scaling, factor)),
    }


def _yarn_attention_factor(scaling: JsonFields, factor: float) -> float:
    """Return YaRN's attention factor (Peng et al. 2023, arXiv:2309.00071; mscale is DeepSeek's)."""

    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = scaling.optional("mscale", float), scaling.optional("mscale_all_dim", float)
    return grown(numerator) / grown(denominator) if numerator and denominator else grown(1.0)


def _longrope(fields: JsonFields, scaling: JsonFields) -> dict[str, Any]:
    original = _original_positions(fields, scaling)
    factor = scaling.get("factor", float, fields.get("max_position_embeddings", int) / original)
    return {
        "kind": "longrope",
        "short_factors": scaling.numbers("short_factor"),
        "long_factors": scaling.numbers("long_factor"),
        "original_max_positions": original,
        "attention_factor": scaling.get("attention_factor", float, longrope_attention_factor(factor, original)),
    }


def _original_positions(fields: JsonFields, scaling: JsonFields) -> int:
    """Return what the model was first trained for; Phi-3 states it beside the scaling, and that wins."""
    inner = scaling.get("original_max_position_embeddings", int, fields.get("max_position_embeddings", int))
    original: int = fields.get("original_max_position_embeddings", int, inner)
    if original < 2:
        raise ModelFormatError(f"{scaling.where}: original_max_position_embeddings must be above 1, got {original}")
    return original


_SCALINGS: dict[str, Callable[[JsonFields, JsonFields], dict[str, Any]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # LongRoPE's name in Phi-3's first files
}
