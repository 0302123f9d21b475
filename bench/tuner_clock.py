"""Does tuning work on running pods? Three clock pods under `paceline local`, the operator as it ships, traffic over HTTP.

    python -m bench.tuner_clock                       # all scenarios, about 20 minutes
    python -m bench.tuner_clock --scenarios slots     # one
    python -m bench.tuner_clock --trace requests.csv  # the day-shaped load from a recorded trace (CSV with arrival times)

The pods are the real server with a clock instead of a model; its step times have tiles and a knee, so the tuner's linear
model is wrong about them. Each scenario runs three times: tuned, with vLLM's defaults, and with the best of a small sweep.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline_cli.clock_service import Sent, Traffic, clock_manifest, write_device
from paceline_cli.fleet import Fleet
from paceline_sim import read_trace

RESULTS = Path(__file__).parent / "results"
INTERVAL = 6.0
PODS = 3
READY = 120.0
CONVERGE = 5 * INTERVAL  # from the start, or from a shift, after which goodput is compared
VLLM = {"maxNumSeqs": 256, "maxNumBatchedTokens": 8192}
SWEEP = (
    {"maxNumSeqs": 8},
    {"maxNumSeqs": 16},
    {"maxNumSeqs": 32},
    {"maxNumSeqs": 64},
    {"maxNumSeqs": 32, "maxNumBatchedTokens": 512},
)

Rate = Callable[[float], float]
Lengths = Callable[[float], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Traffic by the second, knobs at the start, and how long it runs; goodput counts from `judged` on."""

    name: str
    text: str
    start: Mapping[str, Any]
    seconds: float
    judged: float
    rate: Rate
    prompts: Lengths


@dataclass(frozen=True, slots=True)
class Run:
    """One scenario under one setting: goodput after converging (requests/s), share within the objective, failures."""

    scenario: str
    setting: str
    goodput: float
    attainment: float
    overall: float
    requests: int
    failed: int
    changes: int
    final: str
    story: Sequence[str]


def scenarios(trace: Path | None) -> list[Scenario]:
    short: Lengths = lambda _: (40, 200)  # noqa: E731
    burst: Rate = lambda t: 24.0 if 90 < t < 130 else 8.0  # noqa: E731
    return [
        Scenario("slots", "(d) maxNumSeqs 1 at the start", {"maxNumSeqs": 1}, 150, 90, lambda _: 9.0, short),
        Scenario(
            "large", "(d) maxNumSeqs 512 and a large budget at the start",
            {"maxNumSeqs": 512, "maxNumBatchedTokens": 32_768}, 150, 90, lambda _: 30.0, lambda _: (400, 1200),
        ),
        Scenario(
            "shift", "(b) short chat, then long prompts", VLLM, 240, 120 + CONVERGE, lambda t: 15.0 if t < 120 else 9.0,
            lambda t: (40, 200) if t < 120 else (1500, 3000),
        ),
        Scenario("burst", "(c) a burst to three times the rate", VLLM, 210, 60, burst, short),
        Scenario("day", "(a) a day's shape, compressed", VLLM, 240, 60, day_shape(trace), lambda _: (100, 600)),
    ]  # fmt: skip


def day_shape(trace: Path | None) -> Rate:
    """Return the rate over 240 s: that of a recorded trace in 24 pieces, scaled to 12/s on average, or a sine."""
    if trace is None:
        return lambda t: 12.0 * (1 + 0.6 * math.sin(2 * math.pi * t / 240))
    requests = read_trace(trace).requests
    width = requests[-1].arrival / 24
    counts = [0] * 25
    for request in requests:
        counts[int(request.arrival / width)] += 1
    mean = len(requests) / 24
    return lambda t: 12.0 * max(0.1, counts[min(23, int(t / 10))] / mean)


class Stack:
    """A local stack of its own."""

    def __init__(self, folder: Path) -> None:
        self._home = folder / "home"
        self._env = os.environ | {
            "PACELINE_HOME": str(self._home), "PACELINE_TUNING_INTERVAL": str(INTERVAL),
            "PACELINE_TUNING_LOG": str(folder / "decisions.jsonl"),
        }  # fmt: skip
        self._device, self._folder = write_device(folder), folder

    def __enter__(self) -> Stack:
        self.paceline("local", "up")
        return self

    def __exit__(self, *_: object) -> None:
        self.paceline("local", "down", "--keep-state")

    def paceline(self, *args: str) -> None:
        subprocess.run([sys.executable, "-m", "paceline_cli", *args], env=self._env, check=True, stdout=subprocess.DEVNULL)

    def service(self, name: str, knobs: Mapping[str, Any], mode: str) -> Fleet:
        manifest = self._folder / f"{name}.json"
        text = json.dumps(clock_manifest(name, self._device, replicas=PODS, knobs=knobs, mode=mode))
        manifest.write_text(text, encoding="utf-8")
        self.paceline("local", "apply", "-f", str(manifest))
        fleet = Fleet(self._home / "kubeconfig", name)
        deadline = time.monotonic() + READY
        while fleet.conditions().get("Ready", {}).get("status") != "True":
            if time.monotonic() > deadline:
                raise SystemExit(f"{name} didn't become Ready: {fleet.conditions().get('Ready')}")
            time.sleep(0.5)
        return fleet

    def remove(self, name: str) -> None:
        self.paceline("local", "delete", "infsvc", name)


