"""Tool calls in text: found whatever the pieces, whatever the format; what isn't one stays text."""

from __future__ import annotations

import json
from functools import cache

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from serving_process import PATIENCE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline_runtime.chat_schema import ChatMessage, Function
from paceline_runtime.grammar import GRAMMAR_LIMITS, choice_grammar, json_grammar, lark_grammar, regex_grammar
from paceline_runtime.grammar_queue import GrammarQueue
from paceline_runtime.messages import AddSequence
from paceline_runtime.model_errors import GrammarError, UnsupportedModel
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.settings import EngineSettings
from paceline_runtime.tool_formats import HERMES, LLAMA3, MISTRAL, ToolFormat, tool_format_of
from paceline_runtime.tool_parser import CallDelta, Delta, ToolParser
from paceline_runtime.tool_prompt import template_messages


def split(form: ToolFormat, text: str, step: int) -> tuple[str, list[tuple[str, str]]]:
    """Return the content and the calls of a text that comes in pieces of `step` characters."""
    parser, deltas = ToolParser(form.marks), list[Delta]()
    for start in range(0, len(text), step):
        deltas += parser.push(text[start : start + step])
    deltas += parser.finish()
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        if isinstance(delta, CallDelta):
            name_and_arguments = calls.setdefault(delta.index, ["", ""])
            name_and_arguments[0] += delta.name
            name_and_arguments[1] += delta.arguments
    content = "".join(delta for delta in deltas if isinstance(delta, str))
    return content, [(name, arguments) for name, arguments in calls.values()]


CASES = [
    (
        HERMES,
        (
            'Sure.\n<tool_call>\n{"name": "f", "arguments": {"x": "a}\\"</tool_call>", "y": [1, {"z": 2}]}}\n</tool_call>\n'
            '<tool_call>\n{"arguments": {"q": 1}, "name": "g"}\n</tool_call>'
        ),
        "Sure.",
        [("f", '{"x": "a}\\"</tool_call>", "y": [1, {"z": 2}]}'), ("g", '{"q": 1}')],
    ),
    (HERMES, '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>', "", [("f", "{}"), ("g", "{}")]),
    (HERMES, "no <tool_ call here, 1 < 2  ", "no <tool_ call here, 1 < 2  ", []),
    (HERMES, '<tool_call>\n{"foo": 1}\n</tool_call>', '{"foo": 1}', []),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"x": 1', "", [("f", '{"x": 1')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
    (HERMES, '<tool_call>\n{"na', '{"na', []),
    (HERMES, '<tool_call>\n{"name": "f"}\n</tool_call>\nDone </tool_', "\nDone </tool_", [("f", "{}")]),
    (
        LLAMA3,
        '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {"x": null}}',
        "",
        [("f", '{"x": 1}'), ("g", '{"x": null}')],
    ),
    (LLAMA3, '{"type": "function", "name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (LLAMA3, '{"answer": [1, 2]} and more', '{"answer": [1, 2]} and more', []),
    (LLAMA3, 'Hello {"name": 1}', 'Hello {"name": 1}', []),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"x": 2}}]',
        "",
        [("f", '{"x": 1}'), ("g", '{"x": 2}')],
    ),
    (MISTRAL, '[{"name": "f", "arguments": {"x": 1}}]', "", [("f", '{"x": 1}')]),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_calls_are_found(form: ToolFormat, text: str, content: str, calls: list, step: int) -> None:
    assert split(form, text, step) == (content, calls)


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL], ids=lambda form: form.name)
def test_an_answer_cut_behind_a_call_shows_no_piece_of_its_mark(form: ToolFormat) -> None:
    call = f'{{"name": "f", "{form.arguments_key}": {{}}}}'
    begin = {HERMES: "<tool_call>\n", LLAMA3: "", MISTRAL: "["}[form]
    end = {HERMES: "\n</tool_call>\n<tool_call>\n", LLAMA3: "; ", MISTRAL: ", "}[form]
    for cut in range(len(form.marks.end) + 2):
        assert split(form, begin + call + end[:cut], 1) == ("", [("f", "{}")]), cut


SCRAPS = ["<tool_call>", "</tool_call>", '{"name": "f"', ', "arguments": ', *'{}[]"\\ é,1']


@settings(max_examples=200, deadline=None)
@given(
    form=st.sampled_from([HERMES, LLAMA3, MISTRAL]),
    text=st.lists(st.sampled_from(SCRAPS), max_size=14).map("".join),
    step=st.integers(1, 9),
)
def test_no_text_is_split_differently_by_its_pieces(form: ToolFormat, text: str, step: int) -> None:
    assert split(form, text, step) == split(form, text, 10_000)


