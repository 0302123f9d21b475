"""How long a step takes where nothing was measured: the roofline of a model on an accelerator.

A step reads every weight once, and the keys and values of every token that its sequences look back on, and computes two
operations per weight and token. Reading and computing overlap, so the slower of the two is what the step takes:

    seconds = max(bytes / bandwidth, operations / peak) / efficiency
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline_core.errors import FormatError
from paceline_core.plan import StepShape
from paceline_sim.hardware import Accelerator, ModelShape

__all__ = ["Roofline"]

_ACTIVATIONS = 0.05  # of the memory: activations of a large prefill step, CUDA context, allocator slack


@dataclass(frozen=True, slots=True)
class Roofline:
    """A step-time model (`StepPredictor`) in seconds, from bytes and operations instead of measurements.

    `weight_bytes` per weight, keys and values have 16 bits. `efficiency` is the share of the data sheet's figures that is
    reached: 1.0 gives the ceiling that no engine passes. Raises `FormatError` if it isn't within (0, 1].
    """

    model: ModelShape
    accelerator: Accelerator
    weight_bytes: float = 2.0
    efficiency: float = 1.0
    # seconds of memory traffic per step and per KV position, of arithmetic per token and per attended pair
    _weights: float = field(init=False, repr=False)
    _position: float = field(init=False, repr=False)
    _token: float = field(init=False, repr=False)
    _pair: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise FormatError(f"efficiency is {self.efficiency:g}, expected a share of the peak: above 0, at most 1")
        bandwidth, flops = self.accelerator.bandwidth * self.efficiency, self.accelerator.flops * self.efficiency
        object.__setattr__(self, "_weights", self.model.weight_bytes(self.weight_bytes) / bandwidth)
        object.__setattr__(self, "_position", self.model.kv_bytes_per_token() / bandwidth)
        object.__setattr__(self, "_token", self.model.flops_per_token / flops)
        object.__setattr__(self, "_pair", self.model.attention_flops / flops)

    @property
    def constant(self) -> float:
        """Seconds to read the weights."""
        return self._weights

    @property
    def residual(self) -> float:
        """Unknown, because nothing was measured: 0, so that a deadline is judged by the ceiling itself."""
        return 0.0

    def predict(self, shape: StepShape) -> float:
        """Return the seconds of a step."""
        memory = self._weights + self._position * shape.context_tokens
        pairs = shape.context_tokens + shape.prefill_attention
        return max(memory, self._token * (shape.decode_tokens + shape.prefill_tokens) + self._pair * pairs)

    def predict_decode(self, sequences: int, context_tokens: int) -> float:
        """Return the seconds of a step of this many decodes."""
        memory = self._weights + self._position * context_tokens
        compute = self._token * sequences + self._pair * context_tokens
        return memory if memory >= compute else compute  # noqa: FURB136  # max() would cost as much as the rest

    def outside(self, shape: StepShape) -> tuple[str, ...]:
        """Return nothing: bytes and operations can be counted for any step."""
        return ()

    @property
    def memory_left(self) -> float:
        """Bytes of the device left for KV: memory less weights and activations; below 0, the model doesn't fit."""
        return self.accelerator.memory * (1 - _ACTIVATIONS) - self.model.weight_bytes(self.weight_bytes)

    def num_blocks(self, block_size: int, kv_memory_fraction: float) -> int:
        """Return how many KV blocks of `block_size` tokens fit. Raises `FormatError` if not even one does."""
        blocks = int(self.memory_left * kv_memory_fraction / (self.model.kv_bytes_per_token() * block_size))
        if blocks < 1:
            raise FormatError(self.misfit)
        return blocks

    @property
    def misfit(self) -> str:
        """Say, of a model that doesn't fit, what is lacking and what would do."""
        weights, device = self.model.weight_bytes(self.weight_bytes), self.accelerator
        usable = device.memory * (1 - _ACTIVATIONS)
        return (
            f"{self.model.name} doesn't fit one {device.name}: its weights are {weights / 1e9:.1f} GB, it has "
            f"{device.memory / 1e9:.0f} GB ({usable / 1e9:.1f} usable); the weights alone need {int(weights // usable) + 1} "
            f"of them, or weights of {8 * self.weight_bytes * usable / weights:.0f} bits or fewer"
        )
