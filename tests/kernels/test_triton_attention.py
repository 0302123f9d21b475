"""Paged attention in Triton against attention written out in float64."""

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

import itertools

from triton_support import DEVICE, assert_near, randn

from paceline_kernels.triton_ops import attention as attention_module
from paceline_kernels.triton_ops.attention import paged_attention
from paceline_kernels.triton_ops.attention_plan import PagedBatch, SplitPolicy, plan_paged

FP8 = torch.float8_e4m3fn
STORED_MAX = {FP8: 448.0, torch.int8: 127.0}


@dataclass(frozen=True)
class Case:
    """A ragged batch: query lengths with contexts, heads, block size, dtypes, options."""

    lens: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    window: int | None = None
    soft_cap: float | None = None
    programs: int = 1  # few programs wanted: no split
    invariant: bool = False

    def __str__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return "-".join(str(value).removeprefix("torch.") for value in shown.values() if value not in (None, False))


@dataclass(frozen=True)
class Inputs:
    """Queries, cache and tables; `keys` and `values` are what the cache means, in float64, per sequence."""

    queries: torch.Tensor
    cache: torch.Tensor
    scales: torch.Tensor | None
    tables: list[list[int]]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def build(case: Case, seed: int = 0) -> Inputs:
    needed = [-(-context // case.block_size) for context in case.contexts]
    total = sum(needed) + 2
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    plain = randn(total, case.block_size, 2, case.kv_heads, case.size, seed=seed + 1)
    cache, scales, meaning = store(plain, case)
    # blocks of nobody and slots past a context hold what must never be read: infinities that would turn into NaN
    if case.kv_dtype != torch.int8:
        for free in order:
            cache[free] = cache[free].float().fill_(float("nan")).to(cache.dtype)
    rows = [meaning[table].flatten(0, 1)[:context] for table, context in zip(tables, case.contexts, strict=True)]
    return Inputs(
        randn(sum(case.lens), case.heads, case.size, dtype=case.dtype, seed=seed + 2),
        cache, scales, tables, [r[:, 0] for r in rows], [r[:, 1] for r in rows],
    )  # fmt: skip


def store(plain: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the cache in its dtype, its scales, and the float64 numbers that both together stand for."""
    if case.kv_dtype is None:
        cache = plain.to(case.dtype)
        return cache, None, cache.double()
    scales = plain.abs().amax(-1) / STORED_MAX[case.kv_dtype]
    scaled = plain / scales[..., None]
    cache = (scaled.round() if case.kv_dtype == torch.int8 else scaled).to(case.kv_dtype)
    return cache, scales, cache.double() * scales[..., None].double()


def plan(case: Case, tables: list[list[int]]) -> PagedBatch:
    policy = SplitPolicy(case.programs, case.kv_heads, invariant=case.invariant)
    return plan_paged(
        case.lens, case.contexts, tables, group=case.heads // case.kv_heads, policy=policy, window=case.window, device=DEVICE
    )


def run(case: Case, inputs: Inputs) -> torch.Tensor:
    options = {"window": case.window, "soft_cap": case.soft_cap, "kv_scales": inputs.scales}
    return paged_attention(inputs.queries, inputs.cache, plan(case, inputs.tables), case.size**-0.5, **options)


def reference(case: Case, inputs: Inputs) -> torch.Tensor:
    outs, row = [], 0
    for length, keys, values in zip(case.lens, inputs.keys, inputs.values, strict=True):
        outs.append(attend(inputs.queries[row : row + length].double(), keys, values, case))
        row += length
    return torch.cat(outs).flatten(1)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, case: Case) -> torch.Tensor:
    group = case.heads // case.kv_heads
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("thd,chd->htc", queries, keys) * case.size**-0.5
    if case.soft_cap:
        scores = case.soft_cap * (scores / case.soft_cap).tanh()
    at = torch.arange(len(keys) - len(queries), len(keys), device=keys.device)[:, None]
    slot = torch.arange(len(keys), device=keys.device)[None]
    seen = (slot <= at) & (slot > at - (case.window or len(keys)))
    return torch.einsum("htc,chd->thd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values)


def check(case: Case) -> None:
    inputs = build(case)
    assert_near(run(case, inputs), reference(case, inputs))


ONE = Case((1,), (1,))
MIXED = Case((1, 1, 0, 5, 17), (33, 16, 0, 5, 40))
QUICK = [
    ONE,
    replace(MIXED, dtype=torch.bfloat16),
    replace(MIXED, dtype=torch.float16, heads=7, kv_heads=1, size=80, soft_cap=5.0, window=9),
    Case((1, 3), (300, 530), programs=64, dtype=torch.float16, kv_dtype=FP8),
    Case((1, 40), (65, 70), heads=16, kv_heads=1, size=96, kv_dtype=torch.int8, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_matches_float64(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
def test_every_group_and_head_size(dtype: torch.dtype, size: int, group: int) -> None:
    check(replace(MIXED, dtype=dtype, size=size, heads=2 * group, kv_heads=2))


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 24])
@pytest.mark.parametrize("context", [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 513])
def test_block_tile_and_chunk_boundaries(block_size: int, context: int) -> None:
    lens = (1, min(context, 3), context if context < 70 else 2)
    check(Case(lens, (context,) * 3, block_size=block_size, programs=64))


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [FP8, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_quantised_kv(kv_dtype: torch.dtype, dtype: torch.dtype, size: int) -> None:
    check(replace(MIXED, dtype=dtype, kv_dtype=kv_dtype, size=size, programs=64))


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2, 16, 64, 100, 1000])
@pytest.mark.parametrize("programs", [1, 64])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_windows_and_soft_caps(window: int, programs: int, soft_cap: float | None) -> None:
    check(Case((1, 30, 4), (600, 400, 4), window=window, programs=programs, soft_cap=soft_cap))


def test_one_static_scale_serves_all_tokens_as_an_expanded_view() -> None:
    case = replace(MIXED, dtype=torch.float16, kv_dtype=FP8)
    inputs = build(case)
    scale = torch.tensor(2**-7, device=DEVICE).expand(inputs.scales.shape)
    rows = [inputs.cache[t].flatten(0, 1)[:c].double() * 2**-7 for t, c in zip(inputs.tables, case.contexts, strict=True)]
    static = replace(inputs, scales=scale, keys=[r[:, 0] for r in rows], values=[r[:, 1] for r in rows])
    assert_near(run(case, static), reference(case, static))


def test_queries_may_be_a_view_of_the_fused_projection() -> None:
    inputs = build(MIXED)
    fused = torch.cat([inputs.queries, randn(len(inputs.queries), 4, MIXED.size)], dim=1)
    viewed = replace(inputs, queries=fused[:, : MIXED.heads])
    assert torch.equal(run(MIXED, viewed), run(MIXED, inputs))


def test_an_empty_batch_launches_nothing() -> None:
    case = Case((0,), (0,))
    assert run(case, build(case)).shape == (0, case.heads * case.size)


def alone(case: Case, inputs: Inputs, index: int, taken: slice) -> torch.Tensor:
    """Attend with some query tokens of one sequence only, as an earlier step with that chunk would."""
    start = sum(case.lens[:index])
    rows = torch.arange(start, start + case.lens[index])[taken]
    context = case.contexts[index] - (case.lens[index] - (int(rows[-1]) - start + 1))
    single = replace(case, lens=(len(rows),), contexts=(context,))
    return run(single, replace(inputs, queries=inputs.queries[rows], tables=[inputs.tables[index]]))


INVARIANT = Case((1, 21, 1, 6), (530, 40, 7, 1030), programs=264, invariant=True)
SPLITS = [INVARIANT, replace(INVARIANT, dtype=torch.bfloat16, window=500)]


@pytest.mark.parametrize("case", [SPLITS[0], pytest.param(SPLITS[1], marks=pytest.mark.slow)], ids=str)
def test_invariant_results_are_bitwise_the_same_alone_and_in_a_batch(case: Case) -> None:
    inputs = build(case)
    together = run(case, inputs)
    assert_near(together, reference(case, inputs))
    row = 0
    for index, length in enumerate(case.lens):
        assert torch.equal(alone(case, inputs, index, slice(None)), together[row : row + length])
        row += length


def test_invariant_results_are_bitwise_the_same_under_any_chunking() -> None:
    inputs = build(INVARIANT)
    whole = run(INVARIANT, inputs)[1:22]
    chunks = [alone(INVARIANT, inputs, 1, slice(a, b)) for a, b in ((0, 4), (4, 5), (5, 21))]
    assert torch.equal(torch.cat(chunks), whole)


def test_the_plan_splits_long_contexts_only_as_far_as_programs_are_wanted() -> None:
    def parts(programs: int) -> list[int]:
        case = Case((1, 1), (4096, 100), programs=programs)
        return plan(case, [[0] * 256, [0] * 7]).tile_sets[0].reductions[:, 3].tolist()

    assert parts(1) == []
    assert parts(4) == [2]  # (4096 + 100) · 2 heads / 4 → chunks of 2304
    assert parts(1000) == [16]  # never shorter than 256 positions


def test_the_plan_covers_every_row_and_position_once() -> None:
    case = Case((1, 70, 0, 5), (777, 300, 0, 5), heads=6, kv_heads=2, programs=64)
    seen = {}
    for tiles in plan(case, [[0] * 49, [0] * 19, [], [0]]).tile_sets:
        tokens = tiles.block_m // 3
        for sequence, first, begin, end, _ in tiles.items.tolist():
            for token in range(first, min(first + tokens, case.lens[sequence])):
                seen.setdefault((sequence, token), []).append((begin, end))
    for (sequence, token), stretches in seen.items():
        last = case.contexts[sequence] - case.lens[sequence] + token
        stretches.sort()
        assert stretches[0][0] == 0 and stretches[-1][1] > last
        assert all(a[1] == b[0] for a, b in itertools.pairwise(stretches))
    assert len(seen) == sum(case.lens)


def test_the_reduction_takes_whole_tiles() -> None:
    from paceline_kernels.triton_ops.attention_plan import DECODE_ROWS, PREFILL_ROWS

    assert DECODE_ROWS % attention_module._REDUCED_ROWS == PREFILL_ROWS % attention_module._REDUCED_ROWS == 0
