"""How models write tool calls: known by the chat template, parsed, and enforced by a grammar where a call is forced."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline_runtime.chat_schema import Function
from paceline_runtime.grammar import lark_grammar, lark_json
from paceline_runtime.tool_parser import ToolMarks

__all__ = ["HERMES", "LLAMA3", "MISTRAL", "ToolFormat", "tool_format_of"]

# what the parser strips before it looks whether an answer begins as a call
_SPACE = r"\s\x1c-\x1f"
_MAX_CALLS = 16  # of a forced answer with parallel calls; a small model would go on for ever


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls. `wrap` puts a Lark rule `call` into the grammar of an answer of up to so many calls, `offer`
    into that of a text which may have some: one at most, or any number.
    """

    name: str
    marks: ToolMarks
    arguments_key: str
    wrap: Callable[[int], str]
    offer: Callable[[bool], str]

    def grammar(self, functions: Sequence[Function], *, one_call: bool) -> str:
        """Return the grammar of an answer that calls some of `functions`. Takes milliseconds. Raises `GrammarError`."""
        schemas = [arguments_schema(function) for function in functions]
        return lark_grammar("\n".join([self.wrap(1 if one_call else _MAX_CALLS), *self._rules(functions, schemas)]))

    def strict_grammar(self, functions: Sequence[Function], *, one_call: bool) -> str:
        """Return the grammar of a text that may call `functions`: free, but for the calls in it, whose arguments follow the
        schemas of those that are `strict`. Takes milliseconds. Raises `GrammarError`.
        """
        schemas = [arguments_schema(function) if function.strict else {"type": "object"} for function in functions]
        return lark_grammar("\n".join([self.offer(one_call), *self._rules(functions, schemas)]))

    def _rules(self, functions: Sequence[Function], schemas: Sequence[dict[str, Any]]) -> list[str]:
        """Return the rule `call` and those below it."""
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
        for index, (function, schema) in enumerate(zip(functions, schemas, strict=True)):
            head = f'{{"name": {json.dumps(function.name)}, "{self.arguments_key}": '
            rules.append(f'call_{index}: {json.dumps(head)} args_{index} "}}"')
            rules.append(f"args_{index}: {lark_json(schema)}")
        return rules


def arguments_schema(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments; one that declares none takes an empty object."""
    if function.parameters is None:
        return {"type": "object", "additionalProperties": False}
    return {"type": "object", **function.parameters}


def _tagged(count: int) -> str:
    return "start: tagged" + _more('("\\n" tagged)', count) + '\ntagged: "<tool_call>\\n" call "\\n</tool_call>"'


def _bare(_count: int) -> str:
    return "start: call"  # Llama 3 doesn't call several functions at once


def _listed(count: int) -> str:
    return 'start: "[" call' + _more('(", " call)', count) + ' "]"'


def _tags_in_text(one_call: bool) -> str:
    """From the first mark on the call is the only way to go on. After the one call that is wanted, nothing comes."""
    tagged = 'head GAP call GAP "</tool_call>"'
    start = f"{tagged} | rest" if one_call else f"({tagged})* rest"
    return f'start: {start}\nhead[lazy]: TEXT "<tool_call>"\nrest: TEXT\nTEXT: /(.|\\n)*/\nGAP: /[ \\n]{{0,4}}/'


def _bare_or_text(_one_call: bool) -> str:
    """What begins as JSON, or with the mark of calls in letters, is a call; the mark itself, a special token, isn't made."""
    return f"start: call | other\n{_other('<[^|]')}"


def _list_or_text(one_call: bool) -> str:
    return f"{_listed(1 if one_call else _MAX_CALLS)} | other\n{_other('<')}"


def _other(angle: str) -> str:
    """Return the rule of a text that doesn't begin as calls do."""
    return f'other: OTHER | ""\nOTHER: /[{_SPACE}]*([^{{\\[<{_SPACE}]|{angle})(.|\\n)*/'


def _more(term: str, count: int) -> str:
    return f" {term}{{0,{count - 1}}}" if count > 1 else ""


# Hermes, Qwen, SmolLM
HERMES = ToolFormat("hermes", ToolMarks("<tool_call>", "</tool_call>"), "arguments", _tagged, _tags_in_text)
LLAMA3 = ToolFormat("llama3_json", ToolMarks(prefixes=("<|python_tag|>",)), "parameters", _bare, _bare_or_text)
MISTRAL = ToolFormat("mistral", ToolMarks(prefixes=("[TOOL_CALLS]",)), "arguments", _listed, _list_or_text)


def tool_format_of(chat_template: str) -> ToolFormat:
    """Return the format that a chat template shows its model; for one that shows none, the most common one."""
    if "[TOOL_CALLS]" in chat_template:
        return MISTRAL
    if "<tool_call>" not in chat_template and ("<|python_tag|>" in chat_template or '"parameters": ' in chat_template):
        return LLAMA3
    return HERMES
