"""Tables and plots of `bench.tuner_fleet`, and which goals were missed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.machine import machine
from bench.tuner_services import FROZEN_AFTER

if TYPE_CHECKING:
    from bench.tuner_fleet import Row

FIRST, FLEET = 200, 50  # number of the first service, and how many
OF_BEST, OF_BASELINE, MOST_CHANGES = 0.95, 0.98, 3
_SETTLED = 2  # halves
_COLUMNS = (
    "service", "start", "traffic", "tuned", "vLLM", "fixed", "its knobs", "tuned/fixed", "best", "their knobs", "tuned/best",
    "of vLLM", "changes (reverted)", "end",
)  # fmt: skip


def of_fixed(row: Row) -> float:
    """Return the tuned goodput as a share of the best fixed setting's, in the settled parts of both halves together."""
    return sum(row.tuned[:_SETTLED]) / sum(row.fixed) if any(row.fixed) else 1.0


def of_best(row: Row, half: int) -> float:
    """Return the tuned goodput as a share of that of the best setting for a half alone, in its settled part."""
    return row.tuned[half] / row.best[half] if row.best[half] else 1.0


def of_baseline(row: Row) -> float:
    """Return the tuned goodput as a share of that of vLLM's defaults: over everything for a service that starts with them,
    over the settled parts for one that starts badly.
    """
    tuned, vllm = (values[2] if row.start == "vllm" else sum(values[:_SETTLED]) for values in (row.tuned, row.vllm))
    return tuned / vllm if vllm else 1.0


def changes(row: Row, half: int, hours: float) -> int:
    """Return how many changes were begun in a half."""
    return sum((minute >= 30.0 * hours) == bool(half) for minute in _begun(row))


def on_lies(row: Row) -> int:
    """Return how many changes were begun on false figures: those of frozen ones were true at first."""
    return sum(row.lie == "doubled" or 60 * minute > FROZEN_AFTER for minute in _begun(row)) if row.lie else 0


def _begun(row: Row) -> list[float]:
    return [float(line.split(" min ")[0]) for line in row.messages if " min TuningCanary" in line]


def missed(rows: Sequence[Row], hours: float) -> list[str]:
    """Return the goals that were missed, in words."""
    found = []
    for row in rows:
        if row.lie:
            found += [f"{row.name} ({row.lie} figures): {count} changes"] if (count := on_lies(row)) else []
            continue
        if of_fixed(row) < OF_BEST:
            found.append(f"{row.name}: {of_fixed(row):.1%} of the best fixed setting (goal {OF_BEST:.0%})")
        if of_baseline(row) < OF_BASELINE:
            found.append(f"{row.name}: {of_baseline(row):.1%} of vLLM's defaults (goal {OF_BASELINE:.0%})")
        found += [
            f"{row.name}: {count} changes in half {half + 1} (goal: at most {MOST_CHANGES})"
            for half in (0, 1)
            if (count := changes(row, half, hours)) > MOST_CHANGES
        ]
        if row.failed:
            found.append(f"{row.name}: {row.failed} requests failed")
    return found


def report(rows: Sequence[Row], hours: float, interval: float) -> str:
    """Return the results as Markdown."""
    honest, liars = [row for row in rows if not row.lie], [row for row in rows if row.lie]
    lines = [
        "# The tuner on a made-up fleet",
        "",
        f"**Virtual time**: {len(rows)} services × {hours:g} h, 2 pods each, interval {interval:g} s. Pods run the",
        "production scheduler on a modelled device with tiles, a context knee, and computing that partly hides behind",
        "reading. The tuner is told none of it: the twin looks for tiles and a knee in the steps that pods show, and has",
        "no form for the third. Traffic changes its kind half-way. Goodput: requests/s within the objective in the settled",
        "part of a half (from 5 intervals after the start or the shift on). `fixed` is the best setting that is kept",
        "through both halves, `best` is another measure, which no fixed setting reaches: for each half the setting that is",
        "the best there, as if somebody knew of the shift and changed it at once. Both are found by a sweep: of five",
        "budgets and, with the two best ones of each half, seven counts of slots on one pod's first fifteen minutes of a",
        "half, those within 3 % of the best (three at most) on everything. `vLLM` is maxNumSeqs 256 with a budget of 8192.",
        "Objectives are tight, KV pools are scarce to plenty, and a batch beyond a service's knee serves less, not more.",
        "",
        "The tuner's last changes were settled on numbers from 1000 on and on single ones below 200: none of these services",
        "had been run then. The generator is older, but for the third trait of devices, which was added after that; its",
        "first hundred numbers were what the tuner was judged by before.",
        *([f"**{len(rows)} of {FLEET} services have been run so far.**"] if len(rows) < FLEET else []),
        "",
        *_summary(honest),
        f"Services that told lies about their steps: {len(liars)}; changes begun on them: {sum(map(on_lies, liars))}.",
        *_cost(rows),
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|---|---|---|---|---|---|---|---:|---|---|---|---:|---:|---|",
    ]
    lines += [_line(row) for row in rows]
    missing = missed(rows, hours)
    lines += [
        "",
        "Goals missed:" if missing else "No goal was missed by these services.",
        *(f"- {text}" for text in missing),
    ]
    return "\n".join(
        [*lines, "", f"Again: `python -m bench.tuner_fleet`. Machine (the CPU seconds depend on it): {machine()}.", ""]
    )


