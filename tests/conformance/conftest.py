"""One server with everything at once: prefix cache, small chunks, a scarce pool; each strategy in turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from conformance_kit import Served
from serving_process import RuntimeProcess
from tiny_chat_model import save_chat_model

STRATEGIES = ("continuous", "iteration", "static", "dynamic")
# 36 blocks of 16 hold five of a crowd's seven sequences; chunks of 24 tokens split every chat's prompt
TIGHT = (
    "--num-gpu-blocks-override", "36", "--max-num-batched-tokens", "24", "--max-num-seqs", "8",
    "--long-prefill-threshold", "16", "--static-flush", "5ms", "--max-queue-delay", "5ms",
)  # fmt: skip


@pytest.fixture(scope="session")
def tight_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tiny-chat")
    model, tokenizer = save_chat_model(folder)
    runtime = RuntimeProcess(
        tmp_path_factory.mktemp("server"),
        ["--model", str(folder), "--served-model-name", "tiny", "--device", "cpu", "--threads", "1", *TIGHT],
    )
    try:
        yield Served(runtime.wait_ready(), model, tokenizer)
    finally:
        runtime.close()


@pytest.fixture(scope="module", params=STRATEGIES)
def served(tight_server: Served, request: pytest.FixtureRequest) -> Served:
    """The server, under one strategy."""
    tight_server.runtime.knobs(strategy=request.param)
    return tight_server


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
