"""Sampling below HTTP: two steps in flight, every strategy, a scarce pool, offline, all give the same tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_chat_model import EOS, logprobs_of, save_chat_model

from paceline_core.knobs import Knobs, Strategy
from paceline_core.request import Request
from paceline_runtime import LLM, SamplingParams
from paceline_runtime.engine import Engine
from paceline_runtime.grammar import regex_grammar
from paceline_runtime.grammar_matcher import GrammarCompiler
from paceline_runtime.loader import LoadedModel, load_model
from paceline_runtime.tokenizer import load_tokenizer

PROMPT = "The quick brown fox waits in the queue"
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=2, repetition_penalty=1.3),
    SamplingParams(max_tokens=40, temperature=1.2, seed=1, ignore_eos=True, frequency_penalty=0.5, prompt_logprobs=0),
    SamplingParams(max_tokens=60, temperature=1.5, seed=2, grammar=regex_grammar("(yes|no|naïve, ){8}"), logprobs=0),
    SamplingParams(max_tokens=30, temperature=0.9, seed=3, min_tokens=20, logit_bias={EOS: 50}, presence_penalty=2),
    SamplingParams(max_tokens=1, temperature=0, pooling="mean"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-chat")
    save_chat_model(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[LoadedModel]:
    torch.set_num_threads(1)
    model = load_model(str(folder), num_blocks=28, max_num_seqs_limit=16, max_num_batched_tokens=32)
    yield model
    model.runner.close()


def run(model: LoadedModel, folder: Path, *, depth: int, strategy: str, first: int) -> tuple[list, int]:
    """Return tokens, log-probabilities and prompt reports of three of each kind, and the preemptions."""
    knobs = Knobs(
        strategy=Strategy(strategy), max_num_seqs=15, max_num_seqs_limit=16, max_num_batched_tokens=32,
        static_flush=0.0, max_queue_delay=0.0,
    )  # fmt: skip
    engine = Engine(model, knobs, pipeline_depth=depth)
    compiler = GrammarCompiler(load_tokenizer(str(folder)), model.eos_token_ids)
    results: dict[int, list] = {}
    # short answers before, so that the scheduler expects short ones and lets more in than the pool will hold
    for index in range(40):
        engine.add(Request(first + 500 + index, 1, 1, 0.0, tokens=[2]), SamplingParams(max_tokens=1))
    engine.close_source()
    while engine.has_work:
        engine.turn()
    engine.reopen_source()
    for index in range(3 * len(PARAMS)):
        params, seq_id = PARAMS[index % len(PARAMS)], first + 600 + index
        prompt = prompt_of(folder, index)
        request = Request(
            seq_id, len(prompt), params.max_tokens, 0.0, tokens=prompt, min_tokens=params.min_tokens,
            stop_token_ids=frozenset() if params.ignore_eos else frozenset({EOS}), read_cache=params.reads_cache,
        )  # fmt: skip
        engine.add(request, params, compiler.matcher(params.grammar) if params.grammar else None)
        results[seq_id] = [[], [], None]
    engine.close_source()
    ended = 0
    while ended < len(results):
        turn = engine.turn()
        ended += len(turn.ended)
        for seq_id, tokens in turn.tokens.items():
            results[seq_id][0] += tokens
            results[seq_id][1] += [entry.chosen for entry in turn.logprobs.get(seq_id, ())]
            results[seq_id][2] = turn.prompts.get(seq_id) or results[seq_id][2]
    return list(results.values()), engine.gauges().preemptions


def prompt_of(folder: Path, index: int) -> list[int]:
    return load_tokenizer(str(folder)).encode(f"{index // len(PARAMS)} {PROMPT} " * 2)


def test_every_way_of_batching_gives_the_same(model: LoadedModel, folder: Path) -> None:
    wanted, _ = run(model, folder, depth=1, strategy="continuous", first=0)
    preempted = 0
    for number, (strategy, depth) in enumerate(
        [("continuous", 2), ("iteration", 2), ("static", 2), ("dynamic", 2), ("static", 1), ("iteration", 1)], start=1
    ):
        found, preemptions = run(model, folder, depth=depth, strategy=strategy, first=1000 * number)
        preempted += preemptions
        for (tokens, logprobs, report), (same_tokens, same_logprobs, same_report) in zip(wanted, found, strict=True):
            assert same_tokens == tokens
            assert same_logprobs == pytest.approx(logprobs, abs=2e-3)
            assert (report is None) == (same_report is None)
            if report is not None and report.logprobs:
                expected = [entry.chosen for entry in report.logprobs]
                assert [entry.chosen for entry in same_report.logprobs] == pytest.approx(expected, abs=2e-3)
    assert preempted > 0


def test_grammars_and_reports_offline(folder: Path) -> None:
    with LLM(str(folder), max_num_seqs=4, threads=1) as llm:
        results = llm.generate([PROMPT] * len(PARAMS), PARAMS)
        assert re.fullmatch("(yes|no|naïve, ){8}", results[2].text)
        assert results[2].finish_reason == "stop"
        assert len(results[3].token_ids) == 21  # end-of-text is banned for 20 tokens, and then the bias has its way
        assert len(results[0].logprobs) == 40 and len(results[0].logprobs[0].top) == 2
        assert len(results[1].prompt.logprobs) == len(results[1].prompt_token_ids) - 1
        assert len(results[4].prompt.embedding) == 4 * 64


def test_prompt_logprobs_match_transformers(folder: Path, model: LoadedModel) -> None:
    from transformers import LlamaForCausalLM

    with LLM(str(folder), max_num_seqs=4, threads=1) as llm:
        result = llm.generate(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=2))[0]
    ids = list(result.prompt_token_ids)
    expected = logprobs_of(LlamaForCausalLM.from_pretrained(folder), ids)
    for index, entry in enumerate(result.prompt.logprobs):
        assert entry.chosen == pytest.approx(float(expected[index, ids[index + 1]]), abs=2e-3)
        assert [value for _, value in entry.top] == pytest.approx(expected[index].topk(2).values.tolist(), abs=2e-3)
