"""Tables and plots of `bench.tuner_clock`, and which goals were missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.machine import machine
from bench.tuner_clock_scenarios import INTERVAL, PODS, SLO, VLLM, Scenario, best_of, skipped_of, sweep
from bench.tuner_pods import SLICE, Run

OF_BEST, OF_BASELINE, MOST_CHANGES = 0.95, 0.98, 3


def missed(rows: Sequence[Run], found: Sequence[Scenario]) -> list[str]:
    """Return the goals that were missed, in words."""
    known, texts = _by_setting(rows), []
    for scenario in found:
        tuned, vllm, best = (known.get((scenario.name, setting)) for setting in ("tuned", "vllm", "best"))
        if tuned is None:
            continue
        untouched = (
            bool(scenario.lie) and not tuned.changes
        )  # requests that fail under the knobs of the start aren't tuning's
        if (tuned.failed and not untouched) or tuned.restarts:
            texts.append(f"{scenario.name}: {tuned.failed} requests failed, {tuned.restarts} restarts (goal: none)")
        if scenario.lie and tuned.changes:
            texts.append(f"{scenario.name}: {tuned.changes} changes (goal: none)")
        if tuned.changes > MOST_CHANGES:
            texts.append(f"{scenario.name}: {tuned.changes} changes (goal: at most {MOST_CHANGES})")
        if best is not None and tuned.attainment < OF_BEST * best.attainment:
            share = tuned.attainment / best.attainment
            texts.append(f"{scenario.name}: {share:.1%} of the best fixed setting (goal {OF_BEST:.0%})")
        if vllm is not None and tuned.goodput < OF_BASELINE * vllm.goodput:
            share = tuned.goodput / vllm.goodput
            texts.append(f"{scenario.name}: {share:.1%} of vLLM's defaults (goal {OF_BASELINE:.0%})")
        if vllm is not None and scenario.start == VLLM and tuned.overall < OF_BASELINE * vllm.overall:
            share = tuned.overall / vllm.overall
            texts.append(f"{scenario.name}: {share:.1%} of vLLM's defaults over all of it (goal {OF_BASELINE:.0%})")
    return texts


def report(rows: Sequence[Run], found: Sequence[Scenario], label: str, left: Sequence[str]) -> str:
    """Return the results as Markdown; `left` names the runs that weren't made."""
    known = _by_setting(rows)
    lines = [
        "# The tuner on clock pods", "",
        f"**Clock pods** (setting i): {PODS} pods under `paceline local`, traffic over HTTP, interval {INTERVAL:g} s. The",
        "pods are the real server with a clock for a device; step times have tiles and a knee, of which the tuner is told",
        f"nothing. Objective: TTFT ≤ {SLO[0]:g} s, TPOT ≤ {SLO[1] * 1e3:g} ms for 95 %. Goodput is counted by the",
        "clients, from five intervals after the start on (in (b): after the shift); `all` counts from the first second.",
        "`best` is the best fixed setting by a sweep of the twin on the true device, run on pods for the part that",
        "counts; all settings of a scenario met the same requests. `of best` compares shares in time, since a second more",
        f"or less changes how many are counted. `tuned` and `vllm` ran side by side. Day's shape: {label}.",
        "The tuner's margins were chosen on other draws of these scenarios' traffic, in virtual time.", "",
        f"Machine: {machine()}; while it ran {max((r.load for r in rows), default=0):.1f} at most.", "",
        "| scenario | setting | goodput/s | of best | in time | all | requests | failed | changes | knobs at the end |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]  # fmt: skip
    for scenario in found:
        best = known.get((scenario.name, "best"))
        runs = [r for setting in ("tuned", "vllm", "best") if (r := known.get((scenario.name, setting)))]
        lines += [_line(scenario, r, best) for r in runs]
    failures = missed(rows, found)
    lines += ["", f"Not run yet, so nothing is known of them: {', '.join(left)}."] * bool(left)
    lines += ["", "Goals missed:" if failures else "No goal that was judged was missed.", *(f"- {t}" for t in failures)]
    unjudged = [s.name for s in found if (s.name, "tuned") in known and (s.name, "best") not in known and not s.lie]
    lines += ["", f"Not judged against the best fixed setting, which wasn't run: {', '.join(unjudged)}."] * bool(unjudged)
    lines += ["", "## What fixed settings are worth, by the twin on the true device", "", *sweep_table(found)]
    for scenario in found:
        if (r := known.get((scenario.name, "tuned"))) and r.story:
            lines += ["", f"## {scenario.text}: what the status said", "", *(f"- {line}" for line in r.story)]
    failed = [f"- {r.scenario}, {r.setting}: {text}" for r in rows for text in r.errors]
    lines += ["", "## What failed requests were told", "", *failed] * bool(failed)
    return "\n".join(
        [*lines, "", "Again: `python -m bench.tuner_clock --trace FILE --label NAME`, until all runs are done.", ""]
    )


def sweep_table(found: Sequence[Scenario]) -> list[str]:
    """Return per scenario the share in time of the judged part under each fixed setting, as Markdown."""
    lines = ["| scenario | best | slots/budget: in time |", "|---|---|---|"]
    for scenario in (s for s in found if not s.lie):
        worths = sweep(scenario)
        cells = [f"{seqs}/{budget}: {worth:.0%}" for (seqs, budget), (worth, _) in worths.items()]
        lines.append(f"| {scenario.text} | {'/'.join(map(str, best_of(worths)))} | {', '.join(cells)} |")
    return lines


def _line(scenario: Scenario, r: Run, best: Run | None) -> str:
    share = f"{r.attainment / best.attainment:.1%}" if best is not None and best.attainment else ""
    return (
        f"| {scenario.text} | {r.setting} | {r.goodput:.2f} | {share} | {r.attainment:.1%} | {r.overall:.1%} | "
        f"{r.requests} | {r.failed} | {r.changes} | {r.final} |"
    )


def plots(rows: Sequence[Run], found: Sequence[Scenario], folder: Path) -> None:
    """Draw the share within the objective over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    known = _by_setting(rows)
    shown = [s for s in found if (s.name, "tuned") in known]
    if not shown:
        return
    figure, axes = plt.subplots(len(shown), 1, figsize=(8, 1.9 * len(shown)), squeeze=False)
    for axis, scenario in zip(axes.flat, shown, strict=True):
        for setting, colour in (("best", "#74b816"), ("vllm", "#bbbbbb"), ("tuned", "#0b7285")):
            if r := known.get((scenario.name, setting)):
                shares = [good / count if count else float("nan") for good, count in r.series]
                seconds = [skipped_of(scenario, setting) + i * SLICE for i in range(len(shares))]
                axis.plot(seconds, shares, color=colour, label=f"{setting} {r.final}")
        axis.axvline(scenario.judged, color="#dddddd", linewidth=1)
        axis.set_title(scenario.text, fontsize=8)
        axis.set_ylim(-0.03, 1.03)
        axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))  # beside it: lines fall at the end too
    figure.supxlabel("seconds", fontsize=8)
    figure.supylabel("share within the objective", fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "tuner_clock.png", dpi=110)
    plt.close(figure)


def _by_setting(rows: Sequence[Run]) -> Mapping[tuple[str, str], Run]:
    return {(r.scenario, r.setting): r for r in rows}
