"""What a soak found: figures as JSON, a page to read, and what must not be."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.soak_clients import Tally
from bench.soak_server import Latency, Sample

MEMORY_GROWTH = 0.05  # after the warm-up
OTHER_SHARE = 0.02
WARM_UP = 0.3  # of a phase
MEASURABLE = 120.0  # seconds of a phase from which on growth means something: below, buffers still fill


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase: how requests ended, samples of the processes, latency by cause, and the gauges when all was over."""

    name: str
    seconds: float
    tally: Tally
    samples: Sequence[Sample]
    latency: Latency
    idle: dict[str, Any]
    idle_descriptors: int
    flips: int
    kills: int

    def growth(self, which: str) -> float:
        """Return by how much resident memory grew after the warm-up: the last tenth's median over the first one's."""
        values = [getattr(sample, which) for sample in self.samples][int(len(self.samples) * WARM_UP) :]
        tenth = max(1, len(values) // 10)
        first, last = statistics.median(values[:tenth]), statistics.median(values[-tenth:])
        return last / first - 1 if first else 0.0

    def problems(self, descriptors: int) -> list[str]:
        """Return what must not be; `descriptors` were open before the first request."""
        found = [f"{self.name}: {count} × {what}" for what, count in self.tally.violations.items()]
        if self.idle["kvBlocksUsed"] or self.idle["running"] or self.idle["waiting"]:
            found.append(f"{self.name}: not idle at the end: {self.idle}")
        if self.idle_descriptors > descriptors + 5:  # a keep-alive connection of ours or two
            found.append(f"{self.name}: {self.idle_descriptors} descriptors at the end, {descriptors} before")
        if self.latency.other_share > OTHER_SHARE:
            found.append(f"{self.name}: {100 * self.latency.other_share:.1f} % of the latency is unexplained")
        if self.seconds >= MEASURABLE:
            which = ("api_rss",) if self.kills else ("api_rss", "engine_rss")
            found += [
                f"{self.name}: {name} grew by {100 * growth:.1f} %"
                for name in which
                if (growth := self.growth(name)) > MEMORY_GROWTH
            ]
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "name": self.name,
            "seconds": round(self.seconds, 1),
            "requests": self.tally.requests,
            "answers": dict(self.tally.answers),
            "errors": dict(self.tally.errors),
            "violations": dict(self.tally.violations),
            "knobFlips": self.flips,
            "kills": self.kills,
            "apiRssMb": [round(s.api_rss / 1e6, 1) for s in (self.samples[0], self.samples[-1])],
            "engineRssMb": [round(s.engine_rss / 1e6, 1) for s in (self.samples[0], self.samples[-1])],
            "apiGrowth": round(self.growth("api_rss"), 4),
            "engineGrowth": round(self.growth("engine_rss"), 4),
            "descriptors": [max(s.descriptors for s in self.samples), self.idle_descriptors],
            "finished": self.latency.requests,
            "latencySeconds": {name: round(s, 3) for name, s in sorted(self.latency.parts.items(), key=lambda i: -i[1])},
            "otherShare": round(self.latency.other_share, 6),
            "preemptions": self.idle["preemptions"],
        }


def page(title: str, machine: str, clients: int, phases: Sequence[Phase], problems: Sequence[str], again: str) -> str:
    """Return the report to read."""
    lines = [f"# {title}", "", f"Machine: {machine}. {clients} clients at once.", ""]
    lines += ["| | " + " | ".join(p.name for p in phases) + " |", "|---|" + "---:|" * len(phases)]
    lines += [f"| {what} | " + " | ".join(values) + " |" for what, values in _rows(phases)]
    for phase in phases:
        total = phase.latency.total or 1.0
        parts = sorted(phase.latency.parts.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{name} {100 * seconds / total:.1f} %" for name, seconds in parts if seconds > 0.0005 * total)
        lines += ["", f"Where the latency of *{phase.name}* went: {shares}."]
        ends = ", ".join(
            f"{n:,} {what}" for what, n in [*phase.tally.answers.most_common(), *phase.tally.errors.most_common()]
        )
        lines += ["", f"How requests of *{phase.name}* ended: {ends}."]
    lines += ["", "Problems: " + ("none." if not problems else ""), *(f"- {problem}" for problem in problems)]
    return "\n".join([*lines, "", f"Again: `{again}`."]) + "\n"


def _rows(phases: Sequence[Phase]) -> list[tuple[str, list[str]]]:
    def row(what: str, value: Any) -> tuple[str, list[str]]:
        return what, [str(value(phase)) for phase in phases]

    return [
        row("seconds", lambda p: f"{p.seconds:.0f}"),
        row("requests", lambda p: f"{p.tally.requests:,}"),
        row("answered", lambda p: f"{p.tally.answers.total():,}"),
        row("clean errors", lambda p: f"{p.tally.errors.total():,}"),
        row("anything else", lambda p: p.tally.violations.total()),
        row("knob changes", lambda p: p.flips),
        row("engine killed", lambda p: p.kills),
        row("preemptions", lambda p: p.idle["preemptions"]),
        row("API process MB (start, end)", lambda p: f"{p.samples[0].api_rss / 1e6:.0f}, {p.samples[-1].api_rss / 1e6:.0f}"),
        row("… growth after warm-up", lambda p: f"{100 * p.growth('api_rss'):.1f} %"),
        row(
            "engine MB (start, end)", lambda p: f"{p.samples[0].engine_rss / 1e6:.0f}, {p.samples[-1].engine_rss / 1e6:.0f}"
        ),
        row("… growth after warm-up", lambda p: "–" if p.kills else f"{100 * p.growth('engine_rss'):.1f} %"),
        row("descriptors (most, when idle)", lambda p: f"{max(s.descriptors for s in p.samples)}, {p.idle_descriptors}"),
        row("KV blocks in use when idle", lambda p: p.idle["kvBlocksUsed"]),
        row("latency unexplained", lambda p: f"{100 * p.latency.other_share:.3f} %"),
    ]
