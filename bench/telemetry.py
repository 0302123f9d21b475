"""What it costs to know: causes and the timeline, in processor time per engine step of many sequences."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.machine import machine

from paceline_core.causes import Causes
from paceline_core.plan import ScheduledSequence, StepPlan, StepShape
from paceline_core.step_time import StepModel
from paceline_core.wire import Gauges
from paceline_runtime.engine import Turn
from paceline_runtime.engine_reports import members_of, statistics_of
from paceline_runtime.messages import StepOutput, decode_from_engine, encode
from paceline_runtime.timeline import Timeline

RESULTS = Path(__file__).parent / "results"
STEP = 0.01  # seconds: a quick step of a batch this wide, on a large GPU
LIMIT = 0.01  # of a step
ROUNDS = 5


def per_call(action: Callable[[], object], calls: int) -> float:
    """Return the processor seconds of a call, the least of some rounds."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(calls):
            action()
        rounds.append((time.process_time() - began) / calls)
    return min(rounds)


def decode_plan(sequences: int) -> StepPlan:
    entries = tuple(ScheduledSequence(number, 100, 1, (0,), samples=True) for number in range(sequences))
    return StepPlan(0, 0, entries, StepShape(sequences, 0, 100 * sequences, 0))


def message_cost(sequences: int, calls: int, *, timeline: bool) -> float:
    """Return what telling the API process of a step costs both of them together."""
    turn = Turn(dict.fromkeys(range(sequences), (5,)), [], decode_plan(sequences), STEP)
    ring = Timeline()

    def tell() -> None:
        members = members_of(turn) if timeline else None
        output = decode_from_engine(
            encode(StepOutput(dict(turn.tokens), [], Gauges(), statistics_of(turn), {}, {}, members))
        )
        assert isinstance(output, StepOutput)
        if output.members is not None and output.step is not None:
            ring.add(output.step, output.members)

    return per_call(tell, calls)


def causes_cost(sequences: int, calls: int) -> float:
    """Return what following a step of decodes costs."""
    causes = Causes(StepModel(STEP, decode_tokens=1e-5), culprits=True)
    plan, now = decode_plan(sequences), 0.0

    def follow() -> None:
        nonlocal now
        causes.planned(plan, now)
        causes.queue_waits(None, now)
        now += STEP
        causes.completed(plan, now, STEP * 0.99)

    return per_call(follow, calls)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.telemetry", description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    off = message_cost(options.sequences, options.calls, timeline=False)
    on = message_cost(options.sequences, options.calls, timeline=True)
    causes = causes_cost(options.sequences, options.calls)
    rows = {"causes": causes, "telling a step": off, "… with a timeline": on, "so the timeline": on - off}
    text = "\n".join([
        "# What it costs to know", "",
        f"Machine: {machine()}. Steps of {options.sequences} decodes; processor time, the least of {ROUNDS} rounds.", "",
        f"| | µs per step | % of a {1e3 * STEP:g} ms step |", "|---|---:|---:|",
        *(f"| {what} | {1e6 * seconds:.1f} | {100 * seconds / STEP:.2f} |" for what, seconds in rows.items()), "",
        "Again: `python -m bench.telemetry`.",
    ])  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "telemetry.md").write_text(text + "\n", encoding="utf-8")
    document = {"machine": machine(), "sequences": options.sequences, "seconds": rows}
    (options.out / "telemetry.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(text)
    return 1 if max(causes, on - off) > LIMIT * STEP else 0


if __name__ == "__main__":
    sys.exit(main())
