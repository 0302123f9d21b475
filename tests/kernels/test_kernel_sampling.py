"""Sampling: the right filters, the right frequencies, and a row never depends on its batch."""

import numpy as np
import pytest
import torch

from paceline_kernels import RowSampling, sample

VOCABULARY = 50


def logits_of(probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log().float()[None]


def draws(logits, count=400, **how):
    """Sweep the uniform number over [0, 1): the tokens drawn, in order."""
    rows = [RowSampling(uniform=(i + 0.5) / count, **how) for i in range(count)]
    return sample(logits.expand(count, -1), rows).tolist()


def test_greedy_takes_the_best():
    logits = torch.randn(7, VOCABULARY)
    assert sample(logits, [RowSampling(0.0)] * 7).tolist() == logits.argmax(-1).tolist()


def test_frequencies_are_the_probabilities():
    probabilities = [0.5, 0.0, 0.25, 0.125, 0.125]
    tokens = draws(logits_of(probabilities), temperature=1.0)
    assert [tokens.count(i) / 400 for i in range(5)] == probabilities


def test_temperature_sharpens_and_flattens():
    probabilities = np.array([0.5, 0.3, 0.2])
    for temperature in (0.5, 2.0):
        scaled = probabilities ** (1 / temperature)
        tokens = draws(logits_of(probabilities), temperature=temperature)
        np.testing.assert_allclose([tokens.count(i) / 400 for i in range(3)], scaled / scaled.sum(), atol=0.005)


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1}),
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.51}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        # the nucleus is a share of what top_k left: 0.4 / 0.7 = 0.571
        ({"top_k": 2, "top_p": 0.57}, {0}),
        ({"top_k": 2, "top_p": 0.58}, {0, 1}),
        ({"top_p": 0.71, "min_p": 0.7}, {0, 1}),
    ],
)
def test_filters(how, left):
    logits = logits_of([0.4, 0.3, 0.2, 0.1])
    assert set(draws(logits, temperature=1.0, **how)) == left


def test_a_flat_distribution_needs_more_than_the_window():
    # 5000 equal tokens: the best 1024 hold a fifth of the mass, half of it needs 2500 tokens
    drawn = set(draws(torch.zeros(1, 5000), count=2500, temperature=1.0, top_p=0.5))
    assert len(drawn) == 2500


def test_what_was_banned_is_never_drawn():
    logits = torch.zeros(1, 8)
    logits[0, [0, 5, 7]] = float("-inf")
    for how in ({}, {"top_k": 8}, {"top_p": 0.999}, {"min_p": 0.1}):
        assert set(draws(logits, temperature=1.0, **how)) == {1, 2, 3, 4, 6}


def test_the_largest_uniform_number_stays_inside():
    rows = [RowSampling(1.0, uniform=1 - 2**-53)]
    assert sample(logits_of([0.5, 0.5, 0.0]), rows).tolist() == [1]


def test_a_row_does_not_depend_on_its_batch():
    logits = torch.randn(12, 3000) * 3
    hows = [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.5, "min_p": 0.01}]
    rows = [RowSampling(0.9, uniform=i / 12, **hows[i % 4]) for i in range(12)]
    alone = [sample(logits[i : i + 1], [rows[i]]).item() for i in range(12)]
    assert sample(logits, rows).tolist() == alone


@pytest.mark.parametrize(
    "row", [RowSampling(1.0, uniform=0.5), RowSampling(1.0, top_p=0.9), RowSampling(1.0, 5), RowSampling(0.0)]
)
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_a_model_that_overflowed_still_gets_a_token(row, value):
    logits = torch.stack([torch.full((50,), value), torch.arange(50.0)])
    tokens = sample(logits, [row, RowSampling(0.0)]).tolist()
    assert 0 <= tokens[0] < 50
    assert tokens[1] == 49, "the others of the batch are served as ever"
