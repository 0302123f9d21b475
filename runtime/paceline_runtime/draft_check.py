"""Drafts against the model: a token is sampled at each place as if all drafts before it stood, and stands while they do.

Each place has its own random number, the one that it would have without drafts. So the tokens are the very ones that come
one by one, and their law is the model's, as speculative sampling wants it (Leviathan et al., 2023: a draft that is certain
of its token is accepted with the probability that the model gives it, and else replaced by one of the others).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline_runtime.sampler import SequenceSampling

__all__ = ["draft_rows", "num_standing"]


def draft_rows(sampling: SequenceSampling, index: int, drafts: Sequence[int]) -> list[tuple[SequenceSampling, int]]:
    """Return how to sample generated token `index` and, behind each of `drafts`, the one that follows it."""
    return [(sampling.ahead(drafts[:count]), index + count) for count in range(len(drafts) + 1)]


def num_standing(sampled: Sequence[int], drafts: Sequence[int]) -> int:
    """Return how many of `sampled`, one more than `drafts`, stand: up to the first that isn't the draft at its place."""
    return 1 + next((place for place, draft in enumerate(drafts) if sampled[place] != draft), len(drafts))
