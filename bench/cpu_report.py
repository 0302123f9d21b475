"""What the runs of bench.cpu add up to: one row for each contestant, every ratio that the goals name, and the page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.cpu_contestants import CONTESTANTS, OURS, PRECISIONS, Contestant
from bench.cpu_runs import SOLO_SLOTS, Run
from bench.cpu_workload import LONG_PROMPT, STREAM_OUTPUT, W, Workload
from bench.roofline import Roofline

REFERENCE = "transformers static float32"  # whose texts are what the model says
# SmolLM2-135M: parameters of the layers' products and of the output layer
LAYER_WEIGHTS = 30 * (576 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1536)
HEAD_WEIGHTS = 576 * 49_152
STREAM_GOALS = (("int8", "llama.cpp Q8_0", 1.5), ("default", "llama.cpp Q4_1", 1.5), ("default", "llama.cpp Q4_0", 1.0))
BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.625}
PRODUCTS = {"fp32": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int8"}  # int4 is widened to int8 to be multiplied


@dataclass(frozen=True, slots=True)
class Row:
    """The medians of a contestant's rounds with some slots; see `Run` for the units."""

    contestant: Contestant
    slots: int
    rounds: int
    figures: Mapping[str, float]
    spread: float  # of the output rate: most less least, as a share of the median
    same_texts: int | None  # of W's answers, how many are the reference's


@dataclass(frozen=True, slots=True)
class Ratio:
    """How ours does against somebody: `goal` is the least that is asked, None where nothing is."""

    what: str
    ours: str
    theirs: str
    value: float
    goal: float | None

    @property
    def reached(self) -> bool | None:
        return None if self.goal is None else self.value >= self.goal


FIGURES = (
    "output_rate", "total_rate", "ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95", "stream", "prefill", "peak_bytes",
)  # fmt: skip


def rows_of(runs: Sequence[Run], *, busy: bool = False) -> list[Row]:
    """Return a row for each contestant and number of slots, in the contestants' order."""
    reference = next((run.texts for run in runs if run.contestant == REFERENCE), None)
    rows = []
    for contestant in CONTESTANTS:
        for slots in sorted({run.slots for run in runs}):
            mine = [r for r in runs if (r.contestant, r.slots, r.busy) == (contestant.name, slots, busy)]
            if mine:
                rows.append(_row(contestant, slots, mine, reference))
    return rows


def _row(contestant: Contestant, slots: int, runs: Sequence[Run], reference: Sequence[str] | None) -> Row:
    figures = {}
    for name in FIGURES:
        values = [value for run in runs if (value := getattr(run, name)) is not None]
        if values:
            figures[name] = statistics.median(values)
    rates = [run.output_rate for run in runs]
    same = None if reference is None else sum(a == b for a, b in zip(runs[0].texts, reference, strict=True))
    spread = (max(rates) - min(rates)) / statistics.median(rates)
    return Row(contestant, slots, len(runs), figures, spread, same)


def ratios(rows: Sequence[Row], quality: Iterable[str], work: str) -> list[Ratio]:
    """Return every ratio that the goals name and that the rows allow; `quality`: our forms that hold the quality bar.

    The goals are of W: of other work there are ratios without one.
    """
    found: list[Ratio | None] = []
    ours = [row for row in rows if row.contestant.peer == OURS]
    good = {f"{OURS} {form}" for form in quality}
    for slots in sorted({row.slots for row in rows}):
        found += [_same_class(rows, row, work) for row in ours if row.slots == slots]
        best = [row for row in ours if row.slots == slots and row.contestant.name in good]
        found.append(_best_of_all(rows, best, slots, work))
    for form, name, goal in STREAM_GOALS:
        found.append(_named(rows, "stream", f"one stream, {form}", f"{OURS} {form}", name, goal))
    found.append(_best_figure(rows, "prefill", f"prefill of {LONG_PROMPT}", good, "openvino", 1.2))
    best, rivals = [r for r in ours if r.contestant.name in good], [r for r in rows if r.contestant.peer != OURS]
    found.append(_ratio(f"prefill of {LONG_PROMPT}, any peer", "prefill", best, rivals, None))
    found.append(
        _best_figure(rows, "output_rate", f"{work}, {SOLO_SLOTS} slots, against static", good, "transformers static", 8.0)
    )
    named = [ratio for ratio in found if ratio is not None]
    return named if work == W else [replace(ratio, goal=None) for ratio in named]


