"""How long requests are, and how long one will be that hasn't ended yet, told by those that have. Pure.

The short ones end first, so those that have ended are too short a sample: whoever runs still is counted as longer than it is
so far (E. L. Kaplan and P. Meier, "Nonparametric estimation from incomplete observations", JASA 53, 1958).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from paceline_core.wire import RequestRecord

__all__ = ["LengthCurve", "read"]

_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly however many there are
_AGAIN = 2  # beyond the longest that has ended: as long again as it is so far


class LengthCurve:
    """The share of requests that become longer than so many tokens, from lengths that are known and lengths so far."""

    def __init__(self, ended: Iterable[int], running: Iterable[int]) -> None:
        known = sorted(ended)
        everybody = sorted([*known, *running])
        self._lengths: list[int] = []
        self._shares: list[float] = []  # that are longer, falling
        share = 1.0
        for length in sorted(set(known)):
            at_risk = len(everybody) - bisect_left(everybody, length)
            share *= 1.0 - (bisect_right(known, length) - bisect_left(known, length)) / at_risk
            self._lengths.append(length)
            self._shares.append(share)

    def guess(self, so_far: int, number: int) -> int:
        """Return a length for a request of `so_far` tokens; `number` makes several of them differ as lengths do."""
        place = bisect_right(self._lengths, so_far)
        longer = self._shares[place - 1] if place else 1.0
        wanted = longer * ((number + 1) * _GOLDEN % 1.0)
        found = bisect_left(self._shares, -wanted, lo=place, key=lambda share: -share)
        if found < len(self._lengths):
            return self._lengths[found]
        return _AGAIN * max(so_far, self._lengths[-1] if self._lengths else 1)


def read(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Return those that were read: one that was refused before is demand, but nobody knows its length."""
    return [r for r in records if r.prompt_tokens > 0]
