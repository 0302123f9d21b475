"""Figures of the fleet bench, its gates and goals, and the report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.fleet_operator import Cost
from bench.machine import machine

BASE_CHILDREN = 6  # Secret, ServiceAccount, ConfigMap, Service, PodDisruptionBudget, Deployment
COLD_EXTRA = 3  # calls per service beyond its children
MEMORY_MB = 250.0
COLD_RATIO, RESTART_S, STEADY_CORE, CHANGE_S = 2.0, 30.0, 0.05, 1.0


@dataclass
class Figures:
    """What a run measured; None where a phase couldn't be measured."""

    services: int
    replicas: int
    cold: Cost = field(default_factory=Cost)
    steady: Cost = field(default_factory=Cost)
    restart: Cost = field(default_factory=Cost)
    churn: Cost = field(default_factory=Cost)
    class_change: Cost | None = None
    own_speed: float = 0.0  # seconds in which the API server takes the cold phase's writes by themselves
    changes: list[float] = field(default_factory=list)

    @property
    def phases(self) -> dict[str, Cost | None]:
        return {
            "cold reconcile": self.cold, "steady state": self.steady, "operator restart": self.restart,
            "class change": self.class_change, "10 % churn": self.churn,
        }  # fmt: skip


@dataclass(frozen=True)
class Gate:
    """One target: `hard` ones don't depend on the machine."""

    text: str
    met: bool
    hard: bool


def gates(figures: Figures) -> list[Gate]:
    """Return every target with whether it was met."""
    per_service = sum(figures.cold.calls.values()) / figures.services  # every call: refused ones and the start's lists too
    allowed = BASE_CHILDREN + COLD_EXTRA
    ratio = figures.cold.seconds / figures.own_speed if figures.own_speed else math.inf
    core = figures.steady.operator_cpu / figures.steady.seconds
    late = percentile(figures.changes, 95)
    peak = max(cost.peak_mb for cost in figures.phases.values() if cost)
    restart, steady = (sum(c.writes.values()) + c.refused for c in (figures.restart, figures.steady))
    return [
        Gate(f"cold: {per_service:.2f} calls per service, at most children + {COLD_EXTRA} = {allowed}",
             per_service <= allowed, True),
        Gate(f"restart: {restart} writes, none allowed", restart == 0, True),
        Gate(f"steady: {steady} writes, none allowed", steady == 0, True),
        Gate(f"memory: {peak:.0f} MB at most, below {MEMORY_MB:.0f}", peak < MEMORY_MB, True),
        Gate(f"cold: {ratio:.2f} times what the API server itself takes for the writes, goal {COLD_RATIO:g}",
             ratio <= COLD_RATIO, False),
        Gate(f"restart: {figures.restart.seconds:.1f} s until every service was looked at, goal {RESTART_S:g}",
             figures.restart.seconds <= RESTART_S, False),
        Gate(f"steady: {100 * core:.1f} % of one core, goal below {100 * STEADY_CORE:g} %", core < STEADY_CORE, False),
        Gate(f"one change: {late:.2f} s at p95 until it is in the children, goal below {CHANGE_S:g}",
             late < CHANGE_S, False),
    ]  # fmt: skip


def percentile(values: Sequence[float], q: float) -> float:
    """Return the nearest-rank percentile; infinite for no values."""
    return sorted(values)[max(0, math.ceil(q / 100 * len(values)) - 1)] if values else math.inf


def report(figures: Figures) -> str:
    n = figures.services
    lines = [
        "# A fleet on one operator",
        "",
        f"{n:,} InferenceServices × {figures.replicas} replicas on a real kube-apiserver and etcd on the same machine,",
        f"no controllers, Deployment statuses written by the bench, tuning off. {machine()}.",
        "",
        "| phase | s | operator CPU s | API server + etcd CPU s | peak MB | calls | writes | calls per service by verb |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name, cost in figures.phases.items():
        if cost is None:
            lines.append(f"| {name} | not measured: the operator doesn't act on it | | | | | | |")
            continue
        verbs = ", ".join(f"{verb} {count / n:.2f}" for verb, count in cost.calls.items())
        lines.append(
            f"| {name} | {cost.seconds:.1f} | {cost.operator_cpu:.1f} | {cost.server_cpu:.1f} | {cost.peak_mb:.0f} "
            f"| {sum(cost.calls.values()):,} | {sum(cost.writes.values()):,} | {verbs} |"
        )
    p50, p95 = percentile(figures.changes, 50), percentile(figures.changes, 95)
    lines += [
        "",
        f"The API server takes the cold phase's writes by themselves in {figures.own_speed:.1f} s, over as many",
        "connections. Every call counts: the lists and the discovery at the operator's start (GET in the table), and the",
        f"{figures.cold.refused} that were refused. Kubernetes 1.20 takes no Service on the condition that there is none,",
        "and is asked by POST once it has said so. Not counted: kopf's watches, a list in chunks and a stream per kind.",
        f"One changed knob is in the ConfigMap after {p50:.3f} s (median) and {p95:.3f} s (p95 of {len(figures.changes)}).",
        "",
        "| target | met |",
        "|---|---|",
        *(f"| {gate.text} | {'yes' if gate.met else 'no'} |" for gate in gates(figures)),
        "",
        f"Again: `python -m bench.fleet --services {n}`.",
    ]
    return "\n".join(lines) + "\n"


def write(figures: Figures, folder: Path) -> str:
    """Write Markdown and JSON; return the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    text = report(figures)
    (folder / "fleet.md").write_text(text, encoding="utf-8")
    document = asdict(figures) | {"machine": machine(), "gates": [asdict(gate) for gate in gates(figures)]}
    (folder / "fleet.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return text