def _same_class(rows: Sequence[Row], ours: Row, work: str) -> Ratio | None:
    """Ours against the best peer of its own or a higher precision class."""
    limit = PRECISIONS.index(ours.contestant.precision)
    rivals = [
        row for row in rows
        if row.slots == ours.slots and row.contestant.peer != OURS
        and PRECISIONS.index(row.contestant.precision) <= limit
    ]  # fmt: skip
    what = f"{work}, {ours.slots} slots, {ours.contestant.precision} or more precise"
    return _ratio(what, "output_rate", [ours], rivals, 1.0)


def _best_of_all(rows: Sequence[Row], ours: Sequence[Row], slots: int, work: str) -> Ratio | None:
    rivals = [row for row in rows if row.slots == slots and row.contestant.peer != OURS]
    return _ratio(f"{work}, {slots} slots, our best that holds quality, any peer", "output_rate", ours, rivals, 1.5)


def _named(rows: Sequence[Row], figure: str, what: str, ours: str, theirs: str, goal: float) -> Ratio | None:
    return _ratio(what, figure, *([r for r in rows if r.contestant.name == name] for name in (ours, theirs)), goal)


def _best_figure(rows: Sequence[Row], figure: str, what: str, good: set[str], peer: str, goal: float) -> Ratio | None:
    solo = [row for row in rows if row.slots == SOLO_SLOTS]
    ours = [row for row in solo if row.contestant.name in good]
    return _ratio(what, figure, ours, [row for row in solo if row.contestant.peer == peer], goal)


def _ratio(what: str, figure: str, ours: Sequence[Row], theirs: Sequence[Row], goal: float | None) -> Ratio | None:
    """Compare the best of each side; None if either has no such figure."""
    mine, rivals = ([row for row in side if figure in row.figures] for side in (ours, theirs))
    if not mine or not rivals:
        return None
    a, b = (max(side, key=lambda row: row.figures[figure]) for side in (mine, rivals))
    return Ratio(what, a.contestant.name, b.contestant.name, a.figures[figure] / b.figures[figure], goal)


def least_seconds(work: Workload, slots: int, precision: str, roofline: Roofline) -> float:
    """Return how long W takes at the machine's measured limits: its products, or reading the weights once a step."""
    operations = 2.0 * LAYER_WEIGHTS * (work.prompt_tokens + work.output_tokens) + 2.0 * HEAD_WEIGHTS * work.output_tokens
    steps = work.output_tokens / min(slots, len(work.jobs))
    return roofline.seconds(PRODUCTS[precision], operations, steps * (LAYER_WEIGHTS + HEAD_WEIGHTS) * BYTES[precision])


def least_step(precision: str, roofline: Roofline) -> float:
    """Return how long one stream's step takes at the limits."""
    weights = LAYER_WEIGHTS + HEAD_WEIGHTS
    return roofline.seconds(PRODUCTS[precision], 2.0 * weights, weights * BYTES[precision])


def least_prefill(precision: str, roofline: Roofline) -> float:
    """Return how long the long prompt's products take at the limits."""
    return roofline.seconds(PRODUCTS[precision], 2.0 * LAYER_WEIGHTS * LONG_PROMPT, LAYER_WEIGHTS * BYTES[precision])


HOW = (
    "Servers are asked over HTTP with a stream for each request, OpenVINO and transformers inside a process by their Python "
    "interfaces: what HTTP and its client cost is on ours, llama.cpp's and vLLM's side only. Class: the weights' type. "
    "% of limit: of what the products alone, or reading the weights in every step, would allow. Texts: how many of the "
    f"answers are those of `{REFERENCE}`."
)


