"""How well the twin predicts the real engine: step times are fitted on some loads and settings, others are predicted whole.

The engine, its API process and the client are pinned to cores of their own kind. Loads `bursty`, `prefix-heavy` and `near
saturation` and the strategies `dynamic` and `iteration` are never fitted on. Writes bench/results/fidelity.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from bench.fidelity_runs import BLOCK_SIZE, LOADS, MAX_MODEL_LEN, Run, collect, save, saved
from bench.machine import machine
from rich.console import Console
from rich.progress import Progress

from paceline_core.knobs import knobs_from_wire
from paceline_core.plan import StepShape
from paceline_core.step_time import StepTimeFitter
from paceline_core.wire import StepRecord
from paceline_sim import Slo, Spread, simulate, summarise, trace_of_records
from paceline_sim.calibrated import CalibratedModel, calibrate

RESULTS = Path(__file__).parent / "results"
FITTED = (
    ("steady", "continuous 16/256"), ("prefill-heavy", "continuous 32/1024"), ("overload", "continuous 8/64"),
    ("steady", "static 8"),
)  # fmt: skip
HELD_OUT = (
    ("bursty", "continuous 16/256"), ("bursty", "dynamic 16"), ("prefix-heavy", "continuous 8/64"),
    ("prefix-heavy", "iteration 16/256"), ("near saturation", "continuous 32/1024"), ("near saturation", "static 8"),
)  # fmt: skip
SHARES = {load.name: load.share for load in LOADS}
MODEST = 0.85  # share of what the engine can serve, up to which the strict bars hold
BAR, TTFT_BAR, OF_SPREAD = 0.10, 0.25, 1.5
_NO_GAP = 0.05  # seconds: a longer stillness between two steps is a want of work


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one held-out cell: mean of the repeats, their spread (share of the mean), the twin's, its error."""

    load: str
    setting: str
    figure: str
    measured: float
    spread: float
    twin: float
    error: float
    expected: float
    bar: float | None

    @property
    def held(self) -> bool | None:
        """Whether the error is within its bar; None: there is none."""
        return None if self.bar is None else self.error <= self.bar


def fit(runs: Iterable[Run]) -> CalibratedModel:
    """Return the step-time model of some runs: linear, with a factor per class of steps."""
    pairs = [pair for run in runs for pair in _steps(run.steps)]
    fitter = StepTimeFitter()
    for shape, seconds in pairs:
        fitter.observe(shape, seconds)
    return calibrate(fitter.model(), pairs)


def _steps(steps: Sequence[StepRecord]) -> list[tuple[StepShape, float]]:
    """Return shapes and seconds; what lies between two steps that follow each other belongs to the second."""
    found, before = [], 0.0
    for step in steps:
        gap = step.end - step.duration - before
        shape = StepShape(step.decode_tokens, step.prefill_tokens, step.context_tokens, step.prefill_attention)
        found.append((shape, step.duration + (gap if 0 < gap < _NO_GAP else 0.0)))
        before = step.end
    return found


def measured(run: Run) -> dict[str, float]:
    """Return what the engine did, from its own records."""
    records = [r for r in run.requests if r.first_token is not None and r.end is not None]
    ttft = Spread.of(r.first_token - r.arrival for r in records if r.first_token is not None)
    tpot = Spread.of(
        (r.end - r.first_token) / (r.output_tokens - 1)
        for r in records
        if r.end is not None and r.first_token is not None and r.output_tokens > 1
    )
    e2e = [sum(r.parts.values()) - r.parts.get("delivery", 0.0) for r in records]
    seconds = max(r.arrival + latency for r, latency in zip(records, e2e, strict=True)) - records[0].arrival
    return _figures(sum(r.output_tokens for r in records) / seconds, ttft, tpot, Spread.of(e2e))


def predicted(run: Run, model: CalibratedModel) -> dict[str, float]:
    """Return what the twin says of the same requests."""
    limits = {"maxNumSeqsLimit": 32, "blockSize": BLOCK_SIZE}
    knobs = knobs_from_wire(run.knobs | limits)
    trace = trace_of_records(run.requests)
    summary = summarise(simulate(trace, knobs, model, num_blocks=run.blocks, max_model_len=MAX_MODEL_LEN), Slo())
    return _figures(summary.token_rate, summary.ttft, summary.tpot, summary.e2e)


def _figures(rate: float, ttft: Spread, tpot: Spread, e2e: Spread) -> dict[str, float]:
    spreads = {"TTFT": ttft, "TPOT": tpot, "E2E": e2e}
    return {"tokens/s": rate} | {f"{name} {p}": getattr(s, p) for name, s in spreads.items() for p in ("p50", "p95")}


