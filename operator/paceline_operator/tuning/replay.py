"""Decisions of a log made again, offline. What is in the file was written by the operator, or by anybody.

Each line is held against a JSON schema before any of it is used: a number that is too large, or that is none, would cost
hours or all memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

from paceline_core.errors import FormatError, PacelineError
from paceline_operator.tuning.decide import Decision, decide
from paceline_operator.tuning.ledger import MOST_OUTPUT, MOST_PROMPT
from paceline_operator.tuning.question import Question

__all__ = ["Replayed", "read_log", "replay"]

Replayed = tuple[Question, dict[str, Any], Decision]  # the question, what was decided, what is decided now
_MOST_LINE = 64 << 20  # bytes
_LONGEST = 200  # characters of a complaint

_SECONDS = {"type": "number", "minimum": 0, "maximum": 1e9}
_FACTOR = {"type": "number", "minimum": 0, "maximum": 1000}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 1 << 53}
_TILE = {"type": "integer", "minimum": 1, "maximum": 1 << 20}


def _maybe(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(*items: dict[str, Any], optional: int = 0) -> dict[str, Any]:
    return {"type": "array", "prefixItems": items, "minItems": len(items) - optional, "maxItems": len(items)}


def _each(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_REQUEST = _list(
    _SECONDS,
    {"type": "integer", "minimum": 1, "maximum": MOST_PROMPT},
    {"type": "integer", "minimum": 0, "maximum": MOST_OUTPUT},
    _maybe(_SECONDS),
    _maybe(_SECONDS),
    {"type": "boolean"},
    _maybe({"type": "boolean"}),
    {"type": "integer"},
    _each({"type": "integer"}),
    _COUNT,
    optional=3,
)
_QUESTION = {
    "at": {"type": "number"},
    "service": {"type": "string"},
    "knobs": {"type": "object"},
    "bounds": {"type": "object", "additionalProperties": _list({}, {})},
    "objective": {
        "type": "object",
        "properties": {
            "ttft": _maybe(_SECONDS),
            "tpot": _maybe(_SECONDS),
            "percentile": {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
            "stated": {"type": "boolean"},
            "draining": {"type": "boolean"},
        },
    },
    "model": {"type": "object", "properties": {"seen": {"type": "object"}}},
    "bend": _maybe(_list(_COUNT | {"type": "number"}, _SECONDS, _TILE, _TILE)),
    "factors": _each(_list(_COUNT, _COUNT, _COUNT, _FACTOR)),
    "numBlocks": {"type": "integer", "minimum": 1, "maximum": 1 << 31},
    "samples": _each(_each(_REQUEST)),
    "load": {"type": "number", "exclusiveMinimum": 0, "maximum": 1000},
    "pods": {"type": "integer", "minimum": 1, "maximum": 1 << 20},
    "stepError": _FACTOR,
    "kvUsage": _FACTOR,
    "only": _maybe(_each({"type": "object"})),
    "blocked": _each({"type": "object"}),
}
_DECISION = {name: {"type": "string"} for name in ("kind", "reason", "message")}
# what a log of another version may lack
_LATER = {"traffic": _QUESTION["samples"], "doubt": _FACTOR}
_LINE = Draft202012Validator(
    {
        "type": "object",
        "required": ["question", "decision"],
        "properties": {
            "question": {"type": "object", "required": [*_QUESTION.keys() - {"bend"}], "properties": _QUESTION | _LATER},
            "decision": {"type": "object", "required": [*_DECISION], "properties": _DECISION},
        },
    }
)


def replay(path: Path) -> Iterator[Replayed]:
    """Make every decision of a log again. Raises `FormatError` that names file and line for what can't be."""
    empty = True
    for number, question, logged in read_log(path):
        empty = False
        try:
            decision = decide(question)
        except (ArithmeticError, AttributeError, LookupError, PacelineError, TypeError, ValueError) as error:
            raise _damaged(path, number, f"it can't be decided: {type(error).__name__}: {error}") from error
        yield question, logged, decision
    if empty:
        raise FormatError(f"{path} holds no decisions: the operator writes them with PACELINE_TUNING_LOG")


def read_log(path: Path) -> Iterator[tuple[int, Question, dict[str, Any]]]:
    """Yield number, question and logged decision of each line. Raises `FormatError` that names the file and the line."""
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(_MOST_LINE):
                number += 1
                if line.strip():
                    yield number, *_entry(line)
    except OSError as error:
        raise FormatError(f"can't read the decision log {path}: {error.strerror or error}") from None
    except (ArithmeticError, FormatError, RecursionError, ValidationError, ValueError) as error:
        raise _damaged(path, number, _words(error)) from None


def _entry(line: bytes) -> tuple[Question, dict[str, Any]]:
    data = json.loads(line, parse_constant=_finite, parse_float=_finite)
    _LINE.validate(data)
    return Question.from_json(data["question"]), data["decision"]


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number that can be used")
    return number


def _words(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return f"it isn't a decision: {error}"
    return f"{'.'.join(map(str, error.absolute_path)) or 'it'}: {error.message}"


def _damaged(path: Path, number: int, words: str) -> FormatError:
    short = words if len(words) <= _LONGEST else words[:_LONGEST] + "…"
    return FormatError(f"{path}, line {number}: {' '.join(short.split())}")
