"""One run of bench.cpu: a contestant started, warmed, asked for W (and a stream, and a long prompt), and ended."""

from __future__ import annotations

import hashlib
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version as installed
from pathlib import Path

from bench.cpu_clients import Answer, ContestantFailed, free_port, start
from bench.cpu_contestants import OURS, Contestant
from bench.cpu_install import CACHE, MODEL
from bench.cpu_workload import TEXT, English, Workload, batch, cut, long_prompt, one_stream, warm_up
from bench.machine import busy_process

from paceline_runtime.tokenizer import load_tokenizer
from paceline_sim import read_trace

SPECIAL = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")  # some servers show them and some don't
SOLO_SLOTS = 16  # with so many, one stream and one long prompt are measured beside W


@dataclass(frozen=True, slots=True)
class Run:
    """What one run showed. Rates are tokens/s, times seconds; `texts` are digests of W's answers, in W's order.

    `stream` is the rate of one request's decoding alone, `prefill` that of one long prompt; None: not measured here.
    `busy`: another process kept one core busy meanwhile.
    """

    contestant: str
    version: str
    slots: int
    round: int
    busy: bool
    wall: float
    output_rate: float
    total_rate: float
    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float
    stream: float | None
    prefill: float | None
    peak_bytes: int
    texts: list[str]
    took: float

    @property
    def key(self) -> tuple[str, int, int, bool]:
        return self.contestant, self.slots, self.round, self.busy


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that a contestant is asked, in order."""

    warm_up: Workload
    batch: Workload
    streams: tuple[Workload, ...]
    prefills: tuple[Workload, ...]


class Bench:
    """Runs contestants on the work of a seed, or on a cut of the trace in a file instead of W."""

    def __init__(self, seed: int, trace: Path | None = None) -> None:
        self._tokenizer = load_tokenizer(MODEL)
        english = English(self._tokenizer.encode(TEXT.read_text(encoding="utf-8")), seed)
        self._solo_too = trace is None
        first = warm_up(english)  # the text is dealt out in this order, on which W's prompts depend
        asked = batch(english, seed) if trace is None else cut(english, read_trace(trace), trace.stem)
        self.work = Work(first, asked, *_solo_work(english))

    def run(self, contestant: Contestant, slots: int, number: int, *, busy: bool, told: Callable[[str], None]) -> Run:
        """Start it, ask it for everything, end it. Raises `ContestantFailed`."""
        began = time.monotonic()
        port = free_port()
        log = CACHE / f"run-{contestant.name.replace(' ', '-')}.log"
        told("starting")
        running = start(contestant.launch(slots, port), log, port, version_of(contestant))
        try:
            told("warming up")
            running.run(self.work.warm_up)
            told("the batch")
            if busy:
                with busy_process():
                    answers = running.run(self.work.batch)
            else:
                answers = running.run(self.work.batch)
            stream = prefill = None
            if slots == SOLO_SLOTS and not busy and self._solo_too:
                told("one stream, one long prompt")
                stream, prefill = self._solo(running.run)
            peak = running.peak_bytes()
        finally:
            running.close()
        taken = time.monotonic() - began
        return self._figures(contestant, running.version, slots, number, busy, answers, (stream, prefill), peak, taken)

    def _solo(self, run: Callable[[Workload], list[Answer]]) -> tuple[float, float]:
        """Return the rates of one stream's decoding and of one long prompt, the better of two each."""
        streams = [answer for work in self.work.streams for answer in run(work)]
        prefills = [work.prompt_tokens / answer.first for work in self.work.prefills for answer in run(work)]
        return max((a.tokens - 1) / (a.last - a.first) for a in streams), max(prefills)

    def _figures(
        self, contestant: Contestant, version: str, slots: int, number: int, busy: bool, answers: Sequence[Answer],
        solo: tuple[float | None, float | None], peak: int, took: float,
    ) -> Run:  # fmt: skip
        wall = max(answer.last for answer in answers)
        output = self.work.batch.output_tokens
        ttft = percentiles([answer.first for answer in answers])
        tpot = percentiles([(a.last - a.first) / (a.tokens - 1) for a in answers if a.tokens > 1])
        texts = [self._digest(answer.text) for answer in answers]
        total = output + self.work.batch.prompt_tokens
        return Run(
            contestant.name, version, slots, number, busy, wall, output / wall, total / wall, *ttft, *tpot, *solo, peak,
            texts, took,
        )  # fmt: skip

    def _digest(self, answer: str | list[int]) -> str:
        text = answer if isinstance(answer, str) else self._tokenizer.decode(answer, skip_special_tokens=False)
        for special in SPECIAL:
            text = text.replace(special, "")
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _solo_work(english: English) -> tuple[tuple[Workload, ...], tuple[Workload, ...]]:
    """Return two streams and two long prompts: all differ, or a cache would answer the second."""
    return tuple(one_stream(english) for _ in range(2)), tuple(long_prompt(english) for _ in range(2))


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 95th percentile."""
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return cuts[9], cuts[18]


def version_of(contestant: Contestant) -> str:
    """Return what is compared; a driver says it itself."""
    if contestant.peer == OURS:
        return f"paceline {installed('paceline')}"
    if contestant.launch(SOLO_SLOTS, 0).ready is None:
        return ""
    python = contestant.needs[0].parent / "python"
    code = f"import importlib.metadata as m; print(m.version({contestant.peer!r}))"
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    if found.returncode:
        raise ContestantFailed(f"{contestant.peer} isn't installed in {python.parent}")
    return f"{contestant.peer} {found.stdout.strip()}"
