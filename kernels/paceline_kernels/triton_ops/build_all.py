"""Build every kernel ahead of time and report registers, spills and shared memory; exit 1 where one fails.

    python -m paceline_kernels.triton_ops.build_all [--target cuda:90 …] [--case attention …] [--quick] [--jobs 2]

No GPU is needed: Triton's wheel brings the assemblers. Don't set TRITON_INTERPRET.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from paceline_kernels.triton_ops.build import Build, build
from paceline_kernels.triton_ops.build_cases import BuildCase, build_cases
from paceline_kernels.triton_ops.launch import INTERPRETED, TARGETS, Target

__all__ = ["Outcome", "build_target", "main"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case's kernel on one target: its cost, or why it is refused (None: it isn't)."""

    case: str
    target: str
    built: Build | None
    fault: str | None


def build_case(case: BuildCase, target: Target) -> list[Outcome]:
    """Build what `case` launches on `target`."""
    outcomes = []
    for call in case.calls(target):
        try:
            built = build(call, target)
        except Exception as error:  # noqa: BLE001 - the matrix goes on; the fault is reported and fails the run
            outcomes.append(Outcome(case.name, str(target), None, f"{call.kernel.__name__}: {error}"))
            continue
        outcomes.append(Outcome(case.name, str(target), built, _fault(built, case.may_spill)))
    return outcomes


def _fault(built: Build, may_spill: bool) -> str | None:
    if not built.fits:
        return f"{built.shared} bytes of shared memory are more than a block may have"
    if built.spills and not may_spill:
        return f"{built.spills} bytes per thread are spilt"
    return None


def build_target(target: Target, quick: bool, names: tuple[str, ...], share: int = 0, shares: int = 1) -> list[Outcome]:
    """Build each `shares`-th case for `target`, from number `share` on, of those whose name starts with one of `names`."""
    cases = [case for case in build_cases(target) if (case.quick or not quick) and case.name.startswith(names)]
    return [outcome for case in cases[share::shares] for outcome in build_case(case, target)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and print the report; the exit code tells whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=[str(t) for t in TARGETS], help="default: all")
    parser.add_argument("--case", action="append", help="only cases whose name starts so; may be repeated")
    parser.add_argument("--quick", action="store_true", help="one shape of each kernel")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")
    started = time.monotonic()
    targets = [t for t in TARGETS if not options.target or str(t) in options.target]
    outcomes = _build_parallel(targets, options.quick, tuple(options.case or ("",)), options.jobs)
    _report(outcomes)
    faults = sum(outcome.fault is not None for outcome in outcomes)
    print(f"{len(outcomes)} builds for {len(targets)} targets in {time.monotonic() - started:.0f} s, {faults} refused")
    return 1 if faults else 0


def _build_parallel(targets: Sequence[Target], quick: bool, names: tuple[str, ...], jobs: int) -> list[Outcome]:
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [
            pool.submit(build_target, target, quick, names, share, jobs) for target in targets for share in range(jobs)
        ]
        return [outcome for future in futures for outcome in future.result()]


def _report(outcomes: Iterable[Outcome]) -> None:
    for outcome in outcomes:
        cost = "" if outcome.built is None else _cost(outcome.built)
        print(
            f"{outcome.target:<10} {cost:<60} {outcome.case}{'' if outcome.fault is None else '  REFUSED: ' + outcome.fault}"
        )


def _cost(built: Build) -> str:
    return f"{built.kernel:<16} {built.registers:>4} regs {built.spills:>4} B spilt {built.shared:>7} B shared"


if __name__ == "__main__":
    sys.exit(main())
