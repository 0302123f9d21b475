"""Completions through the official client, under each strategy with prefix cache, chunks and preemption at once."""

from __future__ import annotations

import asyncio
import math

import openai
import pytest
import torch
from conformance_kit import Served, bytes_named
from openai.types import CompletionChoice
from tiny_chat_model import EOS, logprobs_of

PROMPT = "The quick brown fox waits in the queue until the step has room for its tokens"
CLOSE = 2e-3  # float32 sums in another order, over three layers


def test_greedy_text_is_the_models_own(served: Served, client: openai.OpenAI) -> None:
    ids = served.ids(PROMPT)
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=3)
    choice = answer.choices[0]
    assert choice.logprobs is not None
    written = served.ids_of(choice.logprobs.tokens)
    expected = logprobs_of(served.model, ids + written)
    for index, values in enumerate(choice.logprobs.token_logprobs):
        row = expected[len(ids) - 1 + index]
        assert values == pytest.approx(float(row.max()), abs=CLOSE)
        top = sorted(choice.logprobs.top_logprobs[index].values(), reverse=True)
        assert top == pytest.approx(row.topk(3).values.tolist(), abs=CLOSE)
    assert choice.logprobs.text_offset[0] == 0


def test_echo_with_logprobs_scores_the_prompt(served: Served, client: openai.OpenAI) -> None:
    """As evaluation harnesses ask; twice, so that the second finds the prompt in the cache and must not use it."""
    ids = served.ids(PROMPT)
    expected = logprobs_of(served.model, ids)
    wanted = [None, *(float(expected[i, ids[i + 1]]) for i in range(len(ids) - 1))]
    for _ in range(2):
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
        choice, usage = answer.choices[0], answer.usage
        assert choice.text == PROMPT
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(wanted[1:], abs=CLOSE)
        assert choice.logprobs.text_offset == offsets_of(served, ids)
        assert "".join(choice.logprobs.tokens) == PROMPT
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), 0)


def offsets_of(served: Served, ids: list[int]) -> list[int]:
    return [len(served.tokenizer.decode(ids[:i])) for i in range(len(ids))]


def test_echo_goes_before_the_text_whole_and_streamed(client: openai.OpenAI) -> None:
    how = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 0}
    plain = client.completions.create(**how).choices[0]
    echoed = client.completions.create(**how, echo=True).choices[0]
    assert echoed.text == PROMPT + plain.text
    assert plain.logprobs is not None and echoed.logprobs is not None
    assert echoed.logprobs.token_logprobs[-len(plain.logprobs.tokens) :] == pytest.approx(
        plain.logprobs.token_logprobs, abs=CLOSE
    )
    chunks = [c.choices[0] for c in client.completions.create(**how, echo=True, stream=True)]
    assert "".join(c.text for c in chunks) == echoed.text
    assert [t for c in chunks if c.logprobs for t in c.logprobs.tokens] == echoed.logprobs.tokens
    assert [o for c in chunks if c.logprobs for o in c.logprobs.text_offset] == echoed.logprobs.text_offset


def test_logprobs_are_the_models_own_whatever_the_sampling(served: Served, client: openai.OpenAI) -> None:
    """Before temperature, penalties, bias and filters."""
    ids = served.ids(PROMPT)
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=5, temperature=1.4, top_p=0.5, seed=5, logprobs=1,
        presence_penalty=1.5, frequency_penalty=1, logit_bias={"70": 3, "90": -100},
        extra_body={"repetition_penalty": 1.3, "top_k": 20},
    )  # fmt: skip
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    written = served.ids_of(logprobs.tokens)
    expected = logprobs_of(served.model, ids + written)
    wanted = [float(expected[len(ids) - 1 + i, token]) for i, token in enumerate(written)]
    assert logprobs.token_logprobs == pytest.approx(wanted, abs=CLOSE)


