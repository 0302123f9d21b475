"""What the API process's parts get to know of the engine: the protocol between `engine_client.py` and who records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline_core.wire import Gauges, StepModelDocument
from paceline_runtime.messages import EngineReady, SequenceEnded, StepStatistics
from paceline_runtime.sequence import LiveSequence

__all__ = ["EngineListener"]


class EngineListener(Protocol):
    """Is told what happens, for metrics and records. Called on the event loop; must not wait."""

    def engine_ready(self, ready: EngineReady) -> None:
        """A (new) engine takes requests."""

    def engine_died(self, lost: list[LiveSequence]) -> None:
        """The engine is gone; these sequences failed with it."""

    def submitted(self, sequence: LiveSequence) -> None:
        """A sequence was sent to the engine."""

    def tokens(self, sequence: LiveSequence, count: int, now: float) -> None:
        """About to be added to the sequence."""

    def sequence_ended(self, sequence: LiveSequence, ended: SequenceEnded) -> None:
        """The engine's last word on a sequence."""

    def stepped(
        self, step: StepStatistics | None, gauges: Gauges, members: Sequence[tuple[int, int, bool]] | None = None
    ) -> None:
        """A turn of the engine's loop is over; `members` of the step if a timeline is wanted."""

    def fitted(self, model: StepModelDocument) -> None:
        """The step-time model now."""

    def knobs_applied(self, num_blocks: int) -> None:
        """A knob change is in force."""
