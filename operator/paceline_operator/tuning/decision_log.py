"""The log of decisions: one JSON object a line, with all that the decision depended on, so that `replay` makes it again."""

from __future__ import annotations

import json
from pathlib import Path

from paceline_operator.tuning.decide import Decision
from paceline_operator.tuning.question import Question

__all__ = ["DecisionLog"]

_MOST_BYTES = 64 << 20  # of one file; the one before is kept
_OLD = ".1"


class DecisionLog:
    """Appends decisions to a file; without a path it keeps none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def add(self, question: Question, decision: Decision, epochs: dict[str, int]) -> None:
        """Append one decision with its inputs. Raises `OSError` if it can't be written."""
        if self._path is None:
            return
        line = {"question": question.to_json(), "decision": decision.to_json(), "epochs": epochs}
        self._turn()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def _turn(self) -> None:
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and self._path.stat().st_size > _MOST_BYTES:
            self._path.replace(self._path.with_name(self._path.name + _OLD))