def test_bias_forces_and_bans(served: Served, client: openai.OpenAI) -> None:
    token = served.ids("Paris")[0]
    forced = client.completions.create(model="tiny", prompt="x", max_tokens=4, logit_bias={str(token): 100})
    assert forced.choices[0].text == served.tokenizer.decode([token]) * 4
    plain = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1, temperature=0, logprobs=2)
    assert plain.choices[0].logprobs is not None
    first, second = plain.choices[0].logprobs.top_logprobs[0]
    banned = served.ids_of([first])[0]
    other = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1, temperature=0, logprobs=0, logit_bias={str(banned): -100}
    )
    assert other.choices[0].logprobs is not None
    assert other.choices[0].logprobs.tokens == [second]


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"extra_body": {"repetition_penalty": 5.0}}]
)
def test_penalties_match_their_formulas(served: Served, client: openai.OpenAI, penalty: dict) -> None:
    """Recomputed from `transformers`' logits, token by token, over an answer that repeats itself under a bias."""
    ids = served.ids(PROMPT)
    token = served.ids(" dog")[0]
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=10, temperature=0, logprobs=0, logit_bias={str(token): 4}, **penalty
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    written = served.ids_of(logprobs.tokens)
    with torch.no_grad():
        logits = served.model(torch.tensor([ids + written])).logits[0]
    for index, chosen in enumerate(written):
        row = logits[len(ids) - 1 + index].clone()
        row[token] += 4
        for seen in set(ids + written[:index]):
            count = written[:index].count(seen)
            factor = penalty.get("extra_body", {}).get("repetition_penalty", 1.0)
            row[seen] = row[seen] / factor if row[seen] > 0 else row[seen] * factor
            row[seen] -= penalty.get("frequency_penalty", 0) * count + penalty.get("presence_penalty", 0) * (count > 0)
        assert float(row[chosen]) == pytest.approx(float(row.max()), abs=CLOSE)


async def test_a_seed_gives_the_same_text_whatever_else_runs(async_client: openai.AsyncOpenAI) -> None:
    async def ask(seed: int | None, prompt: str = PROMPT, count: int = 16) -> str:
        answer = await async_client.completions.create(
            model="tiny", prompt=prompt, max_tokens=count, seed=seed, temperature=1.2, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].text

    alone = await ask(7)
    crowd = await asyncio.gather(*(ask(7) if i % 3 == 0 else ask(None, f"{i} " * 9, 30) for i in range(12)))
    assert set(crowd[::3]) == {alone}
    assert await ask(8) != alone
    both = await async_client.completions.create(model="tiny", prompt=PROMPT, max_tokens=16, seed=7, temperature=1.2, n=2)
    assert both.choices[0].text != both.choices[1].text


def test_crowded_answers_are_those_of_a_quiet_server(served: Served, client: openai.OpenAI) -> None:
    """More sequences than the pool holds: some are preempted and computed again, and none shows it."""

    def ask(prompts: list[str]) -> list[CompletionChoice]:
        answer = client.completions.create(
            model="tiny", prompt=prompts, max_tokens=80, temperature=0, logprobs=0, presence_penalty=1.0,
            extra_body={"ignore_eos": True, "repetition_penalty": 1.2},
        )  # fmt: skip
        return answer.choices

    # short answers before, so that the scheduler expects short ones and lets all of them in
    client.completions.create(model="tiny", prompt="x", max_tokens=1, n=64)
    prompts = [f"{index}: {PROMPT}" for index in range(7)]
    quiet = [ask([prompt])[0] for prompt in prompts]
    before = served.runtime.gauges()["preemptions"]
    for alone, crowded in zip(quiet, ask(prompts), strict=True):
        assert crowded.text == alone.text
        assert alone.logprobs is not None and crowded.logprobs is not None
        assert crowded.logprobs.token_logprobs == pytest.approx(alone.logprobs.token_logprobs, abs=CLOSE)
    # a static or dynamic batch may have begun with few of them on a busy machine
    if served.runtime.admin.get("/admin/knobs").json()["knobs"]["strategy"] in ("continuous", "iteration"):
        assert served.runtime.gauges()["preemptions"] > before


