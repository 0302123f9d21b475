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
from paceline_kernels.triton_ops.bitmask import apply_bitmask
from paceline_kernels.triton_ops.block_copy import copy_blocks
from paceline_kernels.triton_ops.gate import gelu_mul, gelu_tanh_mul, silu_mul
from paceline_kernels.triton_ops.launch import KernelCall, Target, recording
from paceline_kernels.triton_ops.norm import add_rms_norm, rms_norm
from paceline_kernels.triton_ops.quantised_matmul import int4_matmul, quantise_activations, row_scaled_matmul
from paceline_kernels.triton_ops.quantised_weights import Int4Weight, RowScaledWeight
from paceline_kernels.triton_ops.rope import rope_and_cache
from paceline_kernels.triton_ops.sampling import SamplingBatch, sample

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
    yield from _sampling()
    yield from _products(target)


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention(target: Target) -> Iterator[BuildCase]:
    stored = (torch.int8, FP8) if target.has_fp8 else (torch.int8,)
    for size in HEAD_SIZES:
        yield _attention_case(torch.bfloat16, None, size, quick=size == 128)
    # 80 and 96 are padded to 128, which bfloat16 shows to make no difference
    for dtype, size in product((torch.float16, torch.float32), (64, 128, 256)):
        yield _attention_case(dtype, None, size)
    for kv_dtype, size in product(stored, HEAD_SIZES):
        yield _attention_case(torch.bfloat16, kv_dtype, size, quick=size == 128)
    for dtype, kv_dtype in product((torch.float16, torch.float32), stored):
        yield _attention_case(dtype, kv_dtype, 128)
    # groups, windows and caps change masks and scores, not tiles: pairs of them with the widths that matter for registers
    for group, size in ((1, 64), (7, 128), (16, 128), (16, 256)):
        yield _attention_case(torch.bfloat16, None, size, group=group, window=4096, soft_cap=50.0)
    # the invariant mode launches the prefill tile for all rows
    yield _attention_case(torch.bfloat16, None, 128, group=16, invariant=True)


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
    # float32 is for checking numbers, not for serving: its tall tiles take more than all registers
    may_spill = dtype == torch.float32
    return BuildCase(f"attention {dtype} kv={kv_dtype or dtype} {options}", run, may_spill=may_spill, quick=quick)


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
        may_spill = dtype == torch.float32  # 8 bytes on sm_100 for heads of 256
        quick = size == 128 and dtype == torch.bfloat16
        yield BuildCase(f"rope {dtype} kv={kv_dtype or dtype} {size}", run, may_spill, quick)


def _sampling() -> Iterator[BuildCase]:
    rows = 3
    floats, counts = _empty(rows, dtype=torch.float32), _empty(rows, dtype=torch.int32)
    seeds = _empty(rows, dtype=torch.int64)
    batches = {
        "greedy": SamplingBatch(floats),
        "plain": SamplingBatch(floats, seeds),
        "top_k": SamplingBatch(floats, seeds, top_ks=counts),
        "min_p": SamplingBatch(floats, seeds, min_ps=floats),
        "all filters": SamplingBatch(floats, seeds, counts, floats, floats),
    }
    for dtype, (name, batch) in product(FLOATS, batches.items()):
        logits = _empty(rows, 128_256, dtype=dtype)
        run = partial(sample, logits, batch)
        # ptxas holds the search to 80 registers and spills three: outside the loop, a few bytes for megabytes read
        yield BuildCase(f"sample {name} {dtype}", run, may_spill=True, quick=dtype == torch.float32)
    for dtype in FLOATS:
        run = partial(apply_bitmask, _empty(rows, 128_256, dtype=dtype), _empty(rows, 4008, dtype=torch.int32), seeds)
        yield BuildCase(f"apply_bitmask {dtype}", run, quick=dtype == torch.float32)


def _products(target: Target) -> Iterator[BuildCase]:
    """Each tile height (1, 17 and 33 rows), with and without a split: 4096 outputs are split, 32768 aren't."""
    for (rows, size), dtype in product(((1, 4096), (17, 4096), (33, 4096), (33, 32768)), FLOATS):
        x, bias = _empty(rows, 4096, dtype=dtype), _empty(size, dtype=dtype)
        quick = dtype == torch.bfloat16 and rows == 1 and size == 4096
        may_spill = dtype == torch.float32  # for checking numbers, as in attention
        for stored in (torch.int8, FP8) if target.has_fp8 else (torch.int8,):
            weight = RowScaledWeight(_empty(size, 4096, dtype=stored), _empty(size, dtype=torch.float32))
            run = partial(row_scaled_matmul, x, weight, bias)
            yield BuildCase(f"matmul {dtype} × {stored} {rows}→{size}", run, may_spill, quick)
        for group in (32, 64, 128):
            scales = _empty(size, 4096 // group, dtype=torch.float16)
            weight4 = Int4Weight(_empty(size, 2048, dtype=torch.uint8), scales, scales)
            run = partial(int4_matmul, x, weight4, bias)
            yield BuildCase(f"matmul {dtype} × int4/{group} {rows}→{size}", run, may_spill, quick and group == 32)
    if target.has_fp8:
        yield from _float8_products()


def _float8_products() -> Iterator[BuildCase]:
    for rows, size in product((1, 17, 33), (4096, 32768)):
        weight = RowScaledWeight(_empty(size, 4096, dtype=FP8), _empty(size, dtype=torch.float32))
        x, scales = _empty(rows, 4096, dtype=FP8), _empty(rows, dtype=torch.float32)
        run = partial(row_scaled_matmul, x, weight, None, scales, dtype=torch.bfloat16)
        yield BuildCase(f"matmul float8 × float8 {rows}→{size}", run, quick=rows == 1 and size == 4096)
    for dtype, depth in product(FLOATS, (1024, 4096, 14336)):
        run = partial(quantise_activations, _empty(3, depth, dtype=dtype))
        yield BuildCase(f"quantise_activations {dtype} {depth}", run, quick=dtype == torch.bfloat16 and depth == 4096)
