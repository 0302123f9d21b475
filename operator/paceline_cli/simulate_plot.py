"""The picture of `paceline simulate --plot`: what more load costs in latency, and where goodput stops growing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from paceline_cli.simulate_view import Run
from paceline_sim import Slo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_MOST_CURVES = 8  # more can't be told apart
# Okabe and Ito's palette: distinct also to the colour-blind
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C3C")
_MARKERS = "osD^vPX*"


def draw(runs: Sequence[Run], slo: Slo, title: str, path: Path) -> None:
    """Write the plot of `runs` to `path` (PNG or SVG by its suffix)."""
    curves = _curves(runs)
    with mpl.rc_context(
        {
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "svg.fonttype": "none",
            "svg.hashsalt": "paceline",
        }
    ):
        figure = Figure(figsize=(12, 5.2), layout="constrained")
        latency, goodput = figure.subplots(1, 2)
        for index, (label, points) in enumerate(curves.items()):
            style = {"color": _COLOURS[index], "marker": _MARKERS[index], "markersize": 5, "label": _legend(label, points)}
            _latency_curve(latency, points, style)
            _goodput_curve(goodput, points, style)
        _finish_latency(latency)
        _finish_goodput(goodput, [run for points in curves.values() for run in points])
        dropped = len({run.candidate.label for run in runs}) - len(curves)
        note = f" ({dropped} settings with less goodput aren't drawn)" if dropped else ""
        figure.suptitle(f"{title}\nSLO: {slo}{note}", fontsize=10, color="#444444")
        figure.savefig(path, dpi=150)


def _curves(runs: Sequence[Run]) -> Mapping[str, list[Run]]:
    """Return the runs of each setting by load; of many settings those with the most goodput."""
    grouped = {label: sorted(group, key=lambda run: run.candidate.load) for label, group in groupby(runs, _label)}
    best = sorted(grouped, key=lambda label: -max(run.summary.goodput for run in grouped[label]))[:_MOST_CURVES]
    return {label: points for label, points in grouped.items() if label in best}


def _legend(label: str, points: Sequence[Run]) -> str:
    name = label or "this setting"
    return name if _knee(points) else f"{name} (meets the SLO at no load)"


def _label(run: Run) -> str:
    return run.candidate.label


def _latency_curve(axes: Axes, points: Sequence[Run], style: Mapping[str, object]) -> None:
    axes.plot([run.summary.token_rate for run in points], [run.summary.e2e.p95 for run in points], **style)  # type: ignore[arg-type]
    if (knee := _knee(points)) is not None:
        axes.plot(knee.summary.token_rate, knee.summary.e2e.p95, **_ring(style))  # type: ignore[arg-type]


def _goodput_curve(axes: Axes, points: Sequence[Run], style: Mapping[str, object]) -> None:
    axes.plot([run.offered for run in points], [run.summary.goodput for run in points], **style)  # type: ignore[arg-type]
    if (knee := _knee(points)) is not None:
        axes.plot(knee.offered, knee.summary.goodput, **_ring(style))  # type: ignore[arg-type]


def _knee(points: Sequence[Run]) -> Run | None:
    """Return the highest load up to which the setting meets the SLO without a gap."""
    met = None
    for run in points:
        if not run.summary.meets_slo:
            break
        met = run
    return met


def _ring(style: Mapping[str, object]) -> dict[str, object]:
    return {
        "marker": "o",
        "markersize": 15,
        "markerfacecolor": "none",
        "markeredgecolor": style["color"],
        "markeredgewidth": 2,
    }


def _finish_latency(axes: Axes) -> None:
    axes.set(xlabel="throughput (output tokens/s)", ylabel="end-to-end latency, 95th percentile", yscale="log")
    axes.set_title("What load costs", loc="left", fontweight="bold")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.8)
    axes.set_xlim(left=0)


def _finish_goodput(axes: Axes, runs: Sequence[Run]) -> None:
    most = max(run.offered for run in runs)
    axes.plot(
        [0, most], [0, most], color="#999999", linestyle=":", linewidth=1.2, label="every request within the SLO", zorder=0
    )
    axes.set(xlabel="offered load (requests/s)", ylabel="goodput (requests/s within the SLO)")
    axes.set_title("Goodput, and where it stops growing", loc="left", fontweight="bold")
    axes.plot([], [], linestyle="none", **_ring({"color": "#666666"}), label="knee: the last load that meets the SLO")  # type: ignore[arg-type]
    axes.grid(visible=True, color="#dddddd", linewidth=0.8)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
