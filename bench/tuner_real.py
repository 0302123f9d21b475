"""Does tuning work on the real engine? Two pods of SmolLM2-135M on CPU, one core each, that start with a single slot.

    python -m bench.tuner_real            # all that isn't done yet, at most nine minutes; repeat until it is
    python -m bench.tuner_real --report   # the table of what is done

Three rounds, in each of which a sweep of six fixed settings (vLLM's defaults among them) and a tuned run follow one another,
so that a slow hour of the machine meets all alike. All get the same rate, that is measured first: more than one slot a pod
serves, and enough less than eight do that the queue of the first half minute can be gone before goodput is judged. Finished
runs are kept in `--resume` (default bench/results/tuner_real.jsonl). Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean

from bench.machine import machine
from bench.tuner_pods import Run, Stack, kept, run

from paceline_cli.clock_service import Traffic
from paceline_cli.real_service import (
    REAL_OUTPUTS,
    REAL_TPOT,
    REAL_TTFT,
    REAL_WORDS,
    real_manifest,
    served_by,
)

RESULTS = Path(__file__).parent / "results"
ROUNDS, PODS = 3, 2
INTERVAL = 15.0
SETTLED = 5 * INTERVAL  # after which goodput is compared
TUNED_SECONDS, FIXED_SECONDS, FIXED_SETTLED = 110.0, 30.0, 12.0
# Of the way from what one slot a pod serves to what eight do. One slot is in force for the first 40 s, and what came too
# much until then has to be gone in the 35 s that are left until goodput is judged: at 0.4 it just wasn't
OVER, PROBES = 0.25, 32
OF_BEST, OF_BASELINE, MOST_CHANGES = 0.95, 0.98, 3
START, VLLM = {"maxNumSeqs": 1}, "vLLM's defaults"
SWEEP: Mapping[str, Mapping[str, int]] = {
    "1": START,
    "2": {"maxNumSeqs": 2},
    "4": {"maxNumSeqs": 4},
    "8": {"maxNumSeqs": 8},
    "8, budget 128": {"maxNumSeqs": 8, "maxNumBatchedTokens": 128},
    VLLM: {"maxNumSeqs": 256, "maxNumBatchedTokens": 8192},
}


def todo(path: Path) -> list[tuple[int, str]]:
    """Return rounds and settings that aren't done yet, in the order of the clock."""
    done = {(r.scenario, r.setting) for r in kept(path)}
    every = [(number, setting) for number in range(ROUNDS) for setting in (*SWEEP, "tuned")]
    return [(n, s) for n, s in every if (str(n), s) not in done]


def go(path: Path, runs: Sequence[tuple[int, str]], minutes: float) -> None:
    """Make the runs, as many as end within the time."""
    deadline = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="paceline-tuner-") as folder, Stack(Path(folder), INTERVAL) as stack:
        rate = next((r.rate for r in kept(path)), None) or measured_rate(stack)
        for number, setting in runs:
            tuned = setting == "tuned"
            seconds, judged = (TUNED_SECONDS, SETTLED) if tuned else (FIXED_SECONDS, FIXED_SETTLED)
            if time.monotonic() + seconds + 45 > deadline:
                return
            print(f"round {number + 1}, {setting}", file=sys.stderr, flush=True)
            name = f"real-{number}-{[*SWEEP, 'tuned'].index(setting)}"
            manifest = real_manifest(name, replicas=PODS, knobs=SWEEP.get(setting, START), mode="Auto" if tuned else "Off")
            done = run(
                stack, manifest,
                lambda fleet, n=number: Traffic(
                    fleet.url(), fleet.name, lambda _: rate, lambda _: REAL_WORDS, lambda _: REAL_OUTPUTS, seed=n,
                    slo=(REAL_TTFT, REAL_TPOT),
                ),
                scenario=str(number), setting=setting, seconds=seconds, judged=judged, rate=rate,
            )  # fmt: skip
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(done)) + "\n")


def measured_rate(stack: Stack) -> float:
    """Return a rate that is too much for one slot a pod, and leaves eight some room."""
    served = []
    for slots in (1, 8):
        fleet = stack.start(real_manifest(f"probe-{slots}", replicas=PODS, knobs={"maxNumSeqs": slots}, mode="Off"))
        try:
            served.append(served_by(fleet, clients=2 * PODS * slots, probes=8 * PODS * slots + PROBES))
        finally:
            stack.remove(fleet.name)
    slow, fast = served
    print(f"one slot a pod serves {slow:.1f} requests/s, eight {fast:.1f}", file=sys.stderr, flush=True)
    return slow + OVER * (fast - slow)


