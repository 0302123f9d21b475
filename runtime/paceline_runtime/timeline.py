"""The last steps with who was in them, for people who want to see the batch: a ring that fills only while somebody looks."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

from paceline_core.wire import TimelineMember, TimelineStep
from paceline_runtime.messages import StepStatistics

__all__ = ["STEPS_KEPT", "WATCH_SECONDS", "Timeline"]

STEPS_KEPT = 1000  # 10 s at 100 steps/s; with 256 members each about 20 MB
WATCH_SECONDS = 60.0  # one look keeps the recording on for so long


class Timeline:
    """Used on one thread."""

    def __init__(self, size: int = STEPS_KEPT) -> None:
        self._steps: deque[tuple[int, StepStatistics, Sequence[tuple[int, int, bool]]]] = deque(maxlen=size)
        self._count = 0

    @property
    def cursor(self) -> int:
        """The number of the last step."""
        return self._count

    def add(self, step: StepStatistics, members: Sequence[tuple[int, int, bool]]) -> None:
        """Keep a step: its members are (sequence, tokens, whether they are a prompt's)."""
        self._count += 1
        self._steps.append((self._count, step, members))

    def read(self, since: int, limit: int, names: Mapping[int, str], to_unix: float) -> tuple[TimelineStep, ...]:
        """Return the newest `limit` steps after number `since`, oldest first; `names` are the requests of the sequences."""
        newest = itertools.islice(reversed(self._steps), limit)
        fresh = [item for item in newest if item[0] > since]
        return tuple(_step(number, step, members, names, to_unix) for number, step, members in reversed(fresh))


def _step(
    number: int, step: StepStatistics, members: Sequence[tuple[int, int, bool]], names: Mapping[int, str], to_unix: float
) -> TimelineStep:
    shown = tuple(TimelineMember(names.get(seq_id, f"#{seq_id}"), tokens, prefill) for seq_id, tokens, prefill in members)
    return TimelineStep(number, step.end + to_unix, step.duration, step.epoch, shown)
