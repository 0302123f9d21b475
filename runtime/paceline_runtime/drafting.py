"""Which engines make drafts: those whose runner can check them, so far a model on CPUs."""

from __future__ import annotations

import logging

from paceline_core.knobs import Knobs
from paceline_core.prompt_lookup import PromptLookup
from paceline_core.speculation import Proposer
from paceline_runtime.logs import log_event

__all__ = ["InertKnob", "proposer_for"]


def proposer_for(device: str) -> Proposer | None:
    """Return what makes drafts on `device`, or None: a GPU's runner samples one row per sequence, a clock has no text."""
    return PromptLookup() if device == "cpu" else None


class InertKnob:
    """Says once that `speculative` has no effect on `device`. It isn't refused: a fleet may be of several kinds of pods."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._told = proposer_for(device) is not None

    def look(self, knobs: Knobs) -> None:
        """Look at knobs that come into force."""
        if knobs.speculative and not self._told:
            self._told = True
            log_event("speculation_unavailable", level=logging.WARNING, device=self._device, speculative=knobs.speculative)
