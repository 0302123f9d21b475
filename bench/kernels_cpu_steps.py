"""Whole steps of a decoder on a CPU, native and torch's, alone and beside a process that keeps a core busy."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from bench.machine import busy_process

from paceline_kernels import AttentionPlanner, RowSampling, SequenceSpan, sample, use_kernels
from paceline_runtime.decoder import Decoder
from paceline_runtime.kv_pool import KvPool
from paceline_runtime.model_files import locate_model
from paceline_runtime.open_model import open_model

BATCHES = (1, 16, 32)
CONTEXT, PROMPT, BLOCK = 256, 2048, 16
FORM_SECONDS = 3.0  # of a form's decodes of one batch size, and of its prompts
BUSY_STEPS = 6  # the first one is dropped; torch beside a busy process takes seconds for one


@dataclass(frozen=True, slots=True)
class Form:
    """How a model is loaded."""

    name: str
    kernels: str = "native"
    dtype: torch.dtype = torch.float32
    quantization: str | None = None
    as_stored: bool = False


WHOLE = (Form("float32", "torch"), Form("float32"))
FORMS = (
    *WHOLE,
    Form("bfloat16", dtype=torch.bfloat16),
    Form("as stored (default)", as_stored=True),
    Form("int8", quantization="int8", as_stored=True),
    Form("int4", quantization="int4", as_stored=True),
)


@dataclass(slots=True)
class StepTime:
    """Median seconds of a decode step by its sequences, and the tokens per second of a prompt; `weights` in bytes."""

    form: str
    kernels: str
    weights: int
    decode: dict[int, float] = field(default_factory=dict)
    prefill: float = 0.0


@dataclass(frozen=True, slots=True)
class BusyTime:
    """Median seconds of a step, alone and beside a busy process."""

    kernels: str
    alone: float
    beside: float


class Stepper:
    """A model with a pool, for steps of a given shape."""

    def __init__(self, uri: str, form: Form) -> None:
        config, weights = open_model(locate_model(uri))
        self.kernels = form.kernels
        with use_kernels(self.kernels):
            self.decoder = Decoder(
                config,
                weights,
                dtype=form.dtype,
                device=torch.device("cpu"),
                quantization=form.quantization,
                as_stored=form.as_stored,
            )
        blocks = max(max(BATCHES) * -(-CONTEXT // BLOCK), -(-PROMPT // BLOCK))
        self._pool = KvPool(config, blocks, BLOCK, self.decoder.kv_dtype, self.decoder.device)
        for layer in self._pool.layers:
            layer.normal_()
        self._planner = AttentionPlanner(BLOCK, form.dtype, window=config.window, native=self.decoder.native)

    def step(self, sequences: int, start: int, tokens: int) -> float:
        """Return the seconds of one step of as many `sequences`, planning and the greedy choice included."""
        each = -(-(start + tokens) // BLOCK)
        spans = [SequenceSpan(start, tokens, list(range(i * each, (i + 1) * each))) for i in range(sequences)]
        ids = torch.arange(sequences * tokens) + 100
        last = torch.arange(1, sequences + 1) * tokens - 1
        began = time.perf_counter()
        with use_kernels(self.kernels):
            batch = self._planner.plan(spans)
            hidden = self.decoder.hidden(ids, batch, self._pool.layers)
            sample(self.decoder.logits(hidden, last), [RowSampling(0.0)] * sequences)
        return time.perf_counter() - began


def time_steps(uri: str, threads: int, rounds: int, told: Callable[[str], None]) -> list[StepTime]:
    """Time every form in turn, round by round, and tell what is done; a form that has had its seconds sits out."""
    steppers = {}
    for form in FORMS:
        told(f"loading {form.name}, {form.kernels}")
        steppers[form] = Stepper(uri, form)
    times = {form: StepTime(form.name, form.kernels, s.decoder.weight_bytes) for form, s in steppers.items()}
    decodes: dict[tuple[Form, int], list[float]] = {(form, size): [] for form in FORMS for size in BATCHES}
    prompts: dict[Form, list[float]] = {form: [] for form in FORMS}
    for number in range(rounds):
        for form, stepper in steppers.items():
            told(f"decodes and a prompt of {form.name}, {form.kernels}, round {number + 1}")
            with torch_threads(threads if stepper.kernels == "torch" else 1):
                for size in BATCHES:
                    if sum(decodes[form, size]) < FORM_SECONDS:
                        decodes[form, size] += [stepper.step(size, CONTEXT - 1, 1) for _ in range(4)][1:]
                if sum(prompts[form]) < FORM_SECONDS:
                    prompts[form].append(stepper.step(1, 0, PROMPT))
    for form, found in times.items():
        found.decode = {size: statistics.median(decodes[form, size]) for size in BATCHES}
        found.prefill = PROMPT / min(prompts[form])
    return list(times.values())


def time_beside_busy(uri: str, threads: int) -> list[BusyTime]:
    """Time a decode step of 16 sequences in float32 alone and beside a process that keeps the first core busy."""
    found = []
    for form in WHOLE:
        stepper = Stepper(uri, form)
        with torch_threads(threads if stepper.kernels == "torch" else 1):
            alone = _median_step(stepper)
            with busy_process(min(os.sched_getaffinity(0))):
                found.append(BusyTime(stepper.kernels, alone, _median_step(stepper)))
    return found


def _median_step(stepper: Stepper) -> float:
    return statistics.median([stepper.step(16, CONTEXT - 1, 1) for _ in range(BUSY_STEPS)][1:])


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads within."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
