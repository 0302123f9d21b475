"""The CPU engine against its peers: the same weights, the same requests, the same slots, one after the other in rounds.

    python -m bench.cpu --install      # OpenVINO GenAI, vLLM, transformers, llama.cpp into ~/.cache/paceline-bench
    python -m bench.cpu                # measures; what was measured before stays, unless --fresh

A go ends before `--budget` seconds are over, with exit code 75 if something is left: call it again. Writes
bench/results/cpu.{json,md}, with --trace cpu_trace.{json,md}; ratios that fall short of their goals are in it like those
that don't.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.cpu_clients import ContestantFailed
from bench.cpu_contestants import CONTESTANTS, OURS, Contestant
from bench.cpu_install import install
from bench.cpu_record import Record
from bench.cpu_runs import Bench
from rich.console import Console

RESULTS = Path(__file__).parent / "results"
LEFT = 75  # EX_TEMPFAIL


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="install the peers and end")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="peers whose names hold it; may be repeated"
    )
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--trace", type=Path, help="a recorded trace: a cut of it instead of W")
    parser.add_argument("--busy", action="store_true", help="while another process keeps one core busy")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds of this go")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier goes measured")
    parser.add_argument("--report", action="store_true", help="only write the page of what was measured")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    if options.install:
        install(console, set(options.only))
        return 0
    name = "cpu" if options.trace is None else "cpu_trace"
    record = Record.read(options.out / f"{name}.json", fresh=options.fresh, look=not options.report)
    bench = Bench(options.seed, options.trace)
    done = options.report or _measure(bench, record, options, console)
    if record.runs:
        text = record.write(bench.work.batch)
        (options.out / f"{name}.md").write_text(text, encoding="utf-8")
        print(text)
    return 0 if done else LEFT


def _plan(options: argparse.Namespace) -> Iterator[tuple[int, int, Contestant]]:
    """Yield rounds, slots and contestants: each round takes all in turn, so that a noisy minute hits no one alone."""
    for number in range(options.rounds):
        for slots in options.slots:
            for contestant in CONTESTANTS:
                ours = contestant.peer == OURS  # takes part in every go: ratios of one hour are worth more than of two
                wanted = ours or not options.only or any(text in contestant.name for text in options.only)
                if wanted and contestant.missing is None:
                    yield number, slots, contestant


def _measure(bench: Bench, record: Record, options: argparse.Namespace, console: Console) -> bool:
    """Make the runs that are missing while time is left; True if none is left."""
    end = time.monotonic() + options.budget
    plan = list(_plan(options))
    for at, (number, slots, contestant) in enumerate(plan, 1):
        key = (contestant.name, slots, number, options.busy)
        if contestant.name in record.failed or any(run.key == key for run in record.runs):
            continue
        if time.monotonic() + record.expected(contestant.name) > end:
            return False
        label = f"[{at}/{len(plan)}] {contestant.name}, {slots} slots, round {number + 1}"
        with console.status(label) as status:
            told = lambda what, label=label, status=status: status.update(f"{label}: {what}")  # noqa: E731
            try:
                run = bench.run(contestant, slots, number, busy=options.busy, told=told)
            except ContestantFailed as error:
                record.failed[contestant.name] = str(error).partition("\n")[0]
                console.print(f"{label}: failed: {error}", markup=False)
                continue
        record.runs.append(run)
        record.write(bench.work.batch)
        console.print(f"{label}: {run.output_rate:.1f} out tok/s, {run.took:.0f} s in all", markup=False)
    return True


if __name__ == "__main__":
    sys.exit(main())