def expectations(runs: Sequence[Run]) -> dict[str, float]:
    """Return the error to expect per figure: the largest where each fitted cell is predicted from the others."""
    cells = list(dict.fromkeys((run.load, run.setting) for run in runs))
    worst: dict[str, float] = {}
    for cell in cells:
        model = fit(run for run in runs if (run.load, run.setting) != cell)
        for figure, (truth, _, twin) in compare([run for run in runs if (run.load, run.setting) == cell], model).items():
            worst[figure] = max(worst.get(figure, 0.0), abs(twin - truth) / truth)
    return worst


def compare(repeats: Sequence[Run], model: CalibratedModel) -> dict[str, tuple[float, float, float]]:
    """Return per figure the mean of the repeats, their spread (share of it), and the mean of the twin's predictions."""
    truths, twins = [measured(run) for run in repeats], [predicted(run, model) for run in repeats]
    found = {}
    for figure in truths[0]:
        values = [truth[figure] for truth in truths]
        mean = fmean(values)
        found[figure] = (mean, (max(values) - min(values)) / mean, fmean(twin[figure] for twin in twins))
    return found


def rows_of(runs: Sequence[Run], model: CalibratedModel, expected: Mapping[str, float]) -> list[Row]:
    rows = []
    for load, setting in dict.fromkeys((run.load, run.setting) for run in runs):
        repeats = [run for run in runs if (run.load, run.setting) == (load, setting)]
        for figure, (truth, spread, twin) in compare(repeats, model).items():
            bar = _bar(SHARES[load], figure, spread)
            error = abs(twin - truth) / truth
            rows.append(Row(load, setting, figure, truth, spread, twin, error, expected.get(figure, 0.0), bar))
    return rows


def _bar(share: float, figure: str, spread: float) -> float | None:
    if share <= MODEST:
        return max(BAR, OF_SPREAD * spread)
    return BAR if figure == "tokens/s" else TTFT_BAR if figure.startswith("TTFT") else None


def page(rows: Sequence[Row], model: CalibratedModel, seconds: float, repeats: int) -> str:
    lines = [
        "# The twin against the real engine", "",
        f"SmolLM2-135M on one core, API process and client on another; {repeats} repeats of {seconds:g} s, interleaved.",
        f"Machine: {machine()}.",
        f"Step-time model: {model.base.residual:.1%} off at the 90th percentile of the steps that it was fitted on,",
        f"corrected in {len(model.factors)} classes of steps.", "",
        "Fitted on: " + "; ".join(f"{load} under {setting}" for load, setting in FITTED) + ".",
        "`spread` is the engine's own (largest less smallest repeat), `expected` the error that the model states.", "",
        "| load | setting | figure | measured | spread | twin | error | expected | bar | within |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]  # fmt: skip
    for row in rows:
        bar, verdict = ("–", "–") if row.bar is None else (f"{row.bar:.0%}", "yes" if row.held else "**no**")
        lines.append(
            f"| {row.load} | {row.setting} | {row.figure} | {row.measured:.4g} | {row.spread:.0%} | {row.twin:.4g} | "
            f"{row.error:.0%} | {row.expected:.0%} | {bar} | {verdict} |"
        )
    judged = [row for row in rows if row.held is not None]
    lines += ["", f"Within their bars: {sum(bool(row.held) for row in judged)} of {len(judged)}.", ""]
    return "\n".join([*lines, "Again: `python -m bench.fidelity`.", ""])


def _measure(seconds: float, repeats: int) -> list[Run]:
    cells = [(load, setting, repeat) for repeat in range(repeats) for load, setting in (*FITTED, *HELD_OUT)]
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring capacity", total=len(cells))
        return collect(cells, seconds, lambda text: bar.update(task, advance=1, description=text))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fidelity", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run (default 20)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--save", type=Path, help="keep the raw requests and steps in this file")
    parser.add_argument("--saved", type=Path, help="analyse what --save kept instead of measuring")
    options = parser.parse_args(arguments)
    runs = saved(options.saved) if options.saved else _measure(options.seconds, options.repeats)
    if options.save:
        save(runs, options.save)
    fitted = [run for run in runs if (run.load, run.setting) in FITTED]
    model = fit(fitted)
    rows = rows_of([run for run in runs if (run.load, run.setting) in HELD_OUT], model, expectations(fitted))
    options.out.mkdir(parents=True, exist_ok=True)
    text = page(rows, model, options.seconds, options.repeats)
    (options.out / "fidelity.md").write_text(text)
    document = {
        "machine": machine(),
        "model": asdict(model.base),
        "factors": model.to_json(),
        "rows": [asdict(r) for r in rows],
    }
    (options.out / "fidelity.json").write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.write(text)
    return 0 if all(row.held is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
