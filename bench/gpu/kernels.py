"""Every kernel's time beside torch's for the same work, and the share of the device's bandwidth that attention reaches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from bench.gpu.context import Context
from bench.gpu.timing import seconds
from torch.nn import functional

from paceline_kernels.triton_ops.attention import paged_attention
from paceline_kernels.triton_ops.attention_plan import PagedBatch, SplitPolicy, plan_paged
from paceline_kernels.triton_ops.bitmask import apply_bitmask
from paceline_kernels.triton_ops.block_copy import copy_blocks
from paceline_kernels.triton_ops.gate import silu_mul
from paceline_kernels.triton_ops.launch import current_target
from paceline_kernels.triton_ops.norm import add_rms_norm, rms_norm
from paceline_kernels.triton_ops.quantised_matmul import int4_matmul, quantise_activations, row_scaled_matmul
from paceline_kernels.triton_ops.quantised_weights import quantise_int4, quantise_rows
from paceline_kernels.triton_ops.rope import rope_and_cache
from paceline_kernels.triton_ops.sampling import SamplingBatch, sample

BLOCK = 16
FP8 = torch.float8_e4m3fn


def run(context: Context) -> None:
    """Time every kernel; one that fails is a row too."""
    for bench in (_decode_attention, _prefill_attention, _pointwise, _products, _sampling, _blocks):
        try:
            bench(context)
        except Exception as error:  # noqa: BLE001 - the others are timed all the same
            context.put("failed", kernel=bench.__name__.strip("_"), error=f"{type(error).__name__}: {error}"[:500])


def _pair(context: Context, kernel: str, shape: str, ours: Callable[[], object], torchs: Callable[[], object] | None,
          moved: int = 0) -> None:  # fmt: skip
    """Time both; `moved` bytes give the share of the copy rate."""
    device = context.sizes.device
    took = seconds(ours, device)
    reference = None if torchs is None else seconds(torchs, device)
    row = {"kernel": kernel, "shape": shape, "microseconds": took * 1e6}
    if reference is not None:
        row |= {"torch_microseconds": reference * 1e6, "times_torch": reference / took}
    if moved:
        row |= {"gb_per_s": moved / took / 1e9, "share_of_copy": moved / took / context.rate("copy_bytes_per_s")}
    context.put("kernels", **row)


def _empty(context: Context, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.randn(*shape, device=context.sizes.device).to(dtype or context.sizes.dtype)


def _kv(context: Context, blocks: int) -> torch.Tensor:
    _, kv_heads, size = context.sizes.heads
    shape = (blocks, BLOCK, 2, kv_heads, size)
    return torch.empty(shape, dtype=context.sizes.dtype, device=context.sizes.device).normal_()


def _batch(context: Context, lens: list[int], contexts: list[int]) -> tuple[PagedBatch, int]:
    """Return a step over scattered blocks, and how many there are."""
    heads, kv_heads, _ = context.sizes.heads
    counts = [-(-n // BLOCK) for n in contexts]
    order = torch.randperm(sum(counts)).tolist()
    tables = [[order.pop() for _ in range(n)] for n in counts]
    policy = SplitPolicy(264 if context.sizes.device.type == "cuda" else 2, kv_heads)
    batch = plan_paged(lens, contexts, tables, group=heads // kv_heads, policy=policy, device=context.sizes.device)
    return batch, sum(counts)


def _decode_attention(context: Context) -> None:
    for sequences, length in context.sizes.decodes:
        _decode_case(context, sequences, length)


def _decode_case(context: Context, sequences: int, length: int) -> None:
    heads, kv_heads, size = context.sizes.heads
    batch, blocks = _batch(context, [1] * sequences, [length] * sequences)
    cache, queries = _kv(context, blocks), _empty(context, sequences, heads, size)
    moved = 2 * sequences * length * kv_heads * size * cache.itemsize
    keys, values = (_empty(context, sequences, kv_heads, length, size) for _ in range(2))
    rows = queries.unsqueeze(2)
    _pair(
        context, "attention, decode", f"{sequences} × {length}",
        lambda: paged_attention(queries, cache, batch, size**-0.5),
        lambda: functional.scaled_dot_product_attention(rows, keys, values, enable_gqa=True),
        moved,
    )  # fmt: skip


def _prefill_attention(context: Context) -> None:
    for length in context.sizes.prefills:
        _prefill_case(context, length)


def _prefill_case(context: Context, length: int) -> None:
    heads, kv_heads, size = context.sizes.heads
    batch, blocks = _batch(context, [length], [length])
    cache, queries = _kv(context, blocks), _empty(context, length, heads, size)
    keys, values = (_empty(context, 1, kv_heads, length, size) for _ in range(2))
    rows = queries.transpose(0, 1).unsqueeze(0).contiguous()
    work = 2 * length * length * heads * size  # two products over the lower triangle
    _pair(
        context, "attention, prefill", f"1 × {length}",
        lambda: paged_attention(queries, cache, batch, size**-0.5),
        lambda: functional.scaled_dot_product_attention(rows, keys, values, is_causal=True, enable_gqa=True),
    )  # fmt: skip
    row = context.results["kernels"][-1]
    row["tflop_per_s"] = work / row["microseconds"] / 1e6


def _pointwise(context: Context) -> None:
    for rows in context.sizes.rows:
        _pointwise_case(context, rows)
        _rope_case(context, rows)


def _pointwise_case(context: Context, rows: int) -> None:
    heads, _, size = context.sizes.heads
    hidden, wide = heads * size, 7 * heads * size // 2
    x, residual, weight = _empty(context, rows, hidden), _empty(context, rows, hidden), _empty(context, hidden)
    moved = 2 * x.nbytes
    _pair(context, "rms_norm", f"{rows} × {hidden}", lambda: rms_norm(x, weight, 1e-5),
          lambda: functional.rms_norm(x, (hidden,), weight, 1e-5), moved)  # fmt: skip
    _pair(context, "add_rms_norm", f"{rows} × {hidden}", lambda: add_rms_norm(x, residual, weight, 1e-5),
          lambda: functional.rms_norm(residual.add_(x), (hidden,), weight, 1e-5), 2 * moved)  # fmt: skip
    gate_up = _empty(context, rows, 2 * wide)
    _pair(context, "silu_mul", f"{rows} × {wide}", lambda: silu_mul(gate_up),
          lambda: functional.silu(gate_up[:, :wide]) * gate_up[:, wide:], gate_up.nbytes * 3 // 2)  # fmt: skip


def _rope_case(context: Context, rows: int) -> None:
    heads, kv_heads, size = context.sizes.heads
    qkv, table = _empty(context, rows, heads + 2 * kv_heads, size), _empty(context, rows, size)
    cache = _kv(context, -(-rows // BLOCK))
    slots = torch.arange(rows, device=qkv.device)
    flat = cache.view(-1, 2 * kv_heads, size)
    turned = qkv[:, : heads + kv_heads]

    def rotate() -> None:
        swapped = turned.unflatten(-1, (2, size // 2)).flip(2).flatten(2)
        turned.mul_(table[:, None]).addcmul_(swapped, table[:, None])
        flat.index_copy_(0, slots, qkv[:, heads:])

    _pair(context, "rope + KV write", f"{rows} tokens",
          lambda: rope_and_cache(qkv, table, table, cache, slots, heads), rotate,
          turned.nbytes * 2 + 2 * kv_heads * size * qkv.itemsize * rows)  # fmt: skip


def _products(context: Context) -> None:
    for rows, depth, size in context.sizes.products:
        _product_case(context, rows, depth, size)


def _product_case(context: Context, rows: int, depth: int, size: int) -> None:
    x, weight = _empty(context, rows, depth), _empty(context, size, depth)
    shape = f"{rows} × {depth} → {size}"

    def plain() -> torch.Tensor:
        return functional.linear(x, weight)

    _pair(context, "torch's product", shape, plain, None, weight.nbytes)
    byte = quantise_rows(weight, torch.int8)
    _pair(context, "product × int8", shape, lambda: row_scaled_matmul(x, byte), plain, byte.values.nbytes)
    packed = quantise_int4(weight, 128 if depth % 128 == 0 else 32)
    _pair(context, "product × int4", shape, lambda: int4_matmul(x, packed), plain, packed.values.nbytes)
    if context.sizes.device.type == "cuda" and current_target().has_fp8:
        narrow = quantise_rows(weight, FP8)
        _pair(context, "product × float8", shape, lambda: row_scaled_matmul(x, narrow), plain, narrow.values.nbytes)
        values, scales = quantise_activations(x)
        dtype = context.sizes.dtype
        _pair(context, "float8 × float8", shape,
              lambda: row_scaled_matmul(values, narrow, x_scales=scales, dtype=dtype), plain,
              narrow.values.nbytes)  # fmt: skip


def _sampling(context: Context) -> None:
    rows = context.sizes.rows[0]
    logits = _empty(context, rows, context.sizes.vocabulary, dtype=torch.float32)
    ones = torch.ones(rows, device=logits.device)
    seeds, counts = (
        torch.arange(rows, device=logits.device),
        torch.full((rows,), 50, dtype=torch.int32).to(logits.device),
    )
    shape = f"{rows} × {context.sizes.vocabulary}"
    greedy, plain = SamplingBatch(ones * 0), SamplingBatch(ones, seeds)
    filtered = SamplingBatch(ones, seeds, counts, ones * 0.9, ones * 0.05)
    _pair(context, "sample, greedy", shape, lambda: sample(logits, greedy), lambda: logits.argmax(-1), logits.nbytes)
    _pair(context, "sample, temperature", shape, lambda: sample(logits, plain),
          lambda: torch.multinomial(logits.softmax(-1), 1), logits.nbytes)  # fmt: skip

    def sort() -> torch.Tensor:
        values, ids = logits.sort(descending=True)
        shares = values.softmax(-1)
        kept = (shares.cumsum(-1) - shares < 0.9) & (torch.arange(len(values[0]), device=values.device) < 50)
        return ids.gather(1, torch.multinomial(torch.where(kept, shares, 0), 1))

    _pair(context, "sample, top_k + top_p + min_p", shape, lambda: sample(logits, filtered), sort, logits.nbytes)
    words = torch.full((rows, -(-context.sizes.vocabulary // 32)), -1, dtype=torch.int32, device=logits.device)
    hidden = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    _pair(context, "bitmask", shape, lambda: apply_bitmask(logits, words),
          lambda: logits.masked_fill_(hidden, float("-inf")), words.nbytes)  # fmt: skip


def _blocks(context: Context) -> None:
    count = 4 if context.sizes.device.type == "cpu" else 4096
    cache = _kv(context, 2 * count)
    sources = torch.arange(count, device=cache.device)
    pairs = torch.stack((sources, sources + count), 1)
    moved = cache.nbytes
    _pair(context, "copy_blocks", f"{count} blocks", lambda: copy_blocks(cache, pairs),
          lambda: cache.index_copy_(0, sources + count, cache[sources]), moved)  # fmt: skip
