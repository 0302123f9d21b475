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

_MAX_CALLS = 16  # of a forced answer with parallel calls; a small model would go on for ever


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls. `wrap` puts a Lark rule `call` into the grammar of an answer of up to so many calls."""

    name: str
    marks: ToolMarks
    arguments_key: str
    wrap: Callable[[int], str]

    def grammar(self, functions: Sequence[Function], *, one_call: bool) -> str:
        """Return the grammar of an answer that calls some of `functions`. Takes milliseconds. Raises `GrammarError`."""
        rules = [self.wrap(1 if one_call else _MAX_CALLS), "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
        for index, function in enumerate(functions):
            head = f'{{"name": {json.dumps(function.name)}, "{self.arguments_key}": '
            rules.append(f'call_{index}: {json.dumps(head)} args_{index} "}}"')
            rules.append(f"args_{index}: {lark_json(arguments_schema(function))}")
        return lark_grammar("\n".join(rules))


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


def _more(term: str, count: int) -> str:
    return f" {term}{{0,{count - 1}}}" if count > 1 else ""


HERMES = ToolFormat("hermes", ToolMarks("<tool_call>", "</tool_call>"), "arguments", _tagged)  # Hermes, Qwen, SmolLM
LLAMA3 = ToolFormat("llama3_json", ToolMarks(prefixes=("<|python_tag|>",)), "parameters", _bare)
MISTRAL = ToolFormat("mistral", ToolMarks(prefixes=("[TOOL_CALLS]",)), "arguments", _listed)


def tool_format_of(chat_template: str) -> ToolFormat:
    """Return the format that a chat template shows its model; for one that shows none, the most common one."""
    if "[TOOL_CALLS]" in chat_template:
        return MISTRAL
    if "<tool_call>" not in chat_template and ("<|python_tag|>" in chat_template or '"parameters": ' in chat_template):
        return LLAMA3
    return HERMES
