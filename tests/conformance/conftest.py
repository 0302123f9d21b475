"""Servers with everything at once: prefix cache, small chunks, a scarce pool, speculation; each strategy in turn, with one
plan in flight and with two.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from functools import cache

import openai
import pytest
from conformance_kit import Served
from serving_process import RuntimeProcess
from tiny_chat_model import save_chat_model

STRATEGIES = ("continuous", "iteration", "static", "dynamic")
# Strategy, plans in flight, drafts. How many plans are in flight is fixed at start, so two servers take turns; two of the
# strategies differ most. With two plans a sequence's newest token is rarely known in time for drafts.
WAYS = (*((strategy, 1, 4) for strategy in STRATEGIES), ("continuous", 1, 0), ("iteration", 2, 0), ("static", 2, 4))
# 36 blocks of 16 hold five of a crowd's seven sequences; chunks of 24 tokens split every chat's prompt
TIGHT = (
    "--num-gpu-blocks-override", "36", "--max-num-batched-tokens", "24", "--max-num-seqs", "8",
    "--long-prefill-threshold", "16", "--static-flush", "5ms", "--max-queue-delay", "5ms",
)  # fmt: skip


@pytest.fixture(scope="session")
def tight_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Served]]:
    """Start the server of a pipeline depth, once."""
    folder = tmp_path_factory.mktemp("tiny-chat")
    model, tokenizer = save_chat_model(folder)
    plain = ("--model", str(folder), "--served-model-name", "tiny", "--device", "cpu", "--threads", "1")
    with ExitStack() as running:

        @cache
        def start(depth: int) -> Served:
            where = tmp_path_factory.mktemp("server")
            runtime = RuntimeProcess(where, [*plain, "--pipeline-depth", str(depth), *TIGHT])
            running.callback(runtime.close)
            return Served(runtime.wait_ready(), model, tokenizer)

        yield start


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: "-".join(map(str, way)))
def served(tight_server: Callable[[int], Served], request: pytest.FixtureRequest) -> Served:
    """The server of a pipeline depth, under one strategy, with or without drafts."""
    strategy, depth, drafts = request.param
    server = tight_server(depth)
    server.runtime.knobs(strategy=strategy, speculative=drafts)
    return server


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.runtime.url + "/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def async_client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=served.runtime.url + "/v1", api_key="unused", max_retries=0, timeout=60
    ) as client:
        yield client
