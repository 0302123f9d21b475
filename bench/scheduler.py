"""What a step costs in the scheduler: `schedule` and `complete` of many running sequences, in processor time.

`decode`: everybody decodes. `mixed`: with each step some sequences end and as many prompts come in their place.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.machine import machine

from paceline_core.knobs import Knobs
from paceline_core.plan import StepResult
from paceline_core.request import Request
from paceline_core.scheduler import Scheduler

RESULTS = Path(__file__).parent / "results"
LIMITS = {64: 150e-6, 1024: 2.5e-3}  # seconds of a step
PROMPT, WARM_UP = 64, 10
TURNOVER = 64  # in mixed steps one sequence of so many ends and another comes: outputs of 64 tokens on average


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds per step of some `sequences`: the mean of the best round, and of single steps the 95th percentile."""

    sequences: int
    load: str
    schedule: float
    complete: float
    p95: float

    @property
    def total(self) -> float:
        return self.schedule + self.complete


class Load:
    """A scheduler with `sequences` slots, kept full."""

    def __init__(self, sequences: int, *, mixed: bool) -> None:
        knobs = Knobs(max_num_seqs=sequences, max_num_seqs_limit=max(256, sequences))
        self._scheduler = Scheduler(knobs, num_blocks=sequences * 64, max_model_len=1000)
        self._mixed, self._now, self._next = mixed, 0.0, 0
        for _ in range(sequences):
            self._add()
        for _ in range(WARM_UP + sequences * PROMPT // knobs.max_num_batched_tokens):
            self.step()

    def _add(self) -> None:
        # ends are spread evenly, so that every mixed step has as many of them
        output = 1 + self._next % TURNOVER * 2 if self._mixed else 900
        tokens = [self._next % 1000 + 1] * PROMPT  # no two beside each other share a prefix
        self._scheduler.add(Request(self._next, PROMPT, output, arrival=self._now, tokens=tokens), self._now)
        self._next += 1

    def step(self) -> tuple[float, float]:
        """Do one step and return the processor seconds of planning it and of taking its result."""
        began = time.process_time()
        plan = self._scheduler.schedule(self._now)
        planned = time.process_time() - began
        assert plan is not None, "everybody has work"
        self._now += 0.01
        result = StepResult({entry.seq_id: (5,) for entry in plan.scheduled if entry.samples}, 0.01)
        began = time.process_time()
        self._scheduler.complete(plan, result, self._now)
        ended = self._scheduler.take_ended()
        completed = time.process_time() - began
        for _ in ended:  # what ends is followed by another, which is planned with the next step
            self._add()
        return planned, completed


def measure(sequences: int, *, mixed: bool, steps: int, rounds: int) -> Cost:
    """Return the cost of a step; the best round is the one that nothing else on the machine disturbed."""
    costs = []
    for _ in range(rounds):
        load = Load(sequences, mixed=mixed)
        taken = [load.step() for _ in range(steps)]
        p95 = statistics.quantiles([a + b for a, b in taken], n=20)[-1]
        schedule, complete = (statistics.fmean(part) for part in zip(*taken, strict=True))
        costs.append(Cost(sequences, "mixed" if mixed else "decode", schedule, complete, p95))
    return min(costs, key=lambda cost: cost.total)


def page(costs: Sequence[Cost]) -> str:
    """Return the table."""
    rows = (
        f"| {c.sequences} | {c.load} | {1e6 * c.schedule:.0f} | {1e6 * c.complete:.0f} | {1e6 * c.total:.0f} "
        f"| {1e6 * c.p95:.0f} | {1e6 * LIMITS[c.sequences]:.0f} |"
        for c in costs
    )
    return "\n".join([
        "# What a step costs in the scheduler", "",
        f"Machine: {machine()}. Processor time, µs per step; prefix caching on, prompts of {PROMPT} tokens.", "",
        "| running | load | schedule | complete | together | p95 | limit |", "|---:|---|---:|---:|---:|---:|---:|",
        *rows, "", "Again: `python -m bench.scheduler`.", "",
    ])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler", description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    costs = [
        measure(sequences, mixed=mixed, steps=options.steps, rounds=options.rounds)
        for sequences in LIMITS
        for mixed in (False, True)
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    text = page(costs)
    (options.out / "scheduler.md").write_text(text, encoding="utf-8")
    document = {"machine": machine(), "seconds": [asdict(cost) for cost in costs]}
    (options.out / "scheduler.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(text)
    return 1 if any(cost.total > LIMITS[cost.sequences] for cost in costs) else 0


if __name__ == "__main__":
    sys.exit(main())