JSON = st.recursive(st.none() | st.integers() | st.text(max_size=6), lambda inner: st.lists(inner, max_size=2), max_leaves=4)


@settings(max_examples=100, deadline=None)
@given(arguments=st.dictionaries(st.text(max_size=6), JSON, max_size=4), step=st.integers(1, 9))
def test_arguments_come_through_unchanged(arguments: dict, step: int) -> None:
    body = json.dumps(arguments)
    text = f'<tool_call>\n{{"name": "f", "arguments": {body}}}\n</tool_call>'
    assert split(HERMES, text, step) == ("", [("f", body)])


def test_formats_are_known_by_their_templates() -> None:
    assert tool_format_of("… <tool_call> …") is HERMES
    assert tool_format_of('… {"name": function name, "parameters": dictionary} <|python_tag|> …') is LLAMA3
    assert tool_format_of("… [TOOL_CALLS] …") is MISTRAL
    assert tool_format_of("") is HERMES


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL])
@pytest.mark.parametrize("one_call", [False, True])
def test_a_forced_call_has_a_grammar(form: ToolFormat, one_call: bool) -> None:
    assert form.grammar([Function(name="f"), Function(name="g", parameters={"properties": {}})], one_call=one_call)


WEATHER = Function(
    name="weather",
    strict=True,
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
NOTE = Function(name="note", parameters={"type": "object", "properties": {"text": {"type": "string"}}})


@cache
def byte_tokenizer() -> tuple[Tokenizer, LLTokenizer]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate([*alphabet, "<end>"])}, []))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, LLTokenizer(tokenizer.to_str(), eos_token=[len(alphabet)])


@cache
def strict_matcher(form: ToolFormat, one_call: bool) -> LLMatcher:
    grammar = form.strict_grammar([WEATHER, NOTE], one_call=one_call)
    return LLMatcher(byte_tokenizer()[1], grammar, log_level=0, limits=GRAMMAR_LIMITS)


def written(form: ToolFormat, text: str, *, one_call: bool = False) -> tuple[str, bool]:
    """Return how much of a text the grammar of strict tools allows, and whether the answer may end there."""
    tokenizer, _ = byte_tokenizer()
    matcher = strict_matcher(form, one_call).deep_copy()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return tokenizer.decode(ids[: matcher.try_consume_tokens(ids)]), matcher.is_accepting()


GOOD = '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}'
LLAMA_GOOD = GOOD.replace("arguments", "parameters")
NOTED = '{"name": "note", "arguments": {"anything": [1, null]}}'


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, ""),
        (HERMES, "Plain text, a < b, <tool, {braces} and é."),
        (HERMES, f"Let me see.\n<tool_call>\n{GOOD}\n</tool_call>"),
        (HERMES, f"<tool_call>{GOOD}</tool_call>\n<tool_call>\n{NOTED}\n</tool_call> Done."),
        (LLAMA3, LLAMA_GOOD),
        (LLAMA3, 'No call: {"name": 1}'),
        (LLAMA3, "<b>bold</b>"),
        (MISTRAL, f"[{GOOD}, {NOTED}]"),
        (MISTRAL, "Just text [1]."),
    ],
)
def test_strict_tools_leave_text_free_and_let_calls_through(form: ToolFormat, text: str) -> None:
    assert written(form, text) == (text, True)


@pytest.mark.parametrize(
    ("form", "text", "allowed"),
    [
        (HERMES, 'Hm <tool_call>\n{"name": "weather", "arguments": {"town"', '{"name": "weather", "arguments": {"'),
        (HERMES, 'Hm <tool_call>\n{"name": "weather", "arguments": {"city": 5', '"city": '),
        (HERMES, 'Hm <tool_call>\n{"name": "other"', '{"name": "'),
        (HERMES, f"Hm <tool_call>\n{GOOD}\nand more", "}}\n"),
        (HERMES, "<tool_call>\nwell", "<tool_call>\n"),
        (LLAMA3, ' \r\n{"name": "weather", "arguments": ', " \r\n"),
        (LLAMA3, '{"name": "weather", "parameters": {"city": "Oslo"}', '{"city": "Oslo"'),
        (LLAMA3, "<|python_tag|>{", "<"),
        (MISTRAL, '[{"name": "weather", "arguments": {"days"', '"arguments": {"'),
        (MISTRAL, "[TOOL_CALLS]", "["),
    ],
)
def test_strict_tools_allow_no_other_call(form: ToolFormat, text: str, allowed: str) -> None:
    got, complete = written(form, text)
    assert got != text and got.endswith(allowed)
    assert not complete or not got.strip()


