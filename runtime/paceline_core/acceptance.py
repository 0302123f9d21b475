"""How many drafts a sequence gets: as many as are likely to be worth their time.

Draft i is of use if it and all before it are right. With a chance of p for each that is pⁱ tokens won (Leviathan et al.,
2023, in which p is α), for the time that one more token adds to the step. So drafts go on while pⁱ exceeds that time in
units of what a token costs without them, and none are made where already the first doesn't pay.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Acceptance"]

_START = 0.5  # of a sequence that nothing is known of: a proposal of prompt lookup is right about as often as not
_RATE = 0.2  # weight of one draft: ten wrong ones in a row bring the chance from 0.5 to 0.05
_REST = 32  # tokens without drafts, after which it is tried again: the text may have come to a quotation
_LONGEST_REST = 1024


@dataclass(slots=True)
class Acceptance:
    """What became of one sequence's drafts. `chance` is that the next one is right."""

    chance: float = _START
    rest: int = _REST
    resume_at: int = 0  # output length from which on drafts are made again

    def length(self, output_len: int, most: int, cost: float) -> int:
        """Return how many drafts, at most `most`, pay at a `cost` of each in tokens that its time would give otherwise.

        Where bad luck has made them not pay, the sequence rests, each time twice as long.
        """
        if output_len < self.resume_at:
            return 0
        count, gain = 0, self.chance
        while count < most and gain > cost:
            count += 1
            gain *= self.chance
        if most and not count and self.chance < _START:
            self.resume_at = output_len + self.rest
            self.rest = min(2 * self.rest, _LONGEST_REST)
            self.chance = _START
        return count

    def learn(self, drafted: int, accepted: int) -> None:
        """Take what became of some drafts: those after the first wrong one say nothing."""
        for _ in range(accepted):
            self.chance += _RATE * (1.0 - self.chance)
        if accepted < drafted:
            self.chance -= _RATE * self.chance
        if self.chance > _START:
            self.rest = _REST