def _summary(honest: Sequence[Row]) -> list[str]:
    if not honest:
        return []
    fixed, baseline = sorted(map(of_fixed, honest)), sorted(map(of_baseline, honest))
    good, kept = sum(share >= OF_BEST for share in fixed), sum(share >= OF_BASELINE for share in baseline)
    idle = sum(sum(row.vllm[:_SETTLED]) >= OF_BEST * sum(row.fixed) for row in honest)
    begun, reverted = sum(row.changes for row in honest), sum(row.reverted for row in honest)
    total = {name: sum(sum(values(row)) for row in honest) for name, values in _TOTALS.items()}
    tuned, vllm, oracle = (total[a] / total[b] for a, b in (("tuned", "fixed"), ("vllm", "fixed"), ("tuned", "best")))
    return [
        f"{good} of {len(honest)} services reach {OF_BEST:.0%} of the best fixed setting: median {median(fixed):.1%}, worst",
        f"{fixed[0]:.1%}. vLLM's defaults reach it in {idle}. All services together: tuned {tuned:.1%} of the best fixed",
        f"settings, vLLM's defaults {vllm:.1%}.",
        f"{kept} of {len(honest)} services have at least {OF_BASELINE:.0%} of the goodput of vLLM's defaults, the worst",
        f"{baseline[0]:.1%}. {begun} changes in all, {reverted} taken back.",
        "",
        *_by_half(honest, oracle),
        "",
    ]


def _by_half(honest: Sequence[Row], together: float) -> list[str]:
    """Return how the tuned runs did against what is best for each half alone."""
    shares = sorted((of_best(row, half), row.name, half) for row in honest for half in (0, 1))
    below = [f"{name} h{half + 1} {share:.1%}" for share, name, half in shares if share < OF_BEST]
    good, middle = len(shares) - len(below), median(share for share, _, _ in shares)
    return [
        f"Against the best setting of each half alone: {good} of {len(shares)} halves reach {OF_BEST:.0%},",
        f"median {middle:.1%}, all together {together:.1%}. Below: {', '.join(below) or 'none'}.",
    ]


def _cost(rows: Sequence[Row]) -> list[str]:
    """Return what it took, per service."""
    tuned, fixed = (sum(row.seconds[i] for row in rows) / len(rows) for i in (0, 1))
    asked = sum(row.decisions for row in rows)
    return [
        f"CPU per service, mean: {tuned:.0f} s for the tuned run, its two pods and {asked / len(rows):.0f} decisions of the",
        f"tuner; {fixed:.0f} s for the fixed settings.",
    ]


_TOTALS: dict[str, Callable[[Row], Sequence[float]]] = {
    "tuned": lambda row: row.tuned[:_SETTLED],
    "vllm": lambda row: row.vllm[:_SETTLED],
    "fixed": lambda row: row.fixed,
    "best": lambda row: row.best,
}


def _line(row: Row) -> str:
    tuned, vllm, fixed, best = (
        " ".join(f"{value:.2f}" for value in values[:_SETTLED]) for values in (row.tuned, row.vllm, row.fixed, row.best)
    )
    shares = " ".join(f"{of_best(row, half):.0%}" for half in (0, 1))
    name = f"{row.name} ({row.lie} figures)" if row.lie else row.name
    end = f"{row.final['maxNumSeqs']}/{row.final['maxNumBatchedTokens']}"
    return (
        f"| {name} | {row.start} | {' → '.join(row.kinds)} | {tuned} | {vllm} | {fixed} | {row.fixed_knobs} | "
        f"{of_fixed(row):.0%} | {best} | {' '.join(row.best_knobs)} | {shares} | "
        f"{of_baseline(row):.0%} | {row.changes} ({row.reverted}) | {end} |"
    )


def plots(rows: Sequence[Row], folder: Path, window: float) -> None:
    """Draw each service's share within the objective over time, tuned and under vLLM's defaults."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = [row for row in rows if not row.lie][:12]
    if not shown:
        return
    height = (len(shown) + 2) // 3
    figure, axes = plt.subplots(height, 3, figsize=(12, 2.2 * height), squeeze=False, sharey=True)
    for axis, row in zip(axes.flat, shown, strict=False):
        minutes = [i * window / 60 for i in range(len(row.series["tuned"]))]
        axis.plot(minutes, row.series["vllm"], color="#bbbbbb", label="vLLM's defaults")
        axis.plot(minutes, row.series["tuned"], color="#0b7285", label="tuned")
        axis.set_title(f"{row.name}: {' → '.join(row.kinds)}, start {row.start}", fontsize=8)
        axis.set_ylim(-0.03, 1.03)
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    axes[0][0].legend(fontsize=7)
    figure.supxlabel("minutes (virtual time)", fontsize=8)
    figure.supylabel("share within the objective", fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "tuner_fleet.png", dpi=110)
    plt.close(figure)