def run(stack: Stack, scenario: Scenario, setting: str, knobs: Mapping[str, Any], mode: str) -> Run:
    name = f"{scenario.name}-{setting}"
    fleet = stack.service(name, knobs, mode)
    story: list[str] = []
    with Traffic(fleet.url(), name, scenario.rate, scenario.prompts) as traffic:
        while traffic.seconds < scenario.seconds:
            tuning = fleet.get().get("status", {}).get("tuning", {})
            line = f"{tuning.get('state')} {tuning.get('reason')}: {tuning.get('message')}"
            if mode == "Auto" and (not story or not story[-1].endswith(line)):
                story.append(f"{traffic.seconds:.0f} s {line}")
                print(f"  {story[-1]}", file=sys.stderr, flush=True)
            time.sleep(1.0)
    status = fleet.get().get("status", {})
    stack.remove(name)
    return figures(scenario, setting, traffic.sent, status, story)


def figures(scenario: Scenario, setting: str, sent: Sequence[Sent], status: Mapping[str, Any], story: Sequence[str]) -> Run:
    judged = [s for s in sent if s.at >= scenario.judged]
    good = sum(s.good for s in judged)
    effective = status.get("effective", {})
    final = "/".join(str(effective.get(k, {}).get("value")) for k in ("maxNumSeqs", "maxNumBatchedTokens"))
    return Run(
        scenario=scenario.name,
        setting=setting,
        goodput=good / (scenario.seconds - scenario.judged),
        attainment=good / max(1, len(judged)),
        overall=sum(s.good for s in sent) / max(1, len(sent)),
        requests=len(sent),
        failed=sum(bool(s.outcome.error) for s in sent),
        changes=len(status.get("tuning", {}).get("history", [])),
        final=final,
        story=story,
    )


def report(runs: Sequence[Run], texts: Mapping[str, str], source: str) -> str:
    lines = [
        "# The tuner on clock pods", "",
        f"**Clock pods**: {PODS} pods under `paceline local`, traffic over HTTP, interval {INTERVAL:g} s, load average",
        f"{os.getloadavg()[0]:.1f} at the end. Step times have tiles and a knee. Goodput is counted by the clients, from",
        f"convergence on; `best` is the best of the fixed settings. Day shape: {source}.", "",
        "| scenario | setting | goodput/s | in time | all of it | requests | failed | changes | knobs at the end |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]  # fmt: skip
    lines += [
        f"| {texts[r.scenario]} | {r.setting} | {r.goodput:.2f} | {r.attainment:.1%} | {r.overall:.1%} | {r.requests} | "
        f"{r.failed} | {r.changes} | {r.final} |"
        for r in runs
    ]
    for r in runs:
        if r.story:
            lines += ["", f"## {texts[r.scenario]}: what the status said", "", *(f"- {line}" for line in r.story)]
    return "\n".join([*lines, "", "Again: `python -m bench.tuner_clock`.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tuner_clock", description="Tune clock pods under traffic.")
    parser.add_argument("--scenarios", nargs="*", help="names; default: all")
    parser.add_argument("--trace", type=Path, help="recorded trace for the day's shape")
    parser.add_argument("--only-tuned", action="store_true", help="leave the fixed settings out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    todo = [s for s in scenarios(options.trace) if not options.scenarios or s.name in options.scenarios]
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="paceline-tuner-") as folder, Stack(Path(folder)) as stack:
        for scenario in todo:
            runs.append(run(stack, scenario, "tuned", scenario.start, "Auto"))
            if not options.only_tuned:
                runs.append(run(stack, scenario, "vllm", VLLM, "Off"))
                fixed = [run(stack, scenario, f"fixed{i}", knobs, "Off") for i, knobs in enumerate(SWEEP)]
                best = max(fixed, key=lambda r: r.goodput)
                runs.append(Run(**asdict(best) | {"setting": "best"}))
    options.out.mkdir(parents=True, exist_ok=True)
    text = report(runs, {s.name: s.text for s in todo}, "a sine" if options.trace is None else options.trace.name)
    (options.out / "tuner_clock.md").write_text(text, encoding="utf-8")
    (options.out / "tuner_clock.json").write_text(json.dumps([asdict(r) for r in runs], indent=1) + "\n", encoding="utf-8")
    print(text)
    return 1 if any(r.failed for r in runs if r.setting == "tuned") else 0


if __name__ == "__main__":
    sys.exit(main())
