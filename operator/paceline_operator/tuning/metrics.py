"""`paceline_tuner_*`: what the tuner sees and does."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline_operator.tuning.brain import Brain
from paceline_operator.tuning.ledger import Health
from paceline_operator.tuning.state import Phase

__all__ = ["TunerMetrics"]

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class TunerMetrics:
    """Labels are namespaces and names of tuned services, phases and reasons: bounded by the services there are."""

    def __init__(self, registry: CollectorRegistry) -> None:
        service = ("namespace", "name")
        self.decisions = Counter(
            "paceline_tuner_decisions", "Decisions of the twin, by kind and reason.", ("kind", "reason"), registry=registry
        )
        self.events = Counter("paceline_tuner_events", "Steps of changes, by what happened.", ("reason",), registry=registry)
        self.search_seconds = Histogram(
            "paceline_tuner_search_seconds", "Time to an answer of the twin.", buckets=_SECONDS, registry=registry
        )
        self.round_seconds = Histogram(
            "paceline_tuner_round_seconds",
            "Time of one look at all services that are due.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.pods = Gauge("paceline_tuner_pods", "Pods by the health of what they tell.", ("health",), registry=registry)
        self.attainment = Gauge(
            "paceline_tuner_slo_attainment", "Share of requests within the objective.", service, registry=registry
        )
        self.goodput = Gauge(
            "paceline_tuner_goodput", "Requests per second within the objective.", service, registry=registry
        )
        self.error = Gauge(
            "paceline_tuner_twin_error", "The twin's error in the share within the objective.", service, registry=registry
        )
        self.phase = Gauge(
            "paceline_tuner_phase", "1 for the phase that a service is in.", (*service, "phase"), registry=registry
        )
        self.failures = Counter("paceline_tuner_failures", "Looks at a service that failed.", registry=registry)

    def observe(self, namespace: str, name: str, brain: Brain) -> None:
        """Publish what is known of a service."""
        if brain.view is not None:
            self.attainment.labels(namespace, name).set(brain.view.attainment)
            self.goodput.labels(namespace, name).set(brain.view.goodput)
        if brain.decision is not None:
            self.error.labels(namespace, name).set(brain.decision.error)
        for phase in Phase:
            self.phase.labels(namespace, name, phase.value).set(brain.state.phase is phase)

    def forget(self, namespace: str, name: str) -> None:
        """Drop the series of a service that is gone or isn't tuned any more."""
        for gauge in (self.attainment, self.goodput, self.error):
            gauge.remove_by_labels({"namespace": namespace, "name": name})
        self.phase.remove_by_labels({"namespace": namespace, "name": name})

    def count_pods(self, healths: list[Health]) -> None:
        """Publish how many pods are in which health."""
        for health in Health:
            self.pods.labels(health.value).set(healths.count(health))
