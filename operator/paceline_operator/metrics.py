"""The operator's own metrics, in a registry of their own so that tests and embedders see nothing else."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["Metrics"]

_OUTCOMES = ("done", "refused", "unavailable", "error")
_PATCHES = ("applied", "refused", "unreachable")
_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """Counters of what the operator did. Labels are bounded: verbs, codes, kinds and outcomes, never names."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.reconciles = Counter(
            "paceline_operator_reconciles", "Passes over one service, by outcome.", ["outcome"], registry=registry
        )
        # there from the start: a rate of what isn't there is no 0, and of what begins with its first rise misses that
        for outcome in _OUTCOMES:
            self.reconciles.labels(outcome)
        self.reconcile_seconds = Histogram(
            "paceline_operator_reconcile_seconds", "Duration of one pass.", buckets=_BUCKETS, registry=registry
        )
        self.queue_length = Gauge("paceline_operator_queue_length", "Services that wait for a pass.", registry=registry)
        self.queue_seconds = Histogram(
            "paceline_operator_queue_seconds", "Time that work waited for a worker, by queue.", ["queue"],
            buckets=_BUCKETS, registry=registry,
        )  # fmt: skip
        self.errors = Counter(
            "paceline_operator_errors", "Passes and looks that failed, by kind of error.", ["kind"], registry=registry
        )
        self.services = Gauge("paceline_operator_services", "InferenceServices known.", registry=registry)
        self.api_calls = Counter(
            "paceline_operator_api_calls", "Calls to the API server, by verb, kind and code.", ["verb", "kind", "code"],
            registry=registry,
        )  # fmt: skip
        self.admission = Counter(
            "paceline_operator_admission_reviews", "Objects that admission was asked about, by kind and outcome.",
            ["kind", "outcome"], registry=registry,
        )  # fmt: skip
        self.certificate_expiry = Gauge(
            "paceline_operator_webhook_certificate_expiry_timestamp_seconds",
            "When the certificate that the webhook shows ends.",
            registry=registry,
        )
        self.leader = Gauge("paceline_operator_leader", "1 in the replica that leads, else 0.", registry=registry)
        self.fence = Gauge("paceline_operator_fence", "Fencing number of this replica's last leadership.", registry=registry)
        self.drift_corrected = Counter(
            "paceline_operator_drift_corrected",
            "Children that others had changed, by kind.",
            ["kind"],
            registry=registry,
        )
        self.knob_patches = Counter(
            "paceline_operator_knob_patches", "Knob changes sent to pods, by outcome.", ["outcome"], registry=registry
        )
        for outcome in _PATCHES:
            self.knob_patches.labels(outcome)