def page(
    rows: Sequence[Row], found: Sequence[Ratio], work: Workload, roofline: Roofline, machine: str, absent: Mapping[str, str],
    versions: Iterable[str], busy: Sequence[Row],
) -> str:  # fmt: skip
    """Return the page."""
    peaks = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in roofline.operations.items())
    asked = f"{work.name}: {len(work.jobs)} requests at once, greedy, lengths forced, {work.prompt_tokens} tokens in, "
    asked += f"{work.output_tokens} out. Medians of interleaved rounds."
    asked += f" One stream: {STREAM_OUTPUT} tokens." if work.name == W else ""
    lines = [
        "# The CPU engine against its peers", "",
        f"Machine: {machine}. Measured limits: products {peaks} G operations/s, reads {roofline.read / 1e9:.1f} GB/s.", "",
        asked, "", HOW, "", "Versions: " + "; ".join(sorted(versions)) + ".", "",
    ]  # fmt: skip
    for slots in sorted({row.slots for row in rows}):
        table = _batch_table([row for row in rows if row.slots == slots], work, roofline)
        lines += [f"## {work.name} with {slots} slots", "", *table, ""]
    if solo := [row for row in rows if "stream" in row.figures]:
        lines += ["## One stream, one long prompt", "", *_solo_table(solo, roofline), ""]
    lines += ["## Ratios", "", *_ratio_table(found), ""]
    if busy:
        lines += ["## With one core busy", "", *_busy_table(rows, busy), ""]
    if absent:
        lines += ["## Missing", "", *(f"- {name}: {why}" for name, why in absent.items()), ""]
    again = "python -m bench.cpu" if work.name == W else "python -m bench.cpu --trace FILE"
    return "\n".join([*lines, f"Again: `python -m bench.cpu --install`, then `{again}`.", ""])


def _batch_table(rows: Sequence[Row], work: Workload, roofline: Roofline) -> list[str]:
    lines = [
        "| | class | out tok/s | ± | total tok/s | % of limit | TTFT p50 / p95 s | TPOT p50 / p95 ms | peak MB | texts |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: -row.figures["output_rate"]):
        f = row.figures
        least = least_seconds(work, row.slots, row.contestant.precision, roofline)
        share = least * f["output_rate"] / work.output_tokens
        same = "–" if row.same_texts is None else f"{row.same_texts}/{len(work.jobs)}"
        lines.append(
            f"| {row.contestant.name} | {row.contestant.precision} | {f['output_rate']:.1f} | {row.spread / 2:.0%} "
            f"| {f['total_rate']:.0f} | {share:.0%} | {f['ttft_p50']:.1f} / {f['ttft_p95']:.1f} "
            f"| {1e3 * f['tpot_p50']:.0f} / {1e3 * f['tpot_p95']:.0f} | {f['peak_bytes'] / 1e6:.0f} | {same} |"
        )
    return lines


def _solo_table(rows: Sequence[Row], roofline: Roofline) -> list[str]:
    lines = [
        f"| | class | one stream, tok/s | % of limit | prefill of {LONG_PROMPT}, tok/s | % of limit |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: -row.figures["stream"]):
        precision, (stream, prefill) = row.contestant.precision, (row.figures[name] for name in ("stream", "prefill"))
        shares = stream * least_step(precision, roofline), prefill / LONG_PROMPT * least_prefill(precision, roofline)
        lines.append(
            f"| {row.contestant.name} | {precision} | {stream:.1f} | {shares[0]:.0%} | {prefill:.0f} | {shares[1]:.0%} |"
        )
    return lines


def _ratio_table(found: Sequence[Ratio]) -> list[str]:
    verdicts = {None: "–", True: "reached", False: "**missed**"}
    lines = ["| | ours | theirs | ratio | goal | |", "|---|---|---|---:|---:|---|"]
    for ratio in found:
        goal = "–" if ratio.goal is None else f"{ratio.goal:g}"
        verdict = verdicts[ratio.reached]
        lines.append(f"| {ratio.what} | {ratio.ours} | {ratio.theirs} | {ratio.value:.2f} | {goal} | {verdict} |")
    return lines


def _busy_table(rows: Sequence[Row], busy: Sequence[Row]) -> list[str]:
    """Another process on one of two cores leaves three quarters of them to two threads that share fairly, half at worst."""
    quiet = {(row.contestant.name, row.slots): row for row in rows}
    lines = ["| | slots | out tok/s | of the quiet rate |", "|---|---:|---:|---:|"]
    for row in busy:
        before = quiet.get((row.contestant.name, row.slots))
        share = "–" if before is None else f"{row.figures['output_rate'] / before.figures['output_rate']:.0%}"
        lines.append(f"| {row.contestant.name} | {row.slots} | {row.figures['output_rate']:.1f} | {share} |")
    return lines
