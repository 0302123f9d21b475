"""What a decoder looks like (`ModelConfig`): the differences between the families, declared. No torch here.

`config_hugging_face` reads it out of a `config.json`, `config_gguf` out of GGUF metadata.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline_runtime.model_errors import ModelFormatError, UnsupportedModel

__all__ = ["MAX_LAYERS", "LayerConfig", "ModelConfig", "RopeConfig", "bounded"]

# Bounds of the sizes that a file may claim: far above real models, low enough that no product overflows or fills the memory
# before the weights' real shapes are compared.
MAX_LAYERS = 1024
_MAX_HEADS = 1024
_MAX_WIDTH = 262_144
_MAX_VOCABULARY = 4_194_304
_MAX_POSITIONS = 16_777_216
_ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions of some layers.

    | `kind` | frequencies |
    |---|---|
    | `default` | of `theta` alone |
    | `none` | no rotation at all |
    | `linear` | divided by `factor` |
    | `llama3` | the low ones divided by `factor`, with a ramp between (`low_freq_factor`, `high_freq_factor`) |
    | `yarn` | those that turn less than `beta_slow` times divided by `factor`, with a ramp to those above `beta_fast` |
    | `longrope` | divided by `short_factors` where the model runs up to `original_max_positions`, else by `long_factors` |
    | `factors` | divided by the numbers of the weights' tensor `factors_tensor` |

    `rotary_dim` numbers of each head are rotated (None: all). Cosines and sines are multiplied by `attention_factor`.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    original_max_positions: int = 8192
    short_factors: tuple[float, ...] | str = ()  # a text names a tensor of the weights
    long_factors: tuple[float, ...] | str = ()
    factors_tensor: str = ""
    attention_factor: float = 1.0
    rotary_dim: int | None = None

    def __post_init__(self) -> None:
        numbers = (self.theta, self.factor, self.low_freq_factor, self.beta_fast, self.beta_slow, self.attention_factor)
        if not all(0 < number < math.inf for number in numbers):
            raise ModelFormatError("rope theta and the factors of its scaling must be above 0")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ModelFormatError("rope's low_freq_factor must be below its high_freq_factor")
        if self.kind == "yarn" and self.theta == 1:
            raise ModelFormatError("yarn needs a rope theta other than 1")
        bounded("original positions", self.original_max_positions, _MAX_POSITIONS)

    def limited(self, max_positions: int) -> RopeConfig:
        """Return the rope of a model that runs up to `max_positions`: LongRoPE has factors for short and for long texts."""
        if self.kind != "longrope":
            return self
        long = max_positions > self.original_max_positions
        return replace(self, short_factors=self.long_factors) if long else self


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Where layers differ: which of the model's ropes, and how many last positions a token sees (None: all)."""

    rope: int = 0
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder: pre-norm blocks of grouped-query attention and a gated feed-forward part, and what its family adds."""

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
    ropes: tuple[RopeConfig, ...]
    layers: tuple[LayerConfig, ...] = ()  # none: all alike
    activation: str = "silu"  # of the gate: silu, or GELU's tanh approximation
    tie_embeddings: bool = False
    attention_bias: bool = False  # on queries, keys and values
    output_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # an RMSNorm over each head of queries and keys, before they are rotated
    post_norms: bool = False  # an RMSNorm after attention and after the feed-forward part as well (Gemma 2 and 3)
    wide_norms: bool = False  # norm weights stay in float32 (Gemma)
    norm_offset: float = 0.0  # what is added to the stored norm weights (1 in Gemma's safetensors)
    fused_weights: bool = False  # stored as qkv_proj and gate_up_proj (Phi-3)
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # of q · k; None: 1 / sqrt(head_dim)
    attention_cap: float | None = None  # scores s become cap · tanh(s / cap) (Gemma 2)
    logits_cap: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        bounded("layers", self.num_layers, MAX_LAYERS)
        bounded("heads", self.num_heads, _MAX_HEADS)
        bounded("key/value heads", self.num_kv_heads, self.num_heads)
        bounded("vocabulary", self.vocab_size, _MAX_VOCABULARY)
        bounded("positions", self.max_positions, _MAX_POSITIONS)
        for what in ("hidden_size", "intermediate_size", "head_dim"):
            bounded(what, getattr(self, what), _MAX_WIDTH)
        if self.num_heads % self.num_kv_heads:
            raise ModelFormatError(f"{self.num_heads} heads can't share {self.num_kv_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise ModelFormatError(f"rotary positions need an even head size, got {self.head_dim}")
        if self.activation not in _ACTIVATIONS:
            raise UnsupportedModel(f"the activation {self.activation!r} isn't supported, only {', '.join(_ACTIVATIONS)}")
        self._check_numbers()
        self._check_layers()

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values of one token over all layers, in numbers (not bytes)."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim

    @property
    def window(self) -> int | None:
        """The sliding window of the layers that have one; None if none has."""
        return next((layer.window for layer in self.layers if layer.window is not None), None)

    def limited(self, max_positions: int) -> ModelConfig:
        """Return the configuration for texts of up to `max_positions` tokens."""
        ropes = tuple(rope.limited(max_positions) for rope in self.ropes)
        return replace(self, max_positions=max_positions, ropes=ropes)

    def _check_numbers(self) -> None:
        caps = [cap for cap in (self.attention_scale, self.attention_cap, self.logits_cap) if cap is not None]
        if not all(0 < number < math.inf for number in (self.rms_norm_eps, self.embedding_scale, *caps)):
            raise ModelFormatError("epsilon, scales and soft caps must be above 0")
        for rope in self.ropes:
            rotated = self.head_dim if rope.rotary_dim is None else rope.rotary_dim
            if rotated % 2 or not 2 <= rotated <= self.head_dim:
                raise ModelFormatError(f"{rotated} of a head's {self.head_dim} numbers can't be rotated in pairs")
            for factors in (rope.short_factors, rope.long_factors):
                if rope.kind == "longrope" and isinstance(factors, tuple) and len(factors) != rotated // 2:
                    raise ModelFormatError(f"longrope has {len(factors)} factors, not one for each of {rotated // 2} pairs")

    def _check_layers(self) -> None:
        if not self.layers:
            object.__setattr__(self, "layers", (LayerConfig(),) * self.num_layers)
        if len(self.layers) != self.num_layers:
            raise ModelFormatError(f"{len(self.layers)} layers are described, but there are {self.num_layers}")
        windows = {layer.window for layer in self.layers if layer.window is not None}
        for window in windows:
            bounded("sliding window", window, _MAX_POSITIONS)
        if len(windows) > 1:
            raise UnsupportedModel(f"sliding windows of several sizes ({sorted(windows)}) aren't supported")


def bounded(what: str, value: int, high: int) -> int:
    """Return `value`. Raises `ModelFormatError` unless it is 1 to `high`."""
    if not 1 <= value <= high:
        raise ModelFormatError(f"the model claims {what} = {value}, outside 1 to {high}")
    return value
