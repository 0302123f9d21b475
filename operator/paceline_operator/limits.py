"""What a class's limits say about a service: each violation with field, value, bound and remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from paceline_core.knobs import knob, knobs_to_wire
from paceline_operator.class_spec import InferenceClass
from paceline_operator.effective import tuning_bounds
from paceline_operator.errors import Problem
from paceline_operator.spec import InferenceService, ServiceSpec, knob_path

__all__ = ["limit_problems"]


def limit_problems(service: InferenceService, cls: InferenceClass) -> Iterator[Problem]:
    """Yield everything in which `service`, as it is after inheriting, exceeds the limits of its class."""
    remedy = "stay inside it, or use another class"
    found = (*_knobs(service, cls), *_bounds(service), *_counts(service.spec, cls), *_resources(service.spec, cls))
    for path, value, bound in found:
        yield Problem(path, value, f"class {cls.name}: {bound}", remedy)


def _knobs(service: InferenceService, cls: InferenceClass) -> Iterator[tuple[str, Any, str]]:
    wire = knobs_to_wire(service.knobs)
    for name, (low, high) in cls.limits.items():
        spec = knob(name)
        if not low <= spec.parse(wire[name]) <= high:
            yield knob_path(name), wire[name], f"{spec.to_wire(low)} ≤ value ≤ {spec.to_wire(high)}"
    allowed = cls.spec.limits.strategies
    if allowed and service.knobs.strategy.value not in allowed:
        yield knob_path("strategy"), service.knobs.strategy.value, f"one of {', '.join(allowed)}"


def _bounds(service: InferenceService) -> Iterator[tuple[str, Any, str]]:
    """Yield bounds for tuning that leave nothing of what the class allows."""
    for name, (low, high) in tuning_bounds(service).items():
        if low > high:
            spec, (least, most) = knob(name), service.limits[name]
            ends = dict((service.tuning.bounds or {})[name])
            yield f"spec.tuning.bounds.{name}", ends, f"{spec.to_wire(least)} ≤ value ≤ {spec.to_wire(most)}"


def _counts(spec: ServiceSpec, cls: InferenceClass) -> Iterator[tuple[str, Any, str]]:
    limits = cls.spec.limits
    scaling = spec.scaling.max_replicas if spec.scaling else None
    devices = spec.accelerator.count if spec.accelerator else 0
    for path, value, most in (
        ("spec.replicas", spec.replicas, limits.max_replicas),
        ("spec.scaling.maxReplicas", scaling, limits.max_replicas),
        ("spec.model.maxModelLen", spec.model.max_model_len, limits.max_model_len),
        ("spec.accelerator.count", devices, limits.max_accelerators),
    ):
        if value is not None and most is not None and value > most:
            yield path, value, f"at most {most}"


def _resources(spec: ServiceSpec, cls: InferenceClass) -> Iterator[tuple[str, Any, str]]:
    stated = dict((spec.resources and spec.resources.limits) or {})
    asked = dict((spec.resources and spec.resources.requests) or {})
    for name, most in (cls.spec.limits.resources or {}).items():
        if name not in stated:
            yield f"spec.resources.limits.{name}", None, f"at most {most}, and a limit must be stated"
        for kind, values in (("limits", stated), ("requests", asked)):
            if name in values and _amount(values[name]) > _amount(most):
                yield f"spec.resources.{kind}.{name}", values[name], f"at most {most}"


def _amount(quantity: str) -> Decimal:
    return Decimal(parse_quantity(quantity))  # type: ignore[no-untyped-call]
