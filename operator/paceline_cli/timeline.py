"""Draws who had which slot when, one row per slot: what a batching strategy does, at a glance."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from rich.text import Text

from paceline_sim import Outcome, Result

__all__ = ["Marks", "draw"]

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# the terminal's own colours: they suit its theme and work with 16 colours too
_COLOURS = ("cyan", "yellow", "green", "magenta", "bright_blue", "bright_red", "bright_white", "bright_green")
_MARGIN = len("waiting ")
_LEGEND_LIMIT = 26  # requests; more than the alphabet explains nobody reads
_ROW_LIMIT = 48  # slots; more scroll away


@dataclass(frozen=True, slots=True)
class Marks:
    """The characters for a slot that is held after its request ended, and for an idle one."""

    held: str = "░"
    idle: str = "·"

    @classmethod
    def for_encoding(cls, encoding: str) -> Marks:
        """Return marks that the terminal's encoding can show."""
        return cls() if encoding.lower().startswith("utf") else cls(held="-", idle=".")


@dataclass(frozen=True, slots=True)
class _Segment:
    """A request's stay in a slot: computed from `start` to `end`, held until `released`."""

    outcome: Outcome
    start: float
    end: float
    released: float


def draw(result: Result, *, width: int, marks: Marks) -> Iterator[Text]:
    """Yield the lines of the picture, at most `width` columns wide."""
    columns, step = _scale(result.duration, max(10, width - _MARGIN))
    slots = _slots(result)
    rows = min(_ROW_LIMIT, max(number for number, segments in enumerate(slots, start=1) if segments))
    for number, segments in enumerate(slots[:rows], start=1):
        row = Text(f"slot {number:<{_MARGIN - 5}}"[:_MARGIN])
        for style, run in groupby(_cells(segments, columns, step, marks), key=itemgetter(1)):
            row.append("".join(character for character, _ in run), style)
        yield row
    if len(slots) > rows:
        used = sum(bool(segments) for segments in slots[rows:])
        more = len(slots) - rows
        yield Text(f"and {more} more slot{'s' if more > 1 else ''}, {f'{used} of them used' if used else 'idle'}", "dim")
    yield Text("waiting ".ljust(_MARGIN) + _waiting(result, columns, step))
    yield Text(" " * _MARGIN + _axis(columns, step), "dim")
    scale = "" if step <= 1 else f"; a column is {step:.1f} steps"
    yield Text(f"letters are requests, digits count those that wait{scale}", "dim")
    yield Text(f"{marks.held} the request has ended, its slot is held until the batch ends   {marks.idle} idle", "dim")
    yield from _legend(result, width)


def _scale(duration: float, room: int) -> tuple[int, float]:
    """Return (columns, steps per column): whole columns per step where there is room, else as wide as may be."""
    if duration <= room:
        per_step = int(room // duration)
        return round(duration * per_step), 1 / per_step
    return room, duration / room


def _slots(result: Result) -> list[list[_Segment]]:
    """Return each slot's segments: a request takes the lowest slot that is free when it starts."""
    slots: list[list[_Segment]] = [[] for _ in range(result.slots)]
    free, taken = list(range(result.slots)), list[tuple[float, int]]()
    started = [(o.started, o.index, o) for o in result.outcomes if o.started is not None]
    for start, _, outcome in sorted(started, key=lambda item: item[:2]):
        while taken and taken[0][0] <= start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        slot = heapq.heappop(free)
        end = outcome.released if outcome.last_token is None else outcome.last_token
        slots[slot].append(_Segment(outcome, start, end, outcome.released))
        heapq.heappush(taken, (outcome.released, slot))
    return slots


def _cells(segments: Sequence[_Segment], columns: int, step: float, marks: Marks) -> list[tuple[str, str]]:
    """Return (character, style) per column; a request shorter than a column still gets one."""
    cells = [(marks.idle, "dim")] * columns
    for segment in segments:
        letter, colour = _look(segment.outcome.index)
        first, end, last = (_column(t, step, columns) for t in (segment.start, segment.end, segment.released))
        first = min(first, columns - 1)
        end = max(end, first + 1)
        cells[first:end] = [(letter, f"black on {colour}")] * (end - first)
        if last > end:
            cells[end:last] = [(marks.held, colour)] * (last - end)
    return cells


def _column(time: float, step: float, columns: int) -> int:
    return min(columns, round(time / step))


def _look(index: int) -> tuple[str, str]:
    return _LETTERS[index % len(_LETTERS)], _COLOURS[index % len(_COLOURS)]


def _waiting(result: Result, columns: int, step: float) -> str:
    """Return how many requests wait in the middle of each column (+ is ten or more)."""
    changes = [(o.arrival, 1) for o in result.outcomes] + [
        (o.released if o.started is None else o.started, -1) for o in result.outcomes
    ]
    changes.sort(reverse=True)
    waiting, line = 0, ""
    for column in range(columns):
        while changes and changes[-1][0] <= (column + 0.5) * step:
            waiting += changes.pop()[1]
        line += " " if not waiting else str(waiting) if waiting < 10 else "+"
    return line


def _axis(columns: int, step: float) -> str:
    """Return the time axis, a number about every twelve columns at round steps."""
    least = 12 * step
    magnitude = 10 ** max(0, len(str(int(least))) - 1)
    every = next(m * magnitude for m in (1, 2, 5, 10, 20) if m * magnitude >= least)
    line = ""
    for number in range(0, int(columns * step) + 1, every):
        column = round(number / step)
        label = f"{number}"
        if column >= len(line) and column + len(label) <= columns:
            line = line.ljust(column) + label
    return line


def _legend(result: Result, width: int) -> Iterator[Text]:
    """Yield the requests: letter, length, and how long each waited until its result was there."""
    shown = result.outcomes[:_LEGEND_LIMIT]
    entries = [f"{_look(o.index)[0]}: {o.output_len} steps, latency {o.latency:.10g}" for o in shown]
    column = max(map(len, entries)) + 3
    per_line = max(1, width // column)
    for start in range(0, len(entries), per_line):
        line = Text()
        for outcome, entry in zip(shown[start : start + per_line], entries[start : start + per_line], strict=True):
            line.append(entry[0], f"black on {_look(outcome.index)[1]}")
            line.append(entry[1:].ljust(column - 1))
        line.rstrip()
        yield line
    if len(result.outcomes) > len(shown):
        yield Text(f"and {len(result.outcomes) - len(shown)} more (letters repeat after {len(_LETTERS)})", "dim")
