"""Chats, tools and structured output through the official client, under each strategy."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import openai
import pytest
from conformance_kit import Served

ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Look at the sky.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Paris", "Zürich", "東京"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
HOT = {"model": "tiny", "temperature": 1.5, "max_tokens": 160}


def test_chat_whole_and_streamed_are_the_same(client: openai.OpenAI) -> None:
    how = {
        "model": "tiny",
        "messages": ASK,
        "max_completion_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**how).choices[0]
    assert whole.message.role == "assistant"
    assert whole.finish_reason in ("length", "stop")
    chunks = [c.choices[0] for c in client.chat.completions.create(**how, stream=True)]
    assert chunks[0].delta.role == "assistant"
    assert "".join(c.delta.content or "" for c in chunks) == whole.message.content
    assert [c.finish_reason for c in chunks if c.finish_reason] == [whole.finish_reason]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    streamed = [entry for c in chunks if c.logprobs for entry in c.logprobs.content or ()]
    assert [e.token for e in streamed] == [e.token for e in whole.logprobs.content]
    for entry in whole.logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=2e-3)
    spelled = b"".join(bytes(entry.bytes or ()) for entry in whole.logprobs.content)
    assert spelled.decode(errors="replace") == whole.message.content


def test_choices_differ_and_share_one_prompt(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**HOT, messages=ASK, n=3, seed=1)
    assert len({c.message.content for c in answer.choices}) == 3
    assert [c.index for c in answer.choices] == [0, 1, 2]


@pytest.mark.parametrize("seed", range(3))
def test_json_schema_is_followed(client: openai.OpenAI, seed: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = client.chat.completions.create(**HOT, messages=ASK, seed=seed, response_format=form)
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), PERSON)
    assert answer.choices[0].finish_reason == "stop"


def test_json_object_is_one_as_far_as_it_goes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**HOT, messages=ASK, seed=2, response_format={"type": "json_object"})
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_a_recursive_schema_is_followed(client: openai.OpenAI) -> None:
    node = {
        "type": "object",
        "properties": {"v": {"enum": [1]}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    }
    node |= {"required": ["v", "next"], "additionalProperties": False}
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    form = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
    answer = client.chat.completions.create(**HOT, messages=ASK, seed=3, response_format=form)
    if answer.choices[0].finish_reason == "stop":
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)
    else:
        assert (answer.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("extra", "allowed"),
    [
        ({"structured_outputs": {"choice": ["yes", "no", "möglich"]}}, {"yes", "no", "möglich"}),
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"guided_regex": "[ab]{2}c"}, {"aac", "abc", "bac", "bbc"}),
        ({"structured_outputs": {"grammar": 'start: "x" | "yz"'}}, {"x", "yz"}),
        ({"guided_json": {"enum": [1, "two"]}}, {"1", '"two"'}),
    ],
)
def test_vllms_ways_to_guide(client: openai.OpenAI, extra: dict, allowed: set[str]) -> None:
    answer = client.chat.completions.create(**HOT, messages=ASK, n=4, extra_body=extra)
    assert {c.message.content for c in answer.choices} <= allowed
    assert {c.finish_reason for c in answer.choices} == {"stop"}
    completion = client.completions.create(model="tiny", prompt="x", max_tokens=30, n=2, extra_body=extra)
    assert {c.text for c in completion.choices} <= allowed


async def test_many_grammars_at_once(async_client: openai.AsyncOpenAI) -> None:
    """In one batch, with preemptions, beside sequences without any."""

    async def ask(index: int) -> str | None:
        if index % 4 == 3:
            free = await async_client.chat.completions.create(model="tiny", messages=ASK, max_tokens=40)
            return free.choices[0].message.content
        word = f"answer number {index} of a crowd"
        extra = {"structured_outputs": {"regex": f"({word}){{3}}"}}
        answer = await async_client.chat.completions.create(**HOT, messages=ASK, extra_body=extra)
        assert answer.choices[0].message.content == word * 3
        return None

    await asyncio.gather(*(ask(i) for i in range(12)))


def check_calls(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        assert name in ("get_weather", "get_time")
        if name == "get_weather":
            jsonschema.validate(json.loads(arguments), WEATHER["function"]["parameters"])
        else:
            assert json.loads(arguments) == {}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_forced_tool_calls(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    how = {**HOT, "messages": ASK, "tools": [WEATHER, CLOCK], "tool_choice": choice, "seed": 5, "max_tokens": 200}
    if stream:
        calls, reason = streamed_calls(client.chat.completions.create(**how, stream=True))
    else:
        answer = client.chat.completions.create(**how).choices[0]
        assert answer.message.content is None
        assert all(call.id and call.type == "function" for call in answer.message.tool_calls or ())
        calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or ()]
        reason = answer.finish_reason
    assert calls
    if reason != "length":  # a random model goes on with calls as long as it may
        assert reason == "tool_calls"
        check_calls(calls)
    if choice != "required":
        assert [name for name, _ in calls] == ["get_weather"]


def streamed_calls(stream: Any) -> tuple[list[tuple[str, str]], str | None]:
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    parts, reason = 0, None
    for chunk in stream:
        reason = chunk.choices[0].finish_reason or reason
        assert not chunk.choices[0].delta.content
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.id:
                names[call.index] = call.function.name
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
            parts += 1
    assert parts > 2 * len(names)  # arguments came bit by bit
    return [(names[i], arguments[i]) for i in sorted(names)], reason


def test_one_call_without_parallel_ones(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        **HOT, messages=ASK, tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False, n=3
    )
    for choice in answer.choices:
        assert len(choice.message.tool_calls or ()) == 1
        assert choice.finish_reason == "tool_calls"


def test_auto_calls_are_found_in_the_text(client: openai.OpenAI) -> None:
    """The model writes what a grammar makes it write, so that the parser meets a call in free text."""
    text = 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
    how = {**HOT, "messages": ASK, "tools": [WEATHER], "extra_body": {"structured_outputs": {"choice": [text]}}}
    answer = client.chat.completions.create(**how).choices[0]
    assert answer.message.content == "Let me see."
    assert [json.loads(c.function.arguments) for c in answer.message.tool_calls or ()] == [{"city": "Paris", "days": 3}]
    assert answer.finish_reason == "tool_calls"
    plain = client.chat.completions.create(**{**how, "tool_choice": "none"}).choices[0]
    assert plain.message.content == text
    assert plain.finish_reason == "stop"


def test_a_chat_with_tool_results_goes_on(served: Served, client: openai.OpenAI) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris", "days": 3}'},
    }
    turns = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=turns, tools=[WEATHER], max_tokens=4)
    assert answer.usage is not None
    body = {"messages": turns, "tools": [WEATHER], "return_token_strs": True}
    tokens = served.runtime.http.post("/tokenize", json=body).json()
    assert tokens["count"] == answer.usage.prompt_tokens
    text = "".join(tokens["token_strs"])
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}</tool_call>' in text
    assert "<|im_start|>tool\nsunny" in text
