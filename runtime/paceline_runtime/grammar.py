"""What a text must match, as one string in llguidance's form: made and checked by the API process, followed by the engine.

The library's own limits bound the work: its "fuel" is counted, not timed, so the same grammar is always taken or refused.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits

from paceline_runtime.model_errors import GrammarError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = [
    "GRAMMAR_LIMITS",
    "MAX_GRAMMAR_CHARS",
    "choice_grammar",
    "json_grammar",
    "lark_grammar",
    "lark_json",
    "regex_grammar",
]

MAX_GRAMMAR_CHARS = 64 * 1024  # an enum of 20,000 words, three times that size, compiles in 80 ms
_KEPT = 256  # verdicts on grammars
# Without a bound a small model may write white space for ever. Eight are enough for JSON indented by two, four deep.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[ \n\r\t]{0,8}", "coerce_one_of": True}
# A third of the library's defaults. Fuel is spent at some 50,000 a millisecond while compiling, so this is 20 ms, and at
# 14,000 a millisecond in a step: 5 ms for a mask at most, where usual ones take 0.05 ms.
GRAMMAR_LIMITS = LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=70_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)

_FAULT = re.compile(r"^error: (.+)$", re.MULTILINE)

_verdicts: OrderedDict[str, str] = OrderedDict()
_verdicts_lock = threading.Lock()


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of JSON texts that are valid under `schema` (JSON Schema). Raises `GrammarError`."""
    text = _sized(json.dumps(schema))
    return _checked(lambda: LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS))


def regex_grammar(pattern: str) -> str:
    """Return the grammar of texts that match `pattern` as a whole. Raises `GrammarError`."""
    return _checked(lambda: LLMatcher.grammar_from_regex(_sized(pattern)))


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of the texts in `choices`. Raises `GrammarError`."""
    return lark_grammar("start: " + " | ".join(json.dumps(choice) for choice in choices))


def lark_grammar(source: str) -> str:
    """Return a grammar given in the library's dialect of Lark. Raises `GrammarError`."""
    return _checked(lambda: LLMatcher.grammar_from_lark(_sized(source)))


def lark_json(schema: Mapping[str, Any]) -> str:
    """Return `schema` as a term of a Lark grammar."""
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"


def _sized(text: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"it has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are allowed")
    return text


def _checked(make: Callable[[], str]) -> str:
    try:
        grammar = make()
    except ValueError as error:
        raise GrammarError(_said(str(error))) from None
    if verdict := _verdict(grammar):
        raise GrammarError(_said(verdict))
    return grammar


def _verdict(grammar: str) -> str:
    """Return what is wrong with a grammar, or nothing; asked again, from memory."""
    with _verdicts_lock:
        verdict = _verdicts.pop(grammar, None)
    if verdict is None:
        verdict = LLMatcher.validate_grammar(grammar, limits=GRAMMAR_LIMITS)
    with _verdicts_lock:
        _verdicts[grammar] = verdict
        if len(_verdicts) > _KEPT:
            _verdicts.popitem(last=False)
    return verdict


def _said(text: str) -> str:
    """Return a verdict in one line: of a regular expression's, which draws the place first, what is wrong with it."""
    first = text.partition("\n")[0]
    if (fault := _FAULT.search(text)) is not None:
        first = f"{first} {fault[1]}"
    return first[:300]
