"""The choice of the next token without sorting a vocabulary: a search for the cut, then the Gumbel-max trick.

A token is kept if its logit reaches its row's cut. The cut of top_k and top_p is found by narrowing an interval of float32
bit patterns, sixteen ways a pass, so that it is exact after eight or nine passes; the choice is the argmax of logits with
Gumbel noise (Maddison et al. 2014, arXiv:1411.0030), which needs neither a sum nor an order. Noise depends on the row's seed
and the token alone, so a row never depends on its batch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline_kernels.triton_ops.launch import ceil_div, launch

__all__ = ["SamplingBatch", "sample"]

# Logits that one program of the choice scans: a row of 128 k is 32 programs, 8 KiB a load for 8 warps.
_STRETCH = 4096
_CHUNK = 2048
# The search compares each logit with 16 probes, so a chunk of 1024 makes 64 numbers a lane of 8 warps.
_SEARCH_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each of n rows is sampled: `temperatures` [n] float32, 0 is greedy; `seeds` [n] int64, new at each step.

    Filters, or None where no row has one: `top_ks` [n] int32 (0: off), `top_ps` [n] float32 (1: off), `min_ps` [n] float32
    (0: off). They apply in this order, each to what the one before left. `seeds` may be None where all rows are greedy.
    """

    temperatures: torch.Tensor
    seeds: torch.Tensor | None = None
    top_ks: torch.Tensor | None = None
    top_ps: torch.Tensor | None = None
    min_ps: torch.Tensor | None = None


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Return one token id per row, [n] int64, for `logits` [n, V] of any float dtype; -inf and NaN are never chosen.

    Tokens as likely as the last one that top_k or top_p keeps are kept too. The best of equal greedy tokens is the first. A
    row without a finite logit gives 0.
    """
    assert logits.stride(1) == 1
    rows, vocabulary = logits.shape
    cuts = _cut(logits, batch)
    stretches = ceil_div(vocabulary, _STRETCH)
    values = torch.empty((rows, stretches), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, stretches), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    arguments = {
        "logits": logits, "temperatures": batch.temperatures, "seeds": batch.seeds, "cuts": cuts,
        "values": values, "ids": ids, "row_stride": logits.stride(0), "vocabulary": vocabulary,
        "STRETCH": _STRETCH, "CHUNK": _CHUNK,
    }  # fmt: skip
    launch(_choose, (rows, stretches), arguments, num_warps=8)
    joined = {"values": values, "ids": ids, "out": out, "count": stretches, "BLOCK": triton.next_power_of_2(stretches)}
    launch(_join, (rows,), joined, num_warps=1)
    return out


def _cut(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor | None:
    """Return the lowest logit kept in each row, [n] float32; None where no row has a filter."""
    if batch.top_ks is None and batch.top_ps is None and batch.min_ps is None:
        return None
    rows, vocabulary = logits.shape
    cuts = torch.empty(rows, dtype=torch.float32, device=logits.device)
    arguments = {
        "logits": logits, "temperatures": batch.temperatures, "top_ks": batch.top_ks, "top_ps": batch.top_ps,
        "min_ps": batch.min_ps, "cuts": cuts, "row_stride": logits.stride(0), "vocabulary": vocabulary,
        "CHUNK": _SEARCH_CHUNK,
    }  # fmt: skip
    launch(_find_cut, (rows,), arguments, num_warps=8)
    return cuts


@triton.jit
def _load(row, start, vocabulary, CHUNK: tl.constexpr):
    """Return CHUNK logits as float32, -inf past the vocabulary and for NaN."""
    token = start + tl.arange(0, CHUNK)
    x = tl.load(row + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _to_key(x):
    """Map float32 to int64 so that order is kept and zeros are equal: bits with the sign's half turned around."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _from_key(key):
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _search(row, vocabulary, wanted, low, high, largest, inverse, COUNTED: tl.constexpr, CHUNK: tl.constexpr):
    """Return the largest key in [low, high] whose tokens at or above it count (or weigh) at least `wanted`.

    Keys in [low, high) still hold the answer; `low` always satisfies it. Each pass probes 16 evenly spaced keys.
    """
    width = high - low
    while width > 1:
        step = (width + 15) // 16
        probes = low + tl.arange(0, 16).to(tl.int64) * step
        sums = tl.zeros([16], tl.float32)
        for start in range(0, vocabulary, CHUNK):
            x = _load(row, start, vocabulary, CHUNK)
            reached = _to_key(x)[None, :] >= probes[:, None]
            weight = tl.full([CHUNK], 1.0, tl.float32) if COUNTED else tl.exp((x - largest) * inverse)
            sums += tl.sum(tl.where(reached, weight[None, :], 0.0), 1)
        # sums fall as probes rise: the number that satisfy tells the highest one that does; the first one always counts
        passed = tl.maximum(tl.sum((sums >= wanted).to(tl.int32), 0), 1)
        low += (passed - 1) * step
        width = tl.minimum(step, high - low)
    return low