def test_stop_texts_and_ids(served: Served, client: openai.OpenAI) -> None:
    how = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 30,
        "temperature": 0,
        "logprobs": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**how).choices[0]
    assert whole.logprobs is not None
    stop = whole.text[10:15]
    for stream in (False, True):
        answer = client.completions.create(**how, stop=["never written", stop], stream=stream)
        choices = [c.choices[0] for c in answer] if stream else answer.choices
        text = "".join(c.text for c in choices)
        assert text == whole.text[: whole.text.index(stop)]
        assert choices[-1].finish_reason == "stop"
        told = [t for c in choices if c.logprobs for t in c.logprobs.tokens]
        assert told == whole.logprobs.tokens[: len(told)]
        begins = [o for c in choices if c.logprobs for o in c.logprobs.text_offset]
        assert all(offset < max(1, len(text)) for offset in begins)
    by_id = served.ids_of(whole.logprobs.tokens)[4]
    first = served.ids_of(whole.logprobs.tokens).index(by_id)
    body = {**how, "extra_body": {"ignore_eos": True, "stop_token_ids": [by_id]}}
    answer = client.completions.create(**body)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.tokens == whole.logprobs.tokens[:first]
    assert answer.usage.completion_tokens == first + 1


def test_min_tokens_and_ignore_eos(client: openai.OpenAI) -> None:
    bias = {str(EOS): 100}
    ended = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, logit_bias=bias)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
    assert ended.usage is not None and ended.usage.completion_tokens == 1
    later = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=9, logit_bias=bias, extra_body={"min_tokens": 4}
    )
    assert later.choices[0].finish_reason == "stop"
    assert later.usage is not None and later.usage.completion_tokens == 5
    never = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=9, logit_bias=bias, extra_body={"ignore_eos": True}
    )
    assert never.choices[0].finish_reason == "length"
    assert never.usage is not None and never.usage.completion_tokens == 9


def test_filters_leave_the_likely_tokens(served: Served, client: openai.OpenAI) -> None:
    expected = logprobs_of(served.model, served.ids(PROMPT))[-1]
    best = {int(i) for i in expected.topk(2).indices}
    likely = {i for i, value in enumerate(expected.tolist()) if value >= expected.max().item() + 2 * math.log(0.3)}
    for extra, allowed in (({"top_k": 2}, best), ({"min_p": 0.3}, likely)):
        answer = client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=1,
            n=12,
            temperature=2,
            logprobs=0,
            extra_body={**extra, "ignore_eos": True},
        )
        # the padding of the vocabulary has no bytes, but a random model likes it as well as anything
        names = {served.bytes_of(i) for i in allowed}
        assert {bytes_named(token) for c in answer.choices for token in c.logprobs.tokens} <= names


def test_prompts_as_text_ids_and_batches(served: Served, client: openai.OpenAI) -> None:
    ids, other = served.ids(PROMPT), served.ids("another one")
    texts = [
        [c.text for c in client.completions.create(model="tiny", prompt=prompt, max_tokens=5, temperature=0).choices]
        for prompt in (PROMPT, ids, [PROMPT, "another one"], [ids, other])
    ]
    assert texts[0] == texts[1] == texts[2][:1]
    assert texts[2] == texts[3]
    answer = client.completions.create(model="tiny", prompt=[PROMPT, "another one"], n=2, max_tokens=3)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids) + len(other)


def test_best_of_equal_to_n_changes_nothing(client: openai.OpenAI) -> None:
    assert len(client.completions.create(model="tiny", prompt="x", n=2, best_of=2, max_tokens=2).choices) == 2
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(model="tiny", prompt="x", n=2, best_of=3, max_tokens=2)


def test_usage_counts_cached_tokens(client: openai.OpenAI) -> None:
    prompt = "Once more: " + PROMPT
    for _ in range(2):
        stream = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=3, stream=True, stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        *chunks, last = stream
        assert all(chunk.usage is None for chunk in chunks)
        assert last.choices == []
        assert last.usage is not None and last.usage.completion_tokens == 3
    whole = client.completions.create(model="tiny", prompt=prompt, max_tokens=3)
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens >= 16


def test_utf8_is_never_split(client: openai.OpenAI) -> None:
    """A random model writes bytes that make no characters too; whole and streamed must be the same text."""
    how = {
        "model": "tiny",
        "prompt": "é 速",
        "max_tokens": 40,
        "seed": 4,
        "temperature": 2,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**how).choices[0].text
    chunks = [c.choices[0].text for c in client.completions.create(**how, stream=True)]
    assert "".join(chunks) == whole
