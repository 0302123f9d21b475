"""Turns a trace of lengths into prompts for a server, and asks the server what it serves and how it counts tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from paceline_cli.workload import SENTENCES, LoadRequest
from paceline_core.errors import FormatError
from paceline_sim import Trace, TraceRequest

__all__ = ["Server", "prompts_of"]

_PROBE_WORDS = 400  # long enough that a tokenizer's few special tokens don't matter
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """An OpenAI-compatible server, asked once: the model it serves, and its tokens per word of our prompts."""

    url: str
    model: str
    tokens_per_word: float

    @classmethod
    def ask(cls, url: str, model: str | None, api_key: str | None) -> Server:
        """Ask the server at `url` (its root). Raises `FormatError` that says what it answered."""
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            with httpx.Client(base_url=url, headers=headers, timeout=_PROBE_TIMEOUT_S, trust_env=False) as client:
                name = model or _first_model(client)
                return cls(url, name, _tokens_per_word(client, name))
        except httpx.InvalidURL as error:
            raise FormatError(f"{url} is no address: {error}") from None
        except httpx.HTTPError as error:
            raise FormatError(f"{url} can't be asked: {error or type(error).__name__}") from None


def _first_model(client: httpx.Client) -> str:
    models = _answer(client.get("/v1/models")).get("data")
    if not (isinstance(models, list) and models and isinstance(models[0], dict) and "id" in models[0]):
        raise FormatError("the server names no model: give --model")
    return str(models[0]["id"])


def _tokens_per_word(client: httpx.Client, model: str) -> float:
    prompt = " ".join(word for word, _ in zip(_words(random.Random(0)), range(_PROBE_WORDS), strict=False))  # noqa: S311
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    usage = _answer(client.post("/v1/completions", json=body)).get("usage")
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if not isinstance(tokens, int) or tokens < 1:
        raise FormatError("the server's answer has no usage.prompt_tokens, which the lengths of prompts are made by")
    return float(tokens) / _PROBE_WORDS


def _answer(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON of a good answer. Raises `FormatError` for another."""
    if response.status_code != httpx.codes.OK:
        raise FormatError(f"{response.request.url} answered {response.status_code}: {response.text[:200]}")
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise FormatError(f"{response.request.url} answered no JSON object")
    return answer


def prompts_of(trace: Trace, tokens_per_word: float, seed: int) -> tuple[LoadRequest, ...]:
    """Return a request per request of the trace: its time, about so many prompt tokens of English, its output length.

    Requests that share a prefix in the trace begin with the same words.
    """
    return tuple(
        LoadRequest(_prompt(request, tokens_per_word, seed + index), request.output_len, request.arrival)
        for index, request in enumerate(trace.requests)
    )


def _prompt(request: TraceRequest, tokens_per_word: float, seed: int) -> str:
    words = max(1, round(request.prompt_len / tokens_per_word))
    shared = 0
    if request.prefix_hashes and request.hash_tokens:
        shared = min(words, round(len(request.prefix_hashes) * request.hash_tokens / tokens_per_word))
    common = _take(shared, request.prefix_hashes[0]) if shared else []
    return " ".join(common + _take(words - shared, seed))


def _take(count: int, seed: int) -> list[str]:
    words = _words(random.Random(seed))  # noqa: S311  # prompts, not secrets
    return [next(words) for _ in range(count)]


def _words(rng: random.Random) -> Iterator[str]:
    """Yield the words of sentences in random order, without end. A number begins, so that no two texts share a prefix."""
    yield str(rng.randrange(10**6))
    while True:
        yield from rng.choice(SENTENCES).split()
