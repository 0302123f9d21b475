"""Splits what a model writes into text for the reader and tool calls, piece by piece."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from paceline_runtime.tool_scanner import CallScanner

__all__ = ["CallDelta", "Delta", "ToolMarks", "ToolParser", "ToolRequest"]

_OPENERS = "{["
_BETWEEN = " \t\r\n,;[]"  # what may stand around calls


@dataclass(frozen=True, slots=True)
class ToolMarks:
    """What stands around calls. Without `begin`, a text that begins as JSON (or with one of
    `prefixes`) is nothing but calls.
    """

    begin: str = ""
    end: str = ""
    prefixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of call `index`: its id and name, then its arguments bit by bit."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


Delta = str | CallDelta


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A whole call."""

    id: str
    name: str
    arguments: str


class ToolParser:
    """One answer's text, as it comes. What looked like a call and isn't one (no name) is text after all."""

    def __init__(self, marks: ToolMarks) -> None:
        self._marks = marks
        self._held = ""
        self._in_calls = False
        self._decided = bool(marks.begin)  # whether it is known that calls may come at all
        self._scanner: CallScanner | None = None
        self._announced = False
        self.calls = 0

    def push(self, text: str) -> list[Delta]:
        """Return what `text` adds."""
        self._held += text
        deltas: list[Delta] = []
        while self._advance(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """Return what was held back: nothing more comes."""
        rest, self._held = self._held, ""
        if self._scanner is not None:
            rest = "" if self._announced else self._scanner.text + rest
        elif self._in_calls and (self._is_end(rest) if self.calls else not rest.strip()):
            rest = ""
        return [rest] if rest else []

    def _is_end(self, rest: str) -> bool:
        """Whether what follows a call is what ends it, or a piece of that, which `max_tokens` has cut."""
        return self._marks.end.startswith(rest.strip(_BETWEEN))

    def _advance(self, deltas: list[Delta]) -> bool:
        """Deal with the beginning of what is held; False if more text is needed."""
        if not self._held:
            return False
        if self._scanner is not None:
            return self._read_call(self._scanner, deltas)
        if not self._decided:
            return self._decide()
        return self._between_calls(deltas) if self._in_calls else self._read_text(deltas)

    def _decide(self) -> bool:
        """Without a mark, the first characters say whether all of this is calls or none."""
        text = self._held.lstrip()
        if not text or any(prefix.startswith(text) and prefix != text for prefix in self._marks.prefixes):
            return False
        prefix = next((p for p in self._marks.prefixes if text.startswith(p)), "")
        self._in_calls = bool(prefix) or text[0] in _OPENERS
        self._held = text[len(prefix) :] if self._in_calls else self._held
        self._decided = True
        return True

    def _read_text(self, deltas: list[Delta]) -> bool:
        begin = self._marks.begin
        if not begin:
            text, self._held = self._held, ""
        elif (place := self._held.find(begin)) >= 0:
            text, self._held = self._held[:place].rstrip(), self._held[place + len(begin) :]
            self._in_calls = True
        else:
            # white space before a call isn't part of the text, so it waits too
            text = self._held[: len(self._held) - _overlap(self._held, begin)].rstrip()
            self._held = self._held[len(text) :]
        if text:
            deltas.append(text)
        return self._in_calls and bool(self._held)

    def _between_calls(self, deltas: list[Delta]) -> bool:
        """Skip what separates calls, up to the next one or the end of them."""
        text, end = self._held.lstrip(_BETWEEN), self._marks.end
        if text.startswith("{"):
            self._scanner, self._announced, self._held = CallScanner(), False, text
            return True
        if end and text.startswith(end):
            self._in_calls, self._held = False, text[len(end) :]
            return bool(self._held)
        if not text or (end and end.startswith(text)):
            return False
        self._in_calls = False  # anything else is no call: the reader may see it, as it came
        if not self._marks.begin:
            deltas.append(self._held)
            self._held = ""
        return bool(self._held)

    def _read_call(self, scanner: CallScanner, deltas: list[Delta]) -> bool:
        self._held = scanner.push(self._held)
        if scanner.name is not None and not self._announced:
            deltas.append(CallDelta(self.calls, f"call_{secrets.token_hex(12)}", scanner.name))
            self._announced = True
        if arguments := scanner.take_arguments():
            deltas.append(CallDelta(self.calls, arguments=arguments))
        if not scanner.done:
            return False
        self._end_call(scanner, deltas)
        return bool(self._held)

    def _end_call(self, scanner: CallScanner, deltas: list[Delta]) -> None:
        self._scanner = None
        if not self._announced:
            deltas.append(scanner.text)
            self._in_calls = bool(self._marks.begin)
            return
        if not scanner.has_arguments:
            deltas.append(CallDelta(self.calls, arguments="{}"))
        self.calls += 1


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest tail of `text` with which `mark` begins."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
