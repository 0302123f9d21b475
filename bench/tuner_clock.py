"""Does tuning work on running pods? Three clock pods under `paceline local`, the operator as it ships, traffic over HTTP.

    python -m bench.tuner_clock --trace requests.csv      # all that isn't done yet, at most nine minutes; repeat until it is
    python -m bench.tuner_clock --scenario slots          # one scenario
    python -m bench.tuner_clock --sweep                   # what fixed settings are worth in each, by the twin: no pods
    python -m bench.tuner_clock --report                  # tables and plots of what is done

The pods are the real server with a clock instead of a model; its step times have tiles and a knee, of which the tuner is
told nothing. Each scenario runs three times: tuned and with vLLM's defaults side by side on the same traffic,
and with the best fixed setting, which a sweep of the twin on the true device finds. Two more have pods that lie, and may
change nothing. Finished runs are kept in `--resume` (default bench/results/tuner_clock.jsonl). Exit code 1: a goal missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.tuner_clock_report import missed, plots, report, sweep_table
from bench.tuner_clock_scenarios import DEVICE, INTERVAL, PODS, SLO, VLLM, Scenario, best_of, scenarios, skipped_of, sweep
from bench.tuner_pods import Run, Stack, kept, run

from paceline_cli.clock_service import Traffic, clock_manifest, write_device

RESULTS, ROOT = Path(__file__).parent / "results", Path(__file__).parent.parent
SETTINGS = ("tuned", "vllm", "best")
SIDE_BY_SIDE = 2  # runs at once: their devices are clocks, and two cores carry six such pods


def manifest_of(scenario: Scenario, setting: str, device: Path) -> dict[str, Any]:
    """Return the service of a run."""
    knobs: Mapping[str, int] = {"tuned": scenario.start, "vllm": VLLM}.get(setting) or best_fixed(scenario)
    mode = "Auto" if setting == "tuned" else "Off"
    manifest = clock_manifest(f"{scenario.name}-{setting}", device, replicas=PODS, knobs=knobs, mode=mode, slo=SLO)
    if scenario.lie:
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        container["command"] = [sys.executable, "-m", "bench.tuner_liar", scenario.lie, *container["command"][1:]]
        container["env"] = [{"name": "PYTHONPATH", "value": str(ROOT)}]
    return manifest


def best_fixed(scenario: Scenario) -> dict[str, int]:
    """Return the best fixed setting."""
    seqs, budget = best_of(sweep(scenario))
    return {"maxNumSeqs": seqs, "maxNumBatchedTokens": budget}


def todo(path: Path, found: Sequence[Scenario], only: Sequence[str] | None = None) -> list[tuple[Scenario, str]]:
    """Return the runs that aren't done yet, of all scenarios or of some: those first that are to run side by side."""
    done = {(r.scenario, r.setting) for r in kept(path)}
    honest = [s for s in found if not s.lie]
    every = [(s, setting) for s in honest for setting in SETTINGS[:2]] + [(s, SETTINGS[0]) for s in found if s.lie]
    every += [(s, SETTINGS[2]) for s in honest]
    return [(s, t) for s, t in every if (s.name, t) not in done and (only is None or s.name in only)]


def go(options: argparse.Namespace, runs: Sequence[tuple[Scenario, str]]) -> None:
    """Make the runs, as many as end within the time."""
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="paceline-tuner-") as folder, Stack(Path(folder), INTERVAL) as stack:
        device = write_device(Path(folder), DEVICE)
        for first in range(0, len(runs), SIDE_BY_SIDE):
            pair = runs[first : first + SIDE_BY_SIDE]
            if time.monotonic() + max(s.seconds for s, _ in pair) + 40 > deadline:  # some 30 s to start and to stop pods
                return
            print(" and ".join(f"{s.name} {setting}" for s, setting in pair), file=sys.stderr, flush=True)
            with ThreadPoolExecutor(len(pair)) as threads:
                for done in threads.map(lambda entry: one(stack, device, *entry), pair):
                    with options.resume.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(done)) + "\n")


def one(stack: Stack, device: Path, scenario: Scenario, setting: str) -> Run:
    """Make one run, of all of the scenario or of what counts."""
    skipped = skipped_of(scenario, setting)
    return run(
        stack, manifest_of(scenario, setting, device),
        lambda fleet: Traffic(fleet.url(), fleet.name, scenario.rate, scenario.prompts, slo=SLO, skipped=skipped),
        scenario=scenario.name, setting=setting, seconds=scenario.seconds - skipped, judged=scenario.judged - skipped,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tuner_clock", description="Tune clock pods under traffic.")
    parser.add_argument("--scenario", action="append", help="one of them, or several by repeating it; default: all")
    parser.add_argument("--trace", type=Path, help="recorded trace for the day's shape")
    parser.add_argument("--label", default="a made-up day", help="what to call that trace")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no run that wouldn't end within them")
    parser.add_argument("--resume", type=Path, default=RESULTS / "tuner_clock.jsonl")
    parser.add_argument("--sweep", action="store_true", help="run nothing, only tell what fixed settings are worth")
    parser.add_argument("--report", action="store_true", help="run nothing, only write the results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.resume.parent.mkdir(parents=True, exist_ok=True)
    found = scenarios(options.trace)
    if options.sweep:
        print(*sweep_table(found), sep="\n")
        return 0
    if (runs := todo(options.resume, found, options.scenario)) and not options.report:
        go(options, runs)
    rows, left = kept(options.resume), todo(options.resume, found)
    print(f"{len(left)} runs left" if left else "all runs done", file=sys.stderr)
    options.out.mkdir(parents=True, exist_ok=True)
    text = report(rows, found, options.label, [f"{s.name} {setting}" for s, setting in left])
    (options.out / "tuner_clock.md").write_text(text, encoding="utf-8")
    plots(rows, found, options.out)
    print(text)
    return 1 if missed(rows, found) or left else 0


if __name__ == "__main__":
    sys.exit(main())
