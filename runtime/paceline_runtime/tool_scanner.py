"""Reads one tool call, a JSON object, while it is written: its name as soon as it is there, its arguments as they come."""

from __future__ import annotations

import json

__all__ = ["CallScanner"]

_ARGUMENTS = ("arguments", "parameters")  # the second is Llama's word
_SPACE = " \t\r\n"


class CallScanner:
    """Takes the text of an object in any pieces. `name` is None until it is known, `done` true at the closing brace.

    Only what separates keys from values is understood; whether the arguments are valid JSON is the caller's business, as
    with OpenAI.
    """

    def __init__(self) -> None:
        self.text = ""
        self.name: str | None = None
        self.done = False
        self._depth = 0
        self._string_from: int | None = None  # where the string that is open begins
        self._escaped = False
        self._key: str | None = None  # of the member that is read, at depth 1
        self._value_from: int | None = None
        self._arguments: tuple[int, int | None] | None = None  # where they begin and end
        self._given = 0  # characters of the arguments that were taken

    def push(self, text: str) -> str:
        """Take more text and return what lies behind the object's end."""
        for index, char in enumerate(text):
            self.text += char
            self._step(char)
            if self.done:
                return text[index + 1 :]
        return ""

    @property
    def has_arguments(self) -> bool:
        """Whether any arguments have begun."""
        return self._arguments is not None

    def take_arguments(self) -> str:
        """Return the arguments that came since the last call, once the name is known."""
        if self.name is None or self._arguments is None:
            return ""
        start, end = self._arguments
        if self.text[start] == '"':  # an object written as a text, which some models do: one can't tell before its end
            arguments = "" if end is None else _unquoted(self.text[start:end])
        else:
            arguments = self.text[start:end].rstrip(_SPACE)  # what follows the last brace isn't theirs
        new, self._given = arguments[self._given :], len(arguments)
        return new

    def _step(self, char: str) -> None:
        here = len(self.text) - 1
        if self._string_from is not None:
            self._step_string(char, here)
        elif char == '"':
            self._begin_value(here)
            self._string_from = here
        elif char in "{[":
            if self._depth:
                self._begin_value(here)
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value(here)
                self.done = True
            elif self._depth == 1:
                self._end_value(here + 1)
        elif char == "," and self._depth == 1:
            self._end_value(here)
        elif char not in _SPACE + ":":
            self._begin_value(here)

    def _step_string(self, char: str, here: int) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            start, self._string_from = self._string_from, None
            if self._depth == 1:
                self._end_string(self.text[start : here + 1], here + 1)

    def _end_string(self, quoted: str, end: int) -> None:
        if self._key is None:
            self._key = _unquoted(quoted)
            return
        if self._key == "name" and self.name is None:
            self.name = _unquoted(quoted)
        self._end_value(end)

    def _begin_value(self, here: int) -> None:
        if self._depth == 1 and self._key is not None and self._value_from is None:
            self._value_from = here
            if self._key in _ARGUMENTS and self._arguments is None:
                self._arguments = here, None

    def _end_value(self, end: int) -> None:
        if self._key in _ARGUMENTS and self._arguments is not None and self._arguments[1] is None:
            self._arguments = self._arguments[0], end
        if self._value_from is not None:
            # a member is over; a comma comes, and then the next key
            self._key = self._value_from = None


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        return text