def test_with_one_strict_call_the_answer_ends_after_it() -> None:
    text = f"Well: <tool_call>\n{GOOD}\n</tool_call>"
    assert written(HERMES, text + " and", one_call=True) == (text, True)
    assert written(MISTRAL, f"[{GOOD}, ", one_call=True) == (f"[{GOOD}", False)


CALLS = [GOOD, LLAMA_GOOD, NOTED, '{"name": "weather", "arguments": ', '{"city": "x", "days": 7}', "</tool_call>", "]"]
PIECES = st.sampled_from(CALLS) | st.sampled_from([*SCRAPS, "\n", "<|python_tag|>", '"note"'])


@settings(max_examples=200, deadline=None)
@given(
    form=st.sampled_from([HERMES, LLAMA3, MISTRAL]),
    one_call=st.booleans(),
    opening=st.sampled_from(["", "Well ", f"<tool_call>{GOOD}</tool_call>", f"[{GOOD}", LLAMA_GOOD]),
    pieces=st.lists(PIECES, max_size=16),
)
def test_whatever_is_written_strict_calls_are_valid(
    form: ToolFormat, one_call: bool, opening: str, pieces: list[str]
) -> None:
    """Of each piece as much is written as the grammar allows; what the parser finds in the end must fit the tools."""
    text = ""
    for piece in (opening, *pieces):
        text = written(form, text + piece, one_call=one_call)[0]
    if not written(form, text, one_call=one_call)[1]:
        return
    for name, arguments in split(form, text, 5)[1]:
        assert name in ("weather", "note")
        schema = WEATHER.parameters if name == "weather" else {"type": "object"}
        Draft202012Validator(schema).validate(json.loads(arguments))


@pytest.mark.parametrize("arguments", ["[" * 9999, "[" * 960 + "]" * 960, '"\\ud800"', "9" * 9999, "{x"])
@pytest.mark.parametrize("native", [False, True])
def test_arguments_that_no_template_can_take_as_an_object_stay_text(arguments: str, native: bool) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    message = ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]})
    (told,) = template_messages([message], [], template_knows_tools=native)
    if native:
        assert told["tool_calls"][0]["function"]["arguments"] == arguments
    json.dumps(told).encode()


def test_a_template_that_knows_no_tools_is_told_in_words() -> None:
    messages = [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage.model_validate(
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            }
        ),
        ChatMessage(role="tool", tool_call_id="1", content="42"),
    ]
    told = template_messages(messages, [Function(name="f", description="Adds.")], template_knows_tools=False)
    assert [turn["role"] for turn in told] == ["system", "assistant", "user"]
    assert told[0]["content"].startswith("Be brief.") and '"description": "Adds."' in told[0]["content"]
    assert told[1]["content"] == '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert told[2]["content"] == "<tool_response>\n42\n</tool_response>"


def test_grammars_are_refused_in_words() -> None:
    nested: dict = {"type": "string"}
    for _ in range(500):
        nested = {"type": "array", "items": nested}
    for make in (
        lambda: json_grammar({"type": "wizard"}),
        lambda: json_grammar({"type": "string", "format": "wizardry"}),
        lambda: json_grammar(nested),
        lambda: json_grammar({"enum": ["x" * 100_000]}),
        lambda: regex_grammar("("),
        lambda: regex_grammar("(?=a)b"),
        lambda: lark_grammar("start: nothing"),
    ):
        with pytest.raises(GrammarError) as caught:
            make()
        assert 0 < len(str(caught.value)) <= 300 and "\n" not in str(caught.value)
    assert json_grammar({"$ref": "#"}) and choice_grammar(['"quoted"', "\\", "é"])


@pytest.mark.parametrize("failure", [GrammarError("no end"), UnsupportedModel("no tokenizer"), ValueError("a bug")])
def test_whatever_a_grammar_fails_with_its_sequence_gets_an_end(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_queue: GrammarQueue) -> None:
        raise failure

    monkeypatch.setattr(GrammarQueue, "_make_compiler", fail)
    settings = EngineSettings("file:///m", {}, device="cpu")
    message = AddSequence(7, [1], SamplingParams(grammar="any"), 0.0)
    with zmq.Context() as context, context.socket(zmq.PULL) as inbox:
        inbox.bind("inproc://grammars")
        queue = GrammarQueue(settings, (0,), context)
        queue.put(message)
        assert inbox.poll(PATIENCE * 1000), "the loop isn't woken"
        (taken,) = queue.take()
        queue._thread.submit(queue._wake.close).result()
    assert taken[0] == message
    assert isinstance(taken[1], GrammarError)