def shares(rows: Sequence[Run]) -> dict[str, list[float]]:
    """Return per setting the share within the objective of each round's judged part: all rounds have the same rate."""
    settings = (*SWEEP, "tuned")
    return {s: found for s in settings if (found := [r.attainment for r in rows if r.setting == s])}


def missed(rows: Sequence[Run]) -> list[str]:
    """Return the goals that were missed, in words."""
    found, texts = {s: mean(v) for s, v in shares(rows).items()}, []
    tuned = [r for r in rows if r.setting == "tuned"]
    if not tuned:
        return ["no tuned run was made"]
    best = max((value for s, value in found.items() if s != "tuned"), default=0.0)
    if found["tuned"] < OF_BEST * best:
        texts.append(f"{found['tuned'] / best:.1%} of the best fixed setting (goal {OF_BEST:.0%})")
    if found["tuned"] < OF_BASELINE * (baseline := found.get(VLLM, 0.0)):
        texts.append(f"{found['tuned'] / baseline:.1%} of {VLLM} (goal {OF_BASELINE:.0%})")
    failed, changes = sum(r.failed for r in tuned), max(r.changes for r in tuned)
    texts += [f"{failed} requests failed while knobs were tuned"] * bool(failed)
    texts += [f"{changes} changes (goal: at most {MOST_CHANGES})"] * (changes > MOST_CHANGES)
    return texts


def report(rows: Sequence[Run]) -> str:
    """Return the results as Markdown."""
    rate = max((r.rate for r in rows), default=0.0)
    lines = [
        "# The tuner on the real engine", "",
        f"**Real CPU engine** (setting ii): SmolLM2-135M-Instruct (Q4_1), {PODS} pods of one core under `paceline local`,",
        f"{rate:.1f} requests/s over HTTP (what one slot a pod serves and {OVER:.0%} of what eight serve beyond it,",
        f"measured before), prompts of {REAL_WORDS[0]} to {REAL_WORDS[1]} tokens, answers of",
        f"{REAL_OUTPUTS[0]} to {REAL_OUTPUTS[1]}; objective TTFT ≤ {REAL_TTFT:g} s, TPOT ≤ {REAL_TPOT * 1e3:g} ms; interval",
        f"{INTERVAL:g} s. Tuned runs start with `maxNumSeqs` 1 and are judged from 5 intervals on ({SETTLED:g} of",
        f"{TUNED_SECONDS:g} s), fixed ones from {FIXED_SETTLED:g} of {FIXED_SECONDS:g} s on. Rounds are interleaved.", "",
        f"Machine: {machine()}.", "",
        "| setting | share in time, each round | mean | requests | failed | changes | knobs at the end |",
        "|---|---|---:|---:|---:|---|---|",
    ]  # fmt: skip
    for setting, values in shares(rows).items():
        runs = [r for r in rows if r.setting == setting]
        lines.append(
            f"| {setting} | {' '.join(f'{v:.1%}' for v in values)} | {mean(values):.1%} | {sum(r.requests for r in runs)} | "
            f"{sum(r.failed for r in runs)} | {' '.join(str(r.changes) for r in runs)} | {' '.join(r.final for r in runs)} |"
        )
    failures = missed(rows)
    lines += ["", "Goals missed:" if failures else "No goal was missed.", *(f"- {text}" for text in failures)]
    told = [f"- round {int(r.scenario) + 1}, {r.setting}: {text}" for r in rows for text in r.errors]
    lines += ["", "## What failed requests were told", "", *told] * bool(told)
    for r in rows:
        if r.story:
            lines += ["", f"## Round {int(r.scenario) + 1}: what the status said", "", *(f"- {line}" for line in r.story)]
    return "\n".join([*lines, "", "Again: `python -m bench.tuner_real`, until all runs are done.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tuner_real", description="Tune pods of the real engine.")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no run that wouldn't end within them")
    parser.add_argument("--resume", type=Path, default=RESULTS / "tuner_real.jsonl")
    parser.add_argument("--report", action="store_true", help="run nothing, only write the results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.resume.parent.mkdir(parents=True, exist_ok=True)
    if (runs := todo(options.resume)) and not options.report:
        go(options.resume, runs, options.minutes)
    rows, left = kept(options.resume), todo(options.resume)
    print(f"{len(left)} runs left" if left else "all runs done", file=sys.stderr)
    options.out.mkdir(parents=True, exist_ok=True)
    text = report(rows)
    (options.out / "tuner_real.md").write_text(text, encoding="utf-8")
    print(text)
    return 1 if missed(rows) or left else 0


if __name__ == "__main__":
    sys.exit(main())