@triton.jit
def _weigh(row, vocabulary, cut, largest, inverse, CHUNK: tl.constexpr):
    """Return the sum of exp((x - largest) · inverse) over tokens whose key reaches `cut`."""
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(0, vocabulary, CHUNK):
        x = _load(row, start, vocabulary, CHUNK)
        total += tl.where(_to_key(x) >= cut, tl.exp((x - largest) * inverse), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _find_cut(
    logits,  # [n, V]
    temperatures,  # [n] float32
    top_ks,  # [n] int32, or None
    top_ps,  # [n] float32, or None
    min_ps,  # [n] float32, or None
    cuts,  # [n] float32
    row_stride,
    vocabulary,
    CHUNK: tl.constexpr,
):
    """Program r: the cut of row r. Its passes read the row from L2."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * row_stride
    temperature = tl.load(temperatures + index)
    best = tl.full([CHUNK], float("-inf"), tl.float32)
    for start in range(0, vocabulary, CHUNK):
        best = tl.maximum(best, _load(row, start, vocabulary, CHUNK))
    largest = tl.max(best, 0)
    cut = float("-inf")
    if (temperature > 0) & (largest > float("-inf")):
        inverse = 1.0 / temperature
        # the lowest finite float32 is the lowest cut: -inf is never kept
        low = tl.max(_to_key(tl.full([1], -3.4028234663852886e38, tl.float32)), 0)
        high = tl.max(_to_key(tl.full([1], 0.0, tl.float32) + largest), 0) + 1
        if top_ks is not None:
            wanted = tl.load(top_ks + index)
            if (wanted > 0) & (wanted < vocabulary):
                low = _search(row, vocabulary, wanted, low, high, largest, inverse, True, CHUNK)
        if top_ps is not None:
            share = tl.load(top_ps + index)
            if share < 1:
                # more than nothing, so that the best token stays at top_p 0
                wanted_mass = tl.maximum(share * _weigh(row, vocabulary, low, largest, inverse, CHUNK), 1e-30)
                low = _search(row, vocabulary, wanted_mass, low, high, largest, inverse, False, CHUNK)
        cut = _from_key(low)
        if min_ps is not None:
            floor = tl.load(min_ps + index)
            if floor > 0:
                cut = tl.maximum(cut, largest + temperature * tl.log(floor))
    tl.store(cuts + index, cut)


@triton.jit
def _choose(
    logits,  # [n, V]
    temperatures,  # [n] float32
    seeds,  # [n] int64, or None
    cuts,  # [n] float32, or None
    values,  # [n, stretches] float32
    ids,  # [n, stretches] int32
    row_stride,
    vocabulary,
    STRETCH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (r, p): the best of tokens [p · STRETCH, (p + 1) · STRETCH) of row r, with noise unless the row is greedy."""
    index = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + index)
    first = tl.program_id(1) * STRETCH
    best = tl.full([CHUNK], float("-inf"), tl.float32)
    found = tl.zeros([CHUNK], tl.int32)
    for start in range(first, tl.minimum(first + STRETCH, vocabulary), CHUNK):
        x = _load(logits + index * row_stride, start, vocabulary, CHUNK)
        token = start + tl.arange(0, CHUNK)
        if cuts is not None:
            x = tl.where(x >= tl.load(cuts + index), x, float("-inf"))
        if seeds is not None:  # noqa: SIM102 - one is decided when it is compiled, the other when it runs
            if temperature > 0:
                x = x / temperature - _log_exponential(tl.load(seeds + index), token)
        better = x > best
        best = tl.where(better, x, best)
        found = tl.where(better, token, found)
    value = tl.max(best, 0)
    # a lane holds ids of several chunks, so the first of equals is told by its id, not by its lane
    at = tl.program_id(1) + index * tl.num_programs(1)
    tl.store(values + at, value)
    tl.store(ids + at, tl.min(tl.where((best == value) & (best > float("-inf")), found, 0x7FFFFFFF), 0))


@triton.jit
def _log_exponential(seed, token):
    """Return log(E) for E ~ Exp(1) drawn by Philox for (seed, token): -log(E) is Gumbel noise.

    The winner is a token with a small E, so E needs relative precision near 0: 32 random bits as they are, and a series for
    -log(1 - u) where the difference to 1 would be rounded away.
    """
    bits = tl.randint(seed, token).to(tl.uint32, bitcast=True)
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    near = uniform * (1.0 + uniform * (0.5 + uniform * 0.3333333))
    # the largest float32 below 1 keeps the logarithm finite
    far = -tl.log(1.0 - tl.minimum(uniform, 0.99999994))
    return tl.log(tl.where(uniform < 0.01, near, far))


@triton.jit
def _join(
    values,  # [n, count] float32
    ids,  # [n, count] int32
    out,  # [n] int64
    count,
    BLOCK: tl.constexpr,
):
    """Program r: the best of row r's stretches, the first of equals; 0 where there is none."""
    index = tl.program_id(0).to(tl.int64)
    stretch = tl.arange(0, BLOCK)
    value = tl.load(values + index * count + stretch, mask=stretch < count, other=float("-inf"))
    token = tl.load(ids + index * count + stretch, mask=stretch < count, other=0x7FFFFFFF)
    best = tl.max(value, 0)
    chosen = tl.min(tl.where((value == best) & (value > float("-inf")), token, 0x7FFFFFFF), 0)
    tl.store(out + index, tl.where(best > float("-inf"), chosen, 0).to(tl.int64))
