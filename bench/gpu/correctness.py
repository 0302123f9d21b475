"""Every kernel on the device against float64 on the same inputs: a row per case, with its largest error."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from bench.gpu.context import Context

from paceline_kernels.triton_ops.attention import paged_attention
from paceline_kernels.triton_ops.attention_plan import SplitPolicy, plan_paged
from paceline_kernels.triton_ops.bitmask import apply_bitmask
from paceline_kernels.triton_ops.block_copy import copy_blocks
from paceline_kernels.triton_ops.gate import gelu_mul, gelu_tanh_mul, silu_mul
from paceline_kernels.triton_ops.launch import current_target
from paceline_kernels.triton_ops.norm import add_rms_norm, rms_norm
from paceline_kernels.triton_ops.quantised_matmul import int4_matmul, quantise_activations, row_scaled_matmul
from paceline_kernels.triton_ops.quantised_weights import quantise_int4, quantise_rows
from paceline_kernels.triton_ops.rope import rope_and_cache
from paceline_kernels.triton_ops.sampling import SamplingBatch, sample

# What a result may differ by, absolute and relative: a few roundings of the dtype.
TOLERANCE = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
FP8 = torch.float8_e4m3fn
Case = tuple[str, torch.Tensor, torch.Tensor, float]


def run(context: Context) -> None:
    """Check every kernel; a kernel that fails to build or run is a row too."""
    checks: list[Callable[[Context], Iterator[Case]]] = [_norms, _gates, _rope, _attention, _products, _sampling, _blocks]
    for check in checks:
        try:
            for name, actual, expected, tolerance in check(context):
                error = (actual.double() - expected.double()).abs()
                good = bool((error <= tolerance * (1 + expected.double().abs())).all())
                context.put("cases", case=name, largest_error=float(error.max()), tolerance=tolerance, good=good)
        except Exception as error:  # noqa: BLE001 - the other kernels are checked all the same
            context.put("cases", case=check.__name__.strip("_"), error=f"{type(error).__name__}: {error}"[:500], good=False)


def _dtypes(context: Context) -> tuple[torch.dtype, ...]:
    return (torch.float32,) if context.sizes.dry else (torch.float32, torch.float16, torch.bfloat16)


def _random(context: Context, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32, device=context.sizes.device).to(dtype)


def _norms(context: Context) -> Iterator[Case]:
    for dtype in _dtypes(context):
        for size in (64,) if context.sizes.dry else (576, 1024, 4096, 16_384):
            x, weight, residual = (_random(context, n, size, dtype=dtype) for n in (7, 1, 7))
            yield f"rms_norm {dtype} {size}", rms_norm(x, weight[0], 1e-5), _normed(x.double(), weight[0]), TOLERANCE[dtype]
            total = (x.double() + residual.double()).to(dtype)
            normed = add_rms_norm(x, residual, weight[0], 1e-5)
            yield f"add_rms_norm {dtype} {size}", normed, _normed(total.double(), weight[0]), TOLERANCE[dtype]
            yield f"residual sum {dtype} {size}", residual, total, TOLERANCE[dtype]


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()


def _gates(context: Context) -> Iterator[Case]:
    functional = torch.nn.functional
    for dtype in _dtypes(context):
        x = _random(context, 5, 2 * 1500, dtype=dtype) * 3
        gate, up = x.double().chunk(2, -1)
        yield f"silu_mul {dtype}", silu_mul(x), functional.silu(gate) * up, TOLERANCE[dtype]
        yield f"gelu_mul {dtype}", gelu_mul(x), functional.gelu(gate) * up, TOLERANCE[dtype]
        tanh = functional.gelu(gate, approximate="tanh") * up
        yield f"gelu_tanh_mul {dtype}", gelu_tanh_mul(x), tanh, TOLERANCE[dtype]


def _rope(context: Context) -> Iterator[Case]:
    heads, kv_heads, size = context.sizes.heads
    for dtype in _dtypes(context):
        qkv = _random(context, 6, heads + 2 * kv_heads, size, dtype=dtype)
        angles = torch.rand(6, size // 2, device=qkv.device) * 6
        cos, sin = angles.cos(), angles.sin()
        full_cos, full_sin = torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
        cache = torch.zeros(3, 16, 2, kv_heads, size, dtype=dtype, device=qkv.device)
        slots = torch.tensor([3, 40, -1, 7, 20, 0], dtype=torch.int32, device=qkv.device)
        wide = qkv.double()
        swapped = wide.unflatten(-1, (2, size // 2)).flip(2).flatten(2)
        turned = wide * full_cos.double().unsqueeze(1) + swapped * full_sin.double().unsqueeze(1)
        queries = rope_and_cache(qkv, full_cos, full_sin, cache, slots, heads)
        yield f"rope queries {dtype}", queries, turned[:, :heads], TOLERANCE[dtype]
        expected = torch.zeros(48, 2 * kv_heads, size, dtype=torch.float64, device=qkv.device)
        live = slots >= 0
        keys_values = torch.cat((turned[:, heads : heads + kv_heads], wide[:, heads + kv_heads :]), 1)
        expected[slots[live].long()] = keys_values[live]
        yield f"rope cache {dtype}", cache.view(48, 2 * kv_heads, size), expected, TOLERANCE[dtype]


def _attention(context: Context) -> Iterator[Case]:
    heads, kv_heads, _ = context.sizes.heads
    lens, contexts = ((1, 5, 0), (20, 5, 0)) if context.sizes.dry else ((1, 1, 70, 0, 300), (5000, 16, 70, 0, 5000))
    for dtype in _dtypes(context):
        for size in (16,) if context.sizes.dry else (64, 80, 96, 128, 256):
            for options in ({}, {"window": 40}, {"soft_cap": 5.0}) if size in (16, 128) else ({},):
                name = f"attention {dtype} {size} {options or ''}".strip()
                yield name, *_attention_case(context, dtype, lens, contexts, (heads, kv_heads, size), options)
    for stored in () if context.sizes.dry else _narrow():
        name = f"attention bfloat16 over {stored}"
        yield name, *_attention_case(context, torch.bfloat16, lens, contexts, (heads, kv_heads, 128), {}, stored)


def _narrow() -> tuple[torch.dtype, ...]:
    return (torch.int8, FP8) if current_target().has_fp8 else (torch.int8,)


def _attention_case(
    context: Context, dtype: torch.dtype, lens: tuple[int, ...], contexts: tuple[int, ...], shape: tuple[int, int, int],
    options: dict[str, float], stored: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, float]:  # fmt: skip
    heads, kv_heads, size = shape
    counts = [-(-n // 16) for n in contexts]
    ids = iter(torch.randperm(sum(counts)).tolist())
    blocks = [[next(ids) for _ in range(n)] for n in counts]
    queries = _random(context, sum(lens), heads, size, dtype=dtype)
    cache, scales = _random(context, sum(counts), 16, 2, kv_heads, size, dtype=dtype), None
    wide = cache.double()
    if stored is not None:
        scales = wide.abs().amax(-1).float() / (127.0 if stored == torch.int8 else 448.0)
        scaled = wide / scales.unsqueeze(-1)
        cache = (scaled.round() if stored == torch.int8 else scaled.float()).to(stored)
        wide = cache.double() * scales.double().unsqueeze(-1)
    policy = SplitPolicy(264 if not context.sizes.dry else 4, kv_heads)
    batch = plan_paged(lens, contexts, blocks, group=heads // kv_heads, policy=policy, device=queries.device)
    actual = paged_attention(queries, cache, batch, size**-0.5, kv_scales=scales, **options)  # type: ignore[arg-type]
    rows, first = [], 0
    for length, end, table in zip(lens, contexts, blocks, strict=True):
        if length:
            kv = wide[torch.tensor(table, device=wide.device)].flatten(0, 1)[:end]
            rows.append(_dense(queries[first : first + length].double(), kv, size**-0.5, options))
        first += length
    return actual, torch.cat(rows), TOLERANCE[dtype]


def _dense(queries: torch.Tensor, kv: torch.Tensor, scale: float, options: dict[str, float]) -> torch.Tensor:
    """Attention of the last rows of a sequence, [n, H·D]; `kv` [c, 2, K, D]."""
    group = queries.shape[1] // kv.shape[2]
    keys, values = (kv[:, side].repeat_interleave(group, 1).transpose(0, 1) for side in (0, 1))
    scores = queries.transpose(0, 1) @ keys.transpose(1, 2) * scale
    if cap := options.get("soft_cap"):
        scores = cap * (scores / cap).tanh()
    behind = torch.arange(len(kv) - len(queries), len(kv), device=kv.device)[:, None] - torch.arange(
        len(kv), device=kv.device
    )
    hidden = (behind < 0) | (behind >= options.get("window", len(kv) + 1))
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values).transpose(0, 1).flatten(1)


def _products(context: Context) -> Iterator[Case]:
    dtype = torch.float32 if context.sizes.dry else torch.bfloat16
    for rows in (1,) if context.sizes.dry else (1, 16, 33, 64):
        depth, size = (128, 64) if context.sizes.dry else (4096, 6144)
        x, weight = _random(context, rows, depth, dtype=dtype), _random(context, size, depth)
        for stored in (torch.int8,) if context.sizes.dry else _narrow():
            narrow = quantise_rows(weight, stored)
            expected = x.double() @ narrow.dequantise().double().T
            yield f"matmul {dtype} × {stored} {rows}", row_scaled_matmul(x, narrow), expected, _summed(dtype, depth)
        for group in (32, 128):
            packed = quantise_int4(weight, group)
            expected = x.double() @ packed.dequantise().double().T
            yield f"matmul {dtype} × int4/{group} {rows}", int4_matmul(x, packed), expected, _summed(dtype, depth)
        if not context.sizes.dry and current_target().has_fp8:
            values, scales = quantise_activations(x)
            narrow = quantise_rows(weight, FP8)
            expected = values.double() * scales.double()[:, None] @ narrow.dequantise().double().T
            actual = row_scaled_matmul(values, narrow, x_scales=scales, dtype=dtype)
            yield f"matmul float8 × float8 {rows}", actual, expected, _summed(dtype, depth)


def _summed(dtype: torch.dtype, depth: int) -> float:
    """Weights are rounded to the dtype before they meet its numbers, and sums of `depth` products are sqrt(depth) large."""
    return TOLERANCE[dtype] * depth**0.5 / 16


def _sampling(context: Context) -> Iterator[Case]:
    rows, vocabulary = 4, context.sizes.vocabulary
    logits = _random(context, rows, vocabulary) * 3
    device = logits.device
    zeros = torch.zeros(rows, device=device)
    yield "sample greedy", sample(logits, SamplingBatch(zeros)), logits.argmax(-1), 0.0
    seeds = torch.arange(rows, device=device)
    counts = torch.tensor([1, 1, 2, 5], dtype=torch.int32, device=device)
    chosen = sample(logits, SamplingBatch(zeros + 1, seeds, top_ks=counts, top_ps=zeros + 0.9, min_ps=zeros + 0.01))
    rank = (logits > logits.gather(1, chosen[:, None])).sum(-1)
    yield "sample keeps to top_k", (rank >= counts).long(), torch.zeros(rows, device=device), 0.0
    again = sample(logits, SamplingBatch(zeros + 1, seeds, top_ks=counts, top_ps=zeros + 0.9, min_ps=zeros + 0.01))
    yield "sample repeats", again, chosen, 0.0
    words = torch.randint(-(2**31), 2**31, (1, -(-vocabulary // 32)), device=device).to(torch.int32)
    allowed = (words[0, torch.arange(vocabulary, device=device) // 32] >> (torch.arange(vocabulary, device=device) % 32)) & 1
    masked = logits.clone()
    apply_bitmask(masked, words, torch.tensor([2], device=device))
    yield "bitmask", (masked[2] == float("-inf")).long(), 1 - allowed, 0.0


def _blocks(context: Context) -> Iterator[Case]:
    cache = _random(context, 6, 16, 2, 2, 64)
    expected = cache.clone()
    expected[5], expected[0] = cache[1], cache[3]
    copy_blocks(cache, torch.tensor([[1, 5], [3, 0]], device=cache.device))
    yield "copy_blocks", cache, expected, 0.0
