"""Single ops of the native CPU kernels, in a model's shapes, and the machine's limits that they are held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline_kernels import AttentionPlanner, SequenceSpan
from paceline_kernels.cpu.packed import AnyWeight, PackedLinear
from paceline_kernels.triton_ops.quantised_weights import Int4Weight, Int8GroupWeight, quantise_int4, quantise_rows
from paceline_runtime.model_config import ModelConfig
from paceline_runtime.model_files import locate_model
from paceline_runtime.open_model import open_model

ROWS = (1, 16, 32, 256)
BLOCK = 16
# Copies of each weight are used in turn, so that what is read isn't in the caches of one core: of the smallest ones no more
# than layers, since making them takes longer than measuring with them.
COPIED_BYTES, MOST_COPIES = 48 << 20, 48
OP_SECONDS = 0.5  # of one op on so many rows: rounds end early where that is over


@dataclass(frozen=True, slots=True)
class Limits:
    """GB/s of reading, from memory and of 64 MB that fit a large cache; GFLOP/s of torch's products."""

    read: float
    cached: float
    float32: float
    bfloat16: float


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds of one op on `rows`, the bytes that it must read and the additions and multiplications that it must do."""

    name: str
    form: str
    rows: int
    seconds: float
    bytes: int
    flop: int


def measure_limits() -> Limits:
    """Return the best of a few rounds, with torch's threads."""
    large, small = torch.ones(256 * 1024**2), torch.ones(16 * 1024**2)
    read, cached = (x.nbytes / best(x.sum, 5) / 1e9 for x in (large, small))
    a, b = torch.randn(1536, 1536), torch.randn(1536, 1536)
    flop = 2 * 1536**3 / 1e9
    half = a.bfloat16(), b.bfloat16()
    return Limits(read, cached, flop / best(lambda: a @ b, 7), flop / best(lambda: half[0] @ half[1], 7))


def repeated(call: Callable[[], object], rounds: int, limit: float) -> float:
    """Return the median seconds of some calls: as many as `rounds`, fewer if `limit` seconds are over."""
    taken: list[float] = []
    while len(taken) < rounds and sum(taken) < limit:
        taken.append(_seconds(call))
    return statistics.median(taken)


def best(call: Callable[[], object], rounds: int) -> float:
    """Return the seconds of the quickest of some calls."""
    return min(_seconds(call) for _ in range(rounds))


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def forms(weight: torch.Tensor) -> dict[str, AnyWeight]:
    """Return a weight in every form that the kernels multiply."""
    four = quantise_int4(weight, 32)
    grouped = weight.unflatten(1, (-1, 32))
    scales = (grouped.abs().amax(-1) / 127).half()
    eight = (grouped / scales.float()[..., None]).round().clamp(-127, 127).to(torch.int8).flatten(1)
    return {
        "float32": weight,
        "bfloat16": weight.bfloat16(),
        "int8": quantise_rows(weight, torch.int8),
        "8 bits in groups": Int8GroupWeight(eight, scales),
        "4 bits in groups": Int4Weight(four.values, four.scales.half(), four.minimums.half()),
    }


def time_ops(uri: str, rounds: int) -> Iterator[OpTime]:
    """Time products in the shapes of the model at `uri`, attention, and the greedy choice, one after the other."""
    config, _ = open_model(locate_model(uri))
    for name, shape in _shapes(config).items():
        yield from _time_products(name, *shape, rounds)
    yield from _time_attention(config, rounds)
    yield _time_choice(config, rounds)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    heads = config.num_heads * config.head_dim
    return {
        "queries, keys, values": (heads + 2 * config.num_kv_heads * config.head_dim, config.hidden_size),
        "output": (config.hidden_size, heads),
        "gate and up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
        "head": (config.vocab_size, config.hidden_size),
    }


def _time_products(name: str, outputs: int, inputs: int, rounds: int) -> Iterator[OpTime]:
    weight = torch.randn(outputs, inputs) / inputs**0.5
    for form, stored in forms(weight).items():
        first = PackedLinear(stored)
        copies = min(MOST_COPIES, -(-COPIED_BYTES // first.nbytes))
        linears = [first, *(PackedLinear(stored) for _ in range(copies - 1))]
        for rows in ROWS:
            x = torch.randn(rows, inputs)
            taken = repeated(lambda linears=linears, x=x: [linear(x) for linear in linears], rounds, OP_SECONDS)
            moved = first.nbytes + 4 * rows * (inputs + outputs)
            yield OpTime(name, form, rows, taken / copies, moved, 2 * rows * inputs * outputs)


def _time_attention(config: ModelConfig, rounds: int) -> Iterator[OpTime]:
    cases = {"attention, contexts of 256": ((255, 1), (1, 16, 32)), "attention, prompt": ((0, 2048), (1,))}
    for name, ((start, tokens), sizes) in cases.items():
        for dtype in (torch.float32, torch.float16):
            for size in sizes:
                yield _attention(config, name, [(start, tokens)] * size, dtype, rounds)


def _attention(
    config: ModelConfig, name: str, sequences: Sequence[tuple[int, int]], dtype: torch.dtype, rounds: int
) -> OpTime:
    context, tokens = sum(sequences[0]), sequences[0][1]
    each = -(-context // BLOCK)
    spans = [SequenceSpan(start, n, range(i * each, (i + 1) * each)) for i, (start, n) in enumerate(sequences)]
    batch = AttentionPlanner(BLOCK, torch.float32, native=True).plan(spans)
    shape = (each * len(spans), BLOCK, 2, config.num_kv_heads, config.head_dim)
    layers = [torch.randn(shape).to(dtype) for _ in range(min(config.num_layers, 8))]
    queries = torch.randn(tokens * len(spans), config.num_heads, config.head_dim)

    def run() -> None:
        for cache in layers:
            torch.ops.paceline_cpu.attention(queries, cache, batch.spans, batch.tables, config.head_dim**-0.5, 0.0, 0)

    seconds = repeated(run, rounds, OP_SECONDS) / len(layers)
    seen = sum(start + i + 1 for start, n in sequences for i in range(n))  # pairs of a token and one that it sees
    flop = 4 * seen * config.num_heads * config.head_dim
    return OpTime(name, str(dtype).removeprefix("torch."), tokens * len(spans), seconds, layers[0].nbytes, flop)


def _time_choice(config: ModelConfig, rounds: int) -> OpTime:
    logits = torch.randn(16, config.vocab_size)
    seconds = repeated(lambda: torch.ops.paceline_cpu.argmax(logits), rounds, OP_SECONDS)
    return OpTime("greedy choice", "float32", 16, seconds, logits.nbytes, 0)
