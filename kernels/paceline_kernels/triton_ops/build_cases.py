"""The dtype × shape × target matrix that is built ahead of time: every kernel with every tile that its launcher can choose.

A case runs its launcher on meta tensors under `recording`, so that what is built is what a device would launch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from paceline_kernels.triton_ops.attention import paged_attention
from paceline_kernels.triton_ops.attention_plan import SplitPolicy, plan_paged
from paceline_kernels.triton_ops.block_copy import copy_blocks
from paceline_kernels.triton_ops.gate import gelu_mul, gelu_tanh_mul, silu_mul
from paceline_kernels.triton_ops.launch import KernelCall, Target, recording
from paceline_kernels.triton_ops.norm import add_rms_norm, rms_norm
from paceline_kernels.triton_ops.rope import rope_and_cache

__all__ = ["BuildCase", "build_cases"]

FP8 = torch.float8_e4m3fn
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HEAD_SIZES = (64, 80, 96, 128, 256)


@dataclass(frozen=True, slots=True)
class BuildCase:
    """A launcher's call with its arguments bound. `may_spill` is false where spilt registers would cost the bandwidth."""

    name: str
    run: Callable[[], object]
    may_spill: bool = False
    quick: bool = False

    def calls(self, target: Target) -> list[KernelCall]:
        """Return the launches that the case makes on `target`."""
        with recording(target) as records:
            self.run()
        return records.calls


def build_cases(target: Target) -> Iterator[BuildCase]:
    """Yield the matrix for `target`; float8_e4m3fn is left out where the target lacks it (sm_80)."""
    yield from _attention(target)
    yield from _pointwise()
    yield from _rope(target)


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention(target: Target) -> Iterator[BuildCase]:
    stored = (None, torch.int8, FP8) if target.has_fp8 else (None, torch.int8)
    for dtype, kv_dtype, size in product(FLOATS, stored, HEAD_SIZES):
        quick = size == 128 and dtype == torch.bfloat16
        yield _attention_case(dtype, kv_dtype, size, quick=quick)
    for group, size, dtype in product((1, 7, 16), (64, 128, 256), (torch.float16, torch.bfloat16)):
        yield _attention_case(dtype, None, size, group=group, window=4096, soft_cap=50.0)
    for size in HEAD_SIZES:
        yield _attention_case(torch.bfloat16, None, size, invariant=True)


def _attention_case(
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    size: int,
    *,
    group: int = 4,
    window: int | None = None,
    soft_cap: float | None = None,
    invariant: bool = False,
    quick: bool = False,
) -> BuildCase:
    """Two sequences, one decode and one prefill, with enough context to split: both tile heights and the reduction."""
    kv_heads, lens, contexts = 8, (1, 300), (5000, 5000)
    queries = _empty(sum(lens), group * kv_heads, size, dtype=dtype)
    cache = _empty(700, 16, 2, kv_heads, size, dtype=kv_dtype or dtype)
    scales = _empty(700, 16, 2, kv_heads, dtype=torch.float32) if kv_dtype else None
    policy = SplitPolicy(264, kv_heads, invariant=invariant)

    def run() -> torch.Tensor:
        batch = plan_paged(lens, contexts, [range(313)] * 2, group=group, policy=policy, window=window, device="meta")
        return paged_attention(queries, cache, batch, 0.125, window=window, soft_cap=soft_cap, kv_scales=scales)

    options = f"{group}x{size} window={window} cap={soft_cap} invariant={invariant}"
    return BuildCase(f"attention {dtype} kv={kv_dtype or dtype} {options}", run, quick=quick)


def _pointwise() -> Iterator[BuildCase]:
    for dtype, size in product(FLOATS, (576, 1024, 4096, 5120, 8192, 16384)):
        x, weight = _empty(7, size, dtype=dtype), _empty(size, dtype=dtype)
        quick = dtype == torch.bfloat16 and size == 4096
        yield BuildCase(f"rms_norm {dtype} {size}", partial(rms_norm, x, weight, 1e-6), quick=quick)
        yield BuildCase(f"add_rms_norm {dtype} {size}", partial(add_rms_norm, x, x, weight, 1e-6), quick=quick)
    for dtype, size in product(FLOATS, HEAD_SIZES):
        heads, weight = _empty(7, 48, size, dtype=dtype)[:, :32], _empty(size, dtype=dtype)
        yield BuildCase(f"rms_norm of heads {dtype} {size}", partial(rms_norm, heads, weight, 1e-6))
    for dtype, gate in product(FLOATS, (silu_mul, gelu_mul, gelu_tanh_mul)):
        run = partial(gate, _empty(7, 2 * 14336, dtype=dtype))
        yield BuildCase(f"{gate.__name__} {dtype}", run, quick=dtype == torch.bfloat16)
    pairs = _empty(5, 2, dtype=torch.int64)
    yield BuildCase("copy_blocks", partial(copy_blocks, _empty(9, 16, 2, 8, 128, dtype=torch.bfloat16), pairs), quick=True)


def _rope(target: Target) -> Iterator[BuildCase]:
    stored = (None, torch.int8, FP8) if target.has_fp8 else (None, torch.int8)
    for dtype, kv_dtype, size in product(FLOATS, stored, HEAD_SIZES):
        heads, kv_heads, count = 32, 8, 7
        qkv, table = _empty(count, heads + 2 * kv_heads, size, dtype=dtype), _empty(99, size, dtype=dtype)
        cache, ids = _empty(9, 16, 2, kv_heads, size, dtype=kv_dtype or dtype), _empty(count, dtype=torch.int64)
        scales = _empty(9, 16, 2, kv_heads, dtype=torch.float32) if kv_dtype else None
        run = partial(rope_and_cache, qkv, table, table, cache, ids, heads, positions=ids, kv_scales=scales)
        yield BuildCase(f"rope {dtype} kv={kv_dtype or dtype} {size}", run, quick=size == 128 and dtype == torch.bfloat16)
