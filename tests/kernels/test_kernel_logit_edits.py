"""Biases, penalties and masks: only where asked for, in the order of their formulas."""

import numpy as np
import torch

from paceline_kernels.logit_edits import Penalties, add_biases, mask_tokens, penalise


def test_penalties_follow_openai_and_ctrl():
    logits = torch.tensor([[1.0, -2.0, 3.0, 0.5], [1.0, -2.0, 3.0, 0.5]])
    untouched = logits[0].clone()
    row = torch.tensor([1, 1, 1])
    how = Penalties(
        rows=row,
        ids=torch.tensor([0, 1, 2]),
        counts=torch.tensor([2, 1, 0]),
        presence=torch.full((3,), 0.5),
        frequency=torch.full((3,), 0.25),
        repetition=torch.full((3,), 2.0),
    )
    penalise(logits, how)
    assert torch.equal(logits[0], untouched)
    # seen twice, seen once (a negative logit is multiplied), only in the prompt, never
    assert logits[1].tolist() == [1 / 2 - 0.5 - 2 * 0.25, -2 * 2 - 0.5 - 0.25, 3 / 2, 0.5]


def test_biases_add_up_and_ban():
    logits = torch.zeros(2, 4)
    add_biases(logits, torch.tensor([1, 1, 1]), torch.tensor([2, 2, 3]), torch.tensor([1.5, 1.0, float("-inf")]))
    assert logits.tolist() == [[0, 0, 0, 0], [0, 0, 2.5, float("-inf")]]


def test_masks_cover_a_padded_vocabulary():
    rng = np.random.default_rng(0)
    allowed = rng.random((2, 70)) < 0.5
    words = np.zeros((2, 3), np.uint32)
    for row, token in zip(*allowed.nonzero(), strict=True):
        words[row, token >> 5] |= np.uint32(1 << (token & 31))
    logits = torch.from_numpy(rng.standard_normal((4, 99)).astype(np.float32))
    before = logits.clone()
    mask_tokens(logits, torch.tensor([3, 1]), torch.from_numpy(words.view(np.int32)))
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    for row, which in ((3, 0), (1, 1)):
        expected = np.where(np.pad(allowed[which], (0, 29)), before[row].numpy(), -np.inf)
        np.testing.assert_array_equal(logits[row].numpy(), expected)
