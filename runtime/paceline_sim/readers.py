"""Reads recorded traffic: CSV and JSONL as public traces use them, and what the runtime's `/admin/observe` answers.

| format | a record |
|---|---|
| CSV | `TIMESTAMP,ContextTokens,GeneratedTokens` (date and time, or seconds) |
| JSONL | `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": […], "priority": n}`, the last two optional |
| observe | one or more answers of `GET /admin/observe`, as an array or one per line |

Every complaint names the row (the line of the file, or the record's place) and the field.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline_core.errors import FormatError
from paceline_core.wire import ObserveDocument, RequestRecord, from_json
from paceline_sim.trace import Trace, TraceRequest

__all__ = ["read_trace", "trace_of_records"]

HASH_TOKENS = 512  # prompt tokens per entry of `hash_ids` in public serving traces
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOST_TOKENS = 10_000_000  # a longer request is a mistake in the file


def read_trace(path: Path) -> Trace:
    """Read the trace in `path`; its format is told by its content. Times count from the first request.

    Raises `FormatError` for a file that can't be read or has no request, and names row and field of what is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise FormatError(f"can't read the trace {path}: {reason}") from None
    start = text.lstrip()[:1]
    try:
        if start == "[" or (start == "{" and '"instance"' in text and '"input_length"' not in text):
            return trace_of_records(record for document in _documents(text) for record in document.requests)
        return _from_zero(_jsonl(text) if start == "{" else _csv(text))
    except FormatError as error:
        raise FormatError(f"{path.name}: {error}") from None


def trace_of_records(records: Iterable[RequestRecord]) -> Trace:
    """Return what the runtime saw as a trace, each request once, in the order of arrival.

    A record without output tells nothing of the output's length: it is left out and counted in `Trace.left_out`. Raises
    `FormatError` if nothing is left.
    """
    newest = {record.request_id: record for record in records}  # later pages know more of what was unfinished
    ordered = sorted(newest.values(), key=lambda record: record.arrival)
    known = [record for record in ordered if record.output_tokens > 0]
    requests = [TraceRequest(r.arrival, r.prompt_tokens, r.output_tokens, r.priority, tuple(r.prefix_hashes)) for r in known]
    return _from_zero(enumerate(requests, start=1), left_out=len(ordered) - len(known))


def _from_zero(rows: Iterable[tuple[int, TraceRequest]], left_out: int = 0) -> Trace:
    """Return the trace of numbered rows, its times counted from the first."""
    requests: list[TraceRequest] = []
    origin = before = 0.0
    for row, request in rows:
        if not requests:
            origin = before = request.arrival
        if request.arrival < before:
            raise FormatError(f"row {row}: its time is {before - request.arrival:.6g} s before the row above, sort by time")
        before = request.arrival
        requests.append(request.at(request.arrival - origin))
    return Trace(tuple(requests), left_out=left_out)


def _csv(text: str) -> Iterator[tuple[int, TraceRequest]]:
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
    if missing and text.strip():
        raise FormatError(f"row 1: no column {missing[0]}, expected the header {','.join(_COLUMNS)}")
    for record in reader:
        row = reader.line_num
        yield (
            row,
            TraceRequest(
                _time(record["TIMESTAMP"], row),
                _length(record["ContextTokens"], row, "ContextTokens"),
                _length(record["GeneratedTokens"], row, "GeneratedTokens"),
            ),
        )


def _jsonl(text: str) -> Iterator[tuple[int, TraceRequest]]:
    for row, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            record = _object(line, row)
            hashes = _field(record, "hash_ids", row, _is_hashes, "a list of whole numbers ≥ 0", default=[])
            yield (
                row,
                TraceRequest(
                    _field(record, "timestamp", row, _is_number, "a number of milliseconds") / 1e3,
                    _field(record, "input_length", row, _is_length, "a whole number of tokens ≥ 1"),
                    _field(record, "output_length", row, _is_length, "a whole number of tokens ≥ 1"),
                    priority=_field(record, "priority", row, _is_whole, "a whole number", default=0),
                    prefix_hashes=tuple(hashes),
                    hash_tokens=HASH_TOKENS if hashes else 0,
                ),
            )


def _documents(text: str) -> Iterator[ObserveDocument]:
    """Yield the observe documents of a JSON array, of one document, or of one per line."""
    try:
        data = json.loads(text)
        items = data if isinstance(data, list) else [data]
    except (ValueError, RecursionError):
        items = [_object(line, row) for row, line in enumerate(text.splitlines(), start=1) if line.strip()]
    for number, item in enumerate(items, start=1):
        try:
            yield from_json(ObserveDocument, item)
        except FormatError as error:
            raise FormatError(f"document {number}: {error}") from None


def _object(line: str, row: int) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise FormatError(f"row {row}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, brackets without end
        raise FormatError(f"row {row}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise FormatError(f"row {row}: expected a JSON object, got {type(record).__name__}")
    return record


def _field(
    record: Mapping[str, Any], name: str, row: int, valid: Callable[[Any], bool], expected: str, default: Any = None
) -> Any:
    value = record.get(name, default)
    if value is None:
        raise FormatError(f"row {row}: no field {name}, expected {expected}")
    if not valid(value):
        raise FormatError(f"row {row}: {name} is {_shown(value)}, expected {expected}")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_length(value: Any) -> bool:
    return _is_whole(value) and 1 <= value <= _MOST_TOKENS


def _is_hashes(value: Any) -> bool:
    return isinstance(value, list) and all(_is_whole(item) and item >= 0 for item in value)


def _length(text: str | None, row: int, column: str) -> int:
    digits = (text or "").strip()
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 8 or not _is_length(int(digits)):
        raise FormatError(f"row {row}: {column} is {_shown(text)}, expected a whole number of tokens ≥ 1")
    return int(digits)


def _time(text: str | None, row: int) -> float:
    """Return seconds of a date and time (of the Unix epoch; UTC where no zone is given) or of a plain number."""
    stamp = (text or "").strip()
    try:
        seconds = float(stamp)
    except ValueError:
        try:
            moment = datetime.fromisoformat(stamp)
        except ValueError:
            moment = None
        if moment is None:
            raise FormatError(
                f"row {row}: TIMESTAMP is {_shown(text)}, expected a date and time as in '2023-11-16 18:15:46.68' or seconds"
            ) from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not _is_number(seconds):
        raise FormatError(f"row {row}: TIMESTAMP is {_shown(text)}, expected a finite number of seconds")
    return seconds


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "…"
