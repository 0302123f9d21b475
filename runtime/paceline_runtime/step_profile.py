"""A short profile at start: a few real steps that warm the device up and seed the step-time model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from paceline_core.knobs import Knobs, Strategy
from paceline_core.plan import StepPlan, StepShape
from paceline_core.request import Request
from paceline_core.step_time import StepTimeFitter
from paceline_runtime.engine import Engine, ModelBackend
from paceline_runtime.logs import log_event
from paceline_runtime.sampling_params import SamplingParams

__all__ = ["profile_steps"]

# Prompts of different lengths, then decodes of 1 to 4 sequences: enough to tell the constant, prefill and decode apart.
# 0.7 s for SmolLM2-135M on two cores.
PROMPT_LENGTHS = (8, 96, 32, 64)
NEW_TOKENS = (4, 8, 12, 16)
# Then a batch at once: the tuner never goes beyond twice the batch that the model has seen, and a service that starts with
# few slots would stay there. Five more steps.
BATCH, BATCH_PROMPT, BATCH_NEW = 28, 8, 4
# A slow or busy machine stops early, after whole steps: a rough model that the first requests refine beats a pod that is
# ready later. The step that runs is finished, so it may take longer by one.
MAX_SECONDS = 2.0


def profile_steps(
    backend: ModelBackend, knobs: Knobs, fitter: StepTimeFitter, now: Callable[[], float] = time.monotonic
) -> None:
    """Run the profile on `backend` and give its steps to `fitter`; leaves no sequence behind."""
    began = now()
    # one sequence's prompt per step, so that prefills of several sizes are seen
    slots = {"maxNumSeqs": knobs.max_num_seqs_limit, "maxNumBatchedTokens": max(2048, knobs.max_num_seqs_limit)}
    profile_knobs = knobs.updated({"strategy": Strategy.CONTINUOUS, "prefixCaching": False, **slots})
    engine = Engine(backend, profile_knobs, fitter=fitter)
    ids = []
    for request in _requests(backend, knobs, began):
        engine.add(request, SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True))
        ids.append(request.seq_id)
        if request.seq_id >= -len(PROMPT_LENGTHS):
            engine.turn()
        if now() - began > MAX_SECONDS:
            break
    while engine.has_work and now() - began <= MAX_SECONDS:
        engine.turn()
    for seq_id in ids:
        engine.abort(seq_id)
    backend.runner.submit(StepPlan(-1, 0, (), StepShape(), removed=tuple(ids)))
    backend.runner.collect()
    log_event("profiled", steps=engine.steps, seconds=now() - began)


def _requests(backend: ModelBackend, knobs: Knobs, arrival: float) -> Iterator[Request]:
    """Yield the profile's requests, those that fit."""
    batch = [(BATCH_PROMPT, BATCH_NEW)] * min(BATCH, knobs.max_num_seqs_limit)
    for number, (length, new) in enumerate([*zip(PROMPT_LENGTHS, NEW_TOKENS, strict=True), *batch]):
        if length + new > min(backend.max_model_len, backend.num_blocks * knobs.block_size):
            continue
        tokens = [(number + i) % min(256, backend.vocab_size) for i in range(length)]
        # the server's own ids start at 1
        yield Request(seq_id=-1 - number, prompt_len=length, max_tokens=new, arrival=arrival, tokens=tokens)
