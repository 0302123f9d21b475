"""Sampling and grammar masks in Triton: what a filter keeps is exact, how often a token is chosen is tested by counts."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton_support import DEVICE, randn

from paceline_kernels.triton_ops.bitmask import apply_bitmask
from paceline_kernels.triton_ops.sampling import SamplingBatch, _cut, _log_exponential, sample

NONE = float("-inf")


def batch(rows: int, temperature: float = 1.0, seed: int = 0, **filters: float) -> SamplingBatch:
    types = {"top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    columns = {f"{name}s": torch.full((rows,), value, dtype=types[name], device=DEVICE) for name, value in filters.items()}
    seeds = torch.arange(rows, device=DEVICE) + seed * 1_000_003
    return SamplingBatch(torch.full((rows,), temperature, device=DEVICE), seeds, **columns)


def kept(row: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """Tokens that the filters keep, by sorting in float64."""
    logits, ids = row.double().sort(descending=True, stable=True)
    probabilities = (logits / temperature).softmax(-1)
    if 0 < top_k < len(row):
        probabilities = probabilities.where(logits >= logits[top_k - 1], 0)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.where(before < top_p * probabilities.sum(), 0)
    probabilities = probabilities.where(probabilities >= min_p * probabilities.max(), 0)
    return set(ids[probabilities > 0].tolist())


@pytest.mark.parametrize("vocabulary", [1, 300, 4097, pytest.param(10_000, marks=pytest.mark.slow)])
def test_greedy_is_the_first_argmax(vocabulary: int) -> None:
    logits = randn(3, vocabulary)
    logits[0, -1] = 9.0
    logits[1, vocabulary // 3] = logits[1, vocabulary // 2] = 7.0
    logits[2] = 1.0
    expected = [vocabulary - 1, vocabulary // 3, 0]
    assert sample(logits, SamplingBatch(torch.zeros(3, device=DEVICE))).tolist() == expected
    assert sample(logits, batch(3, temperature=0.0, top_k=5, top_p=0.5)).tolist() == expected


def test_greedy_ignores_nan_and_minus_infinity_and_a_row_of_them_gives_a_valid_id() -> None:
    logits = torch.tensor([[float("nan"), NONE, -3.0, -4.0], [NONE, float("nan"), NONE, NONE]], device=DEVICE)
    assert sample(logits, batch(2, temperature=0.0)).tolist() == [2, 0]
    assert sample(logits, batch(2, temperature=1.0, top_k=1, top_p=0.9)).tolist() == [2, 0]


FILTERS = [
    {"top_k": 1}, {"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"top_k": 5000}, {"top_p": 1.0, "min_p": 0.0, "top_k": 0}, {"top_p": 1e-6}, {"top_p": 0.9999},
]  # fmt: skip


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.7, pytest.param(3.0, marks=pytest.mark.slow)])
def test_the_cut_keeps_exactly_what_sorting_keeps(filters: dict[str, float], temperature: float) -> None:
    logits = randn(2, 1300, seed=3) * 3
    logits[1, :700] = NONE
    cuts = _cut(logits, batch(2, temperature=temperature, **filters))
    for row, cut in zip(logits, cuts, strict=True):
        assert set((row >= cut).nonzero().flatten().tolist()) - set((row == NONE).nonzero().flatten().tolist()) == kept(
            row, temperature, **filters
        )


def test_ties_at_the_cut_are_kept_and_zeros_of_both_signs_are_equal() -> None:
    logits = torch.tensor([[0.0, -0.0, 1.0, -1.0, 0.0]], device=DEVICE)
    cut = _cut(logits, batch(1, top_k=2))
    assert (logits >= cut).tolist() == [[True, True, True, False, True]]


@triton.jit
def _draw(out, seed, COUNT: tl.constexpr):
    token = tl.arange(0, COUNT)
    tl.store(out + token, _log_exponential(seed, token))


def test_noise_is_exponential_over_tokens_and_fine_near_zero() -> None:
    out = torch.empty(8192, device=DEVICE)
    _draw[(1,)](out, 2**40 + 7, COUNT=8192)
    drawn = out.double().exp().sort().values.cpu()
    off = (-torch.expm1(-drawn) - torch.arange(8192) / 8192).abs().max()
    # Kolmogorov-Smirnov: above 1.95 / sqrt(n) once in a thousand; the seed is fixed, so this can't come and go
    assert off < 1.95 / 8192**0.5
    # 24 bits a uniform number would leave the smallest of 8192 draws on a grid of 6e-8
    assert (drawn[:64] / 2**-24 % 1 - 0.5).abs().min() < 0.4


@pytest.mark.slow
def test_frequencies_follow_the_probabilities_that_the_filters_leave() -> None:
    draws, logits = 200, torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -4.0])
    rows = logits.expand(draws, -1).contiguous().to(DEVICE)
    tokens = sample(rows, batch(draws, temperature=0.8, seed=5, top_k=4)).cpu()
    counts = torch.bincount(tokens, minlength=6).double()
    assert counts[4:].sum() == 0
    expected = (logits[:4].double() / 0.8).softmax(-1) * draws
    # chi-square with 3 degrees of freedom: above 16.3 once in a thousand; the seed is fixed
    assert ((counts[:4] - expected) ** 2 / expected).sum() < 16.3


def test_a_row_is_drawn_the_same_alone_and_in_any_batch() -> None:
    logits = randn(4, 500)
    together = sample(logits, batch(4, top_p=0.9))
    whole = batch(4, top_p=0.9)
    for row in range(4):
        one = SamplingBatch(
            whole.temperatures[row : row + 1], whole.seeds[row : row + 1], top_ps=whole.top_ps[row : row + 1]
        )
        assert sample(logits[row : row + 1], one).item() == together[row].item()


def test_another_seed_draws_another_sample_and_the_same_seed_the_same() -> None:
    logits = torch.zeros((8, 1000), device=DEVICE)
    first = sample(logits, batch(8))
    assert torch.equal(first, sample(logits, batch(8)))
    assert not torch.equal(first, sample(logits, batch(8, seed=1)))
    assert len(set(first.tolist())) > 4


def test_logits_may_be_16_bit_and_strided_by_row() -> None:
    logits = randn(2, 64, dtype=torch.bfloat16)[:, :50]
    assert sample(logits, batch(2, temperature=0.0)).tolist() == logits.float().argmax(-1).tolist()


@pytest.mark.parametrize(("vocabulary", "dtype"), [(31, torch.float32), (2049, torch.bfloat16), (64, torch.float16)])
def test_a_bitmask_leaves_allowed_logits_alone(vocabulary: int, dtype: torch.dtype) -> None:
    logits = randn(3, vocabulary, dtype=dtype)
    allowed = torch.rand(2, vocabulary, generator=torch.Generator().manual_seed(1)) < 0.5
    bits = torch.nn.functional.pad(allowed, (0, -vocabulary % 32)).view(2, -1, 32).long()
    words = (bits << torch.arange(32)).sum(-1)
    bitmask = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).to(DEVICE)
    expected = logits.clone()
    expected[[2, 0]] = expected[[2, 0]].masked_fill(~allowed.to(DEVICE), NONE)
    apply_bitmask(logits, bitmask, torch.tensor([2, 0], device=DEVICE))
    assert torch.equal(logits, expected)


def test_tokens_beyond_a_bitmask_are_refused() -> None:
    logits = randn(1, 90)
    words = torch.full((1, 2), -1, dtype=torch.int32, device=DEVICE)
    apply_bitmask(logits, words)
    assert torch.isfinite(logits[0, :64]).all()
    assert (logits[0, 64:] == float("-inf")).all()
