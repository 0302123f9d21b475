"""What common models weigh and common accelerators can do, from their public data sheets and configuration files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from paceline_core.errors import FormatError

__all__ = ["ACCELERATORS", "DTYPES", "MODELS", "Accelerator", "ModelShape", "find_accelerator", "find_model"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a decoder costs: `parameters`, the sizes of its attention, and its context length (`max_len`, tokens)."""

    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_len: int

    def kv_bytes_per_token(self, kv_dtype_bytes: float = 2.0) -> float:
        """Return the bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * kv_dtype_bytes

    def weight_bytes(self, dtype_bytes: float) -> float:
        """Return the bytes of all weights, every one of which a step reads once."""
        return self.parameters * dtype_bytes

    @property
    def flops_per_token(self) -> float:
        """Operations of the weights per token: one multiplication and one addition each."""
        return 2 * self.parameters

    @property
    def attention_flops(self) -> float:
        """Operations per pair of a query and a key: QK and PV, two each per element."""
        return 4 * self.layers * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device: memory and memory bandwidth (bytes, bytes/s), dense 16-bit peak (operations/s)."""

    name: str
    memory: float
    bandwidth: float
    flops: float


_GB, _TB, _TFLOPS = 1e9, 1e12, 1e12

# parameters and shapes as in the models' config.json and safetensors index
_MODELS = (
    ModelShape("smollm2-135m", 0.1345e9, 30, 9, 3, 64, 8_192),
    ModelShape("llama-3.2-1b", 1.236e9, 16, 32, 8, 64, 131_072),
    ModelShape("llama-3.2-3b", 3.213e9, 28, 24, 8, 128, 131_072),
    ModelShape("llama-2-7b", 6.738e9, 32, 32, 32, 128, 4_096),
    ModelShape("mistral-7b", 7.248e9, 32, 32, 8, 128, 32_768),
    ModelShape("qwen2.5-7b", 7.616e9, 28, 28, 4, 128, 32_768),
    ModelShape("llama-3.1-8b", 8.030e9, 32, 32, 8, 128, 131_072),
    ModelShape("qwen3-8b", 8.191e9, 36, 32, 8, 128, 40_960),
    ModelShape("llama-2-13b", 13.016e9, 40, 40, 40, 128, 4_096),
    ModelShape("qwen2.5-32b", 32.764e9, 64, 40, 8, 128, 32_768),
    ModelShape("llama-3.1-70b", 70.554e9, 80, 64, 8, 128, 131_072),
)
# vendors' data sheets; operations are dense (without sparsity), bf16 or fp16
_ACCELERATORS = (
    Accelerator("t4", 16 * _GB, 0.32 * _TB, 65 * _TFLOPS),
    Accelerator("l4", 24 * _GB, 0.30 * _TB, 121 * _TFLOPS),
    Accelerator("a10g", 24 * _GB, 0.60 * _TB, 70 * _TFLOPS),
    Accelerator("l40s", 48 * _GB, 0.864 * _TB, 362 * _TFLOPS),
    Accelerator("a100-40gb", 40 * _GB, 1.555 * _TB, 312 * _TFLOPS),
    Accelerator("a100-80gb", 80 * _GB, 2.039 * _TB, 312 * _TFLOPS),
    Accelerator("h100", 80 * _GB, 3.35 * _TB, 989 * _TFLOPS),
    Accelerator("h200", 141 * _GB, 4.8 * _TB, 989 * _TFLOPS),
    Accelerator("b200", 180 * _GB, 8.0 * _TB, 2_250 * _TFLOPS),
    Accelerator("mi300x", 192 * _GB, 5.3 * _TB, 1_307 * _TFLOPS),
)

MODELS: Mapping[str, ModelShape] = {model.name: model for model in _MODELS}
ACCELERATORS: Mapping[str, Accelerator] = {device.name: device for device in _ACCELERATORS}
DTYPES: Mapping[str, float] = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}  # bytes per weight

T = TypeVar("T")


def find_model(name: str) -> ModelShape:
    """Return the built-in model of that name. Raises `FormatError` that lists them."""
    return _find(name, MODELS, "model")


def find_accelerator(name: str) -> Accelerator:
    """Return the built-in accelerator of that name. Raises `FormatError` that lists them."""
    return _find(name, ACCELERATORS, "accelerator")


def _find(name: str, table: Mapping[str, T], what: str) -> T:
    try:
        return table[name.lower()]
    except KeyError:
        raise FormatError(f"{name!r} is not a built-in {what}: use one of {', '.join(table)}") from None
