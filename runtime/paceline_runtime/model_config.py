"""What a decoder looks like (`ModelConfig`), out of a Hugging Face `config.json` or of GGUF metadata. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline_runtime.gguf_file import GgufFile
from paceline_runtime.model_errors import ModelFormatError, UnsupportedModel

__all__ = ["ModelConfig", "RopeConfig", "config_from_gguf", "config_from_hugging_face"]

_HF_ARCHITECTURES = ("LlamaForCausalLM",)
_GGUF_ARCHITECTURES = ("llama",)
# Bounds of the sizes that a file may claim: far above real models, low enough that no product overflows or fills the memory
# before the weights' real shapes are compared.
_MAX_LAYERS = 1024
_MAX_HEADS = 1024
_MAX_WIDTH = 262_144
_MAX_VOCABULARY = 4_194_304
_MAX_POSITIONS = 16_777_216


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions. `kind` is `default`, `linear` (positions divided by `factor`), `llama3` (low frequencies divided by
    `factor`, with a ramp between) or `factors` (the weights carry a divisor per frequency, as GGUF has it).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder of the Llama family: pre-norm blocks of grouped-query attention and SwiGLU, with optional biases."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool = False
    attention_bias: bool = False  # on queries, keys and values
    output_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _bounded("layers", self.num_layers, _MAX_LAYERS)
        _bounded("heads", self.num_heads, _MAX_HEADS)
        _bounded("key/value heads", self.num_kv_heads, self.num_heads)
        _bounded("vocabulary", self.vocab_size, _MAX_VOCABULARY)
        _bounded("positions", self.max_positions, _MAX_POSITIONS)
        for what in ("hidden_size", "intermediate_size", "head_dim"):
            _bounded(what, getattr(self, what), _MAX_WIDTH)
        if self.num_heads % self.num_kv_heads:
            raise ModelFormatError(f"{self.num_heads} heads can't share {self.num_kv_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise ModelFormatError(f"rotary positions need an even head size, got {self.head_dim}")
        if not (self.rms_norm_eps > 0 and self.rope.theta > 0 and self.rope.factor > 0):
            raise ModelFormatError("epsilon, rope theta and rope factor must be above 0")

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values of one token over all layers, in numbers (not bytes)."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim


def config_from_hugging_face(document: Mapping[str, Any]) -> ModelConfig:
    """Return the decoder of a parsed `config.json`. Raises `UnsupportedModel` or `ModelFormatError`."""
    names = document.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _HF_ARCHITECTURES:
        raise UnsupportedModel(f"architecture {names!r} isn't supported, only {', '.join(_HF_ARCHITECTURES)}")
    activation = document.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"the activation {activation!r} isn't supported, only 'silu'")
    if document.get("quantization_config"):
        raise UnsupportedModel("quantised Hugging Face weights (quantization_config) aren't supported, only GGUF ones")
    heads = _get(document, "num_attention_heads", int)
    hidden = _get(document, "hidden_size", int)
    bias = _get(document, "attention_bias", bool, False)
    eos = document.get("eos_token_id")
    return ModelConfig(
        architecture=names[0],
        vocab_size=_get(document, "vocab_size", int),
        hidden_size=hidden,
        intermediate_size=_get(document, "intermediate_size", int),
        num_layers=_get(document, "num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=_get(document, "num_key_value_heads", int, heads),
        head_dim=_get(document, "head_dim", int, hidden // max(heads, 1)),
        max_positions=_get(document, "max_position_embeddings", int, 2048),
        rms_norm_eps=_get(document, "rms_norm_eps", float, 1e-6),
        rope=_hugging_face_rope(document),
        tie_embeddings=_get(document, "tie_word_embeddings", bool, False),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=_get(document, "mlp_bias", bool, False),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
    )


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Return the decoder of a GGUF header. Raises `UnsupportedModel` or `ModelFormatError`."""
    architecture = file.value("general.architecture", str)
    if architecture not in _GGUF_ARCHITECTURES:
        raise UnsupportedModel(f"architecture {architecture!r} isn't supported, only {', '.join(_GGUF_ARCHITECTURES)}")
    if file.metadata.get(f"{architecture}.expert_count"):
        raise UnsupportedModel("mixture-of-experts models (expert_count) aren't supported")
    sizes = _GgufSizes(file, architecture)
    heads, hidden = sizes.integer("attention.head_count"), sizes.integer("embedding_length")
    head_dim = sizes.integer("attention.key_length", hidden // max(heads, 1))
    if sizes.integer("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel("partly rotated heads (rope.dimension_count) aren't supported")
    if sizes.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel("values of another size than keys (attention.value_length) aren't supported")
    vocabulary = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    from paceline_runtime.tokenizer_gguf import special_token_ids

    return ModelConfig(
        architecture=architecture,
        vocab_size=sizes.integer("vocab_size", vocabulary),
        hidden_size=hidden,
        intermediate_size=sizes.integer("feed_forward_length"),
        num_layers=sizes.integer("block_count"),
        num_heads=heads,
        num_kv_heads=sizes.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=sizes.integer("context_length", 2048),
        rms_norm_eps=file.value(f"{architecture}.attention.layer_norm_rms_epsilon", float),
        rope=_gguf_rope(file, architecture),
        tie_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        eos_token_ids=special_token_ids(file, "eos", "eot", "eom") if vocabulary else (),
    )


@dataclass(frozen=True, slots=True)
class _GgufSizes:
    """Reads `<architecture>.<key>` integers."""

    file: GgufFile
    architecture: str

    def integer(self, key: str, default: int | None = None) -> int:
        return self.file.value(f"{self.architecture}.{key}", int, default)


def _hugging_face_rope(document: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 keeps everything in rope_parameters, older ones have rope_theta beside rope_scaling
    scaling = document.get("rope_parameters") or document.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelFormatError("rope_parameters must be a JSON object")
    theta = _get(scaling, "rope_theta", float, _get(document, "rope_theta", float, 10_000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if _get(scaling, "partial_rotary_factor", float, 1.0) != 1.0:
        raise UnsupportedModel("partly rotated heads (partial_rotary_factor) aren't supported")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", _get(scaling, "factor", float))
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            _get(scaling, "factor", float),
            _get(scaling, "low_freq_factor", float),
            _get(scaling, "high_freq_factor", float),
            _get(scaling, "original_max_position_embeddings", int),
        )
    raise UnsupportedModel(f"rope scaling {kind!r} isn't supported, only 'linear' and 'llama3'")


def _gguf_rope(file: GgufFile, architecture: str) -> RopeConfig:
    theta = file.value(f"{architecture}.rope.freq_base", float, 10_000.0)
    kind = file.value(f"{architecture}.rope.scaling.type", str, "none")
    if "rope_freqs.weight" in file.tensors:
        return RopeConfig(theta, "factors")
    if kind == "none":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", file.value(f"{architecture}.rope.scaling.factor", float))
    raise UnsupportedModel(f"rope scaling {kind!r} isn't supported, only 'linear'")


def _get(document: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """Return a field of a JSON document, checked. Raises `ModelFormatError`."""
    value = document.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelFormatError(f"config.json lacks {key}")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ModelFormatError(f"config.json: {key} must be {kind.__name__}, got {value!r}")
    return value


def _bounded(what: str, value: int, high: int) -> None:
    if not 1 <= value <= high:
        raise ModelFormatError(f"the model claims {what} = {value}, outside 1 to {high}")
