"""How fast the twin replays: CPU seconds and memory over the length of a trace, and skip-ahead against the plain loop.

    python -m bench.twin                          # made-up traffic with the lengths of a public chat trace
    python -m bench.twin --trace requests.csv --label "the name of the trace"

Each measurement runs in a process of its own, so that its peak memory is its own. What counts is CPU time: it hardly
depends on what else the machine does. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline_core.knobs import Knobs
from paceline_core.plan import StepShape
from paceline_sim import Engine, Roofline, Trace, read_trace, simulate
from paceline_sim.generate import Lengths, poisson
from paceline_sim.hardware import find_accelerator, find_model

RESULTS = Path(__file__).parent / "results"
CPU_LIMIT = 10.0  # seconds for an hour of traffic, on one core
MEMORY_LIMIT = 500.0  # MB
GROWTH_LIMIT = 1.5  # CPU per request of the whole trace, against that of an eighth: 1 is linear
SHARES = (0.125, 0.25, 0.5, 1.0)
PLAIN_SHARE = 1 / 64  # of the trace, for the comparison with the plain loop: it is slow


@dataclass(frozen=True, slots=True)
class Measurement:
    share: float
    requests: int
    output_tokens: int
    steps: int
    cpu_seconds: float
    peak_mb: float

    @property
    def cpu_per_request(self) -> float:
        return self.cpu_seconds / self.requests


def engine() -> Engine:
    roofline = Roofline(find_model("llama-3.1-8b"), find_accelerator("h200"))
    return Engine(roofline, roofline.num_blocks, roofline.model.max_len)


def made_up_hour() -> Trace:
    """An hour like that of public chat traces: 5.5 requests/s, some long prompts, answers of about 200 tokens."""
    prompts = Lengths({50: 1020, 95: 3200, 100: 14_000}, least=20)
    return poisson(5.5, 3600.0, prompts, Lengths({50: 130, 95: 480, 100: 1000}, least=7), seed=1)


def load(path: str | None) -> Trace:
    return made_up_hour() if path is None else read_trace(Path(path))


def measure(path: str | None, share: float) -> Measurement:
    """Replay the first `share` of the trace's time."""
    trace = load(path)
    if share < 1:
        trace = trace.window(0.0, share * trace.span)
    begin = time.process_time()
    result = engine().replay(trace, Knobs())
    cpu = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # kilobytes on Linux
    outputs = sum(request.output_len for request in trace.requests)
    return Measurement(share, len(trace.requests), outputs, result.steps, cpu, peak)


def compare(path: str | None) -> dict[str, float]:
    """Replay a short piece with and without skipping ahead; both must give the same steps and the same result."""
    trace = load(path)
    piece, twin = trace.window(0.0, trace.span * PLAIN_SHARE), engine()
    blocks = twin.kv_blocks(Knobs().block_size, Knobs().kv_memory_fraction)
    seconds, results, logs = {}, {}, {}
    for skip in (True, False):
        log: list[tuple[float, float, StepShape, int]] = []
        begin = time.process_time()
        results[skip] = simulate(
            piece, Knobs(), twin.model, num_blocks=blocks, max_model_len=twin.max_model_len, skip_ahead=skip,
            on_step=lambda *step, log=log: log.append(step),
        )  # fmt: skip
        seconds[skip], logs[skip] = time.process_time() - begin, log
    assert results[True] == results[False], "skipping ahead changed the result"
    assert logs[True] == logs[False], "skipping ahead changed a step"
    return {"steps": len(logs[True]), "skipping": seconds[True], "plain": seconds[False]}


def machine() -> dict[str, object]:
    model = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def report(label: str, rows: Sequence[Measurement], comparison: dict[str, float]) -> str:
    about = machine()
    lines = [
        "# The twin's speed",
        "",
        f"{label}; `llama-3.1-8b` on one `h200` (roofline), default knobs: `continuous`, `maxNumSeqs` 256, budget 8192.",
        f"Machine: {about['cpu']}, {about['cores']} cores, Python {about['python']}, load average {about['load']} after it.",
        "CPU seconds of one process, without reading the trace.",
        "",
        "| share of the trace | requests | output tokens | steps | CPU s | ms per request | peak memory MB |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.share:g} | {r.requests:,} | {r.output_tokens:,} | {r.steps:,} | {r.cpu_seconds:.2f} | "
        f"{1e3 * r.cpu_per_request:.3f} | {r.peak_mb:.0f} |"
        for r in rows
    ]
    faster = comparison["plain"] / comparison["skipping"]
    times = f"{comparison['skipping']:.2f} s against {comparison['plain']:.2f} s, {faster:.1f} times faster"
    lines += [
        "",
        f"Skipping ahead against the plain loop, on {comparison['steps']:,.0f} steps, each compared to the last bit:",
        f"{times}.",
        "",
        "Again: `python -m bench.twin`, with `--trace FILE --label NAME` for recorded traffic.",
    ]
    return "\n".join(lines) + "\n"


def missed(rows: Sequence[Measurement]) -> list[str]:
    """Return the targets that were missed, in words."""
    whole, first = rows[-1], rows[0]
    growth = whole.cpu_per_request / first.cpu_per_request
    checks = [
        (whole.cpu_seconds <= CPU_LIMIT, f"{whole.cpu_seconds:.1f} s of CPU, the limit is {CPU_LIMIT:g}"),
        (whole.peak_mb <= MEMORY_LIMIT, f"{whole.peak_mb:.0f} MB, the limit is {MEMORY_LIMIT:g}"),
        (growth <= GROWTH_LIMIT, f"a request of the whole trace costs {growth:.2f} times one of an eighth of it"),
    ]
    return [text for fine, text in checks if not fine]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.twin", description="Measure the twin's speed.")
    parser.add_argument("--trace", help="a trace file; without one, made-up traffic")
    parser.add_argument("--label", help="what to call the traffic in the report")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    # one process per measurement: peak memory never falls again within one
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = [pool.apply(measure, (options.trace, share)) for share in SHARES]
        comparison = pool.apply(compare, (options.trace,))
    label = options.label or ("An hour of made-up traffic" if options.trace is None else "Recorded traffic")
    text = report(label, rows, comparison)
    options.out.mkdir(parents=True, exist_ok=True)
    name = "twin" if options.trace is None else "twin_recorded"
    (options.out / f"{name}.md").write_text(text, encoding="utf-8")
    document = {"machine": machine(), "traffic": label, "rows": [asdict(row) for row in rows], "comparison": comparison}
    (options.out / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(text)
    for failure in missed(rows):
        print(f"missed: {failure}", file=sys.stderr)
    return 1 if missed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
