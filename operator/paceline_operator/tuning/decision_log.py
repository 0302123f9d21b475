"""The log of decisions: one JSON object a line, with all that the decision depended on, so that it can be made again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline_core.errors import FormatError
from paceline_operator.tuning.decide import Decision, decide
from paceline_operator.tuning.question import Question

__all__ = ["DecisionLog", "Replayed", "read_log", "replay"]

_MOST_BYTES = 64 << 20  # of one file; the one before is kept
_OLD = ".1"

Replayed = tuple[Question, dict[str, Any], Decision]  # the question, what was decided, what is decided now


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


def read_log(path: Path) -> Iterator[tuple[Question, dict[str, Any]]]:
    """Yield question and logged decision of each line. Raises `FormatError` that names the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"can't read the decision log {path}: {error}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                data = json.loads(line)
                yield Question.from_json(data["question"]), data["decision"]
            except (ValueError, KeyError, TypeError, FormatError) as error:
                raise FormatError(f"{path.name}, line {number}: {error}") from None


def replay(path: Path) -> Iterator[Replayed]:
    """Make every decision of a log again."""
    for question, logged in read_log(path):
        yield question, logged, decide(question)
