"""What an InferenceClass may say: a platform team's defaults, limits and allow-lists for many services.

The fields of the defaults are those of the InferenceService itself, so that one definition describes both.
"""
# ruff: noqa: RUF009  `item` returns a dataclass field; ruff knows only `field` itself

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline_core.errors import KnobError
from paceline_core.knobs import KNOBS, Strategy, knob, knobs_from_wire
from paceline_operator.errors import Problem, SpecError
from paceline_operator.fields import Item, item, record, table, unknown_fields
from paceline_operator.kinds import Boolean, Integer, ListOf, MapOf, Quantity, Text
from paceline_operator.kinds_knob import KnobKind
from paceline_operator.spec import SPEC, Slo, Toleration

__all__ = ["CLASS_SPEC", "Allowed", "ClassSpec", "InferenceClass", "Limits", "parse_class"]

_TOP_LEVEL = ["apiVersion", "kind", "metadata", "spec", "status"]
_BOUNDED = tuple(spec for spec in KNOBS if spec.kind in ("int", "float", "duration") and not spec.nullable)
_INHERITABLE = ("batching", "slo", "tuning", "accelerator", "resources", "image", "env")
_MOST = 256  # entries of an allow-list


def _patterns(description: str, example: str) -> Any:
    return item(ListOf(Text(512, r"^[!-~]+$", example=example), _MOST), description)


def _ends(name: str) -> Item:
    kind = KnobKind(knob(name))
    ends = {"min": Item(kind, "Lowest value allowed."), "max": Item(kind, "Highest value allowed.")}
    return Item(table(ends), f"Bounds of {name}, for specs and for the tuner.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What no service of the class may exceed."""

    knobs: Mapping[str, Mapping[str, Any]] | None = item(
        table({spec.name: _ends(spec.name) for spec in _BOUNDED}), "Bounds per knob, inside the knob's own."
    )
    strategies: tuple[str, ...] | None = item(
        ListOf(Text(choices=tuple(s.value for s in Strategy)), len(Strategy)), "Strategies allowed. Default: all."
    )
    max_replicas: int | None = item(Integer(0, 10_000), "Most pods of one service.")
    max_model_len: int | None = item(Integer(1, 1 << 24), "Most tokens that spec.model.maxModelLen may name.")
    max_accelerators: int | None = item(Integer(0, 64), "Most devices per pod; 0: CPU only.")
    resources: Mapping[str, str] | None = item(
        MapOf(Quantity()), "Most per pod by resource; a service must then state a limit, unless the class has a default."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What a service may ask for that costs or endangers others. A list left out here is the operator's own setting."""

    images: tuple[str, ...] | None = _patterns(
        "Patterns (with *) of images besides the class's own; [] allows no other.", "registry/paceline-runtime:*"
    )
    models: tuple[str, ...] | None = _patterns(
        "Patterns of model URIs (scheme, host and path). Default: every URI of the operator's schemes.", "hf://my-org/*"
    )
    accelerators: tuple[str, ...] | None = _patterns(
        "Patterns of the resource, or of resource=product. Default: all.", "nvidia.com/gpu=NVIDIA-L4*"
    )
    service_accounts: tuple[str, ...] | None = item(
        ListOf(Text(example="model-reader"), _MOST), "Service accounts that a restricted template may name. Default: none."
    )
    host_paths: tuple[str, ...] | None = item(
        ListOf(Text(1024, r"^/[!-~]*$", example="/mnt/models"), _MOST),
        "Folders of the node that a restricted template may mount read-only, with all below them. Default: none.",
    )
    privileged: bool | None = item(Boolean(), "Whether a restricted template may loosen security contexts. Default false.")
    template: str | None = item(
        Text(choices=("None", "Restricted", "Any")),
        "What spec.template may overlay: None, Restricted (nothing that reaches beyond the pod) or Any.",
    )


_PRESET = table({name: definition for name, definition in record(Slo).fields.items() if name != "preset"})
_MOST_PRESETS = 32  # bounds what the API server reckons that the rules on durations may cost


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSpec:
    """The spec of an InferenceClass."""

    defaults: Mapping[str, Any] | None = item(
        table({name: SPEC.fields[name] for name in _INHERITABLE}),
        "What a service has where it states nothing itself, field by field.",
    )
    slo_presets: Mapping[str, Mapping[str, Any]] | None = item(
        MapOf(_PRESET, _MOST_PRESETS), "Objectives by name, for spec.slo.preset."
    )
    limits: Limits = item(record(Limits), "What no service of the class may exceed.", default=Limits())
    allowed: Allowed = item(record(Allowed), "What a service of the class may ask for.", default=Allowed())
    node_selector: Mapping[str, str] | None = item(
        MapOf(Text(63, min_length=0)), "Labels that the nodes of every pod must have; services can't change them."
    )
    tolerations: tuple[Toleration, ...] = item(
        ListOf(record(Toleration), 64), "Taints that every pod tolerates, besides the service's own.", default=()
    )


CLASS_SPEC = record(ClassSpec)


@dataclass(frozen=True, slots=True)
class InferenceClass:
    """A parsed InferenceClass. `defaults` and `presets` are manifest data, `limits` the bounds by knob in Python form."""

    name: str
    generation: int
    spec: ClassSpec
    defaults: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    limits: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


def parse_class(body: Mapping[str, Any]) -> InferenceClass:
    """Return the parsed form of an InferenceClass's JSON data. Raises `SpecError` with every problem found."""
    problems: list[Problem] = list(unknown_fields(body, _TOP_LEVEL, ""))
    raw = body.get("spec") or {}
    spec = CLASS_SPEC.parse(raw, "spec", problems)
    if spec is not None:
        problems.extend(_cross_problems(spec, raw.get("defaults") or {}))
    if problems:
        raise SpecError(tuple(problems))
    meta = body["metadata"]
    return InferenceClass(
        meta["name"],
        int(meta.get("generation", 0)),
        spec,
        raw.get("defaults") or {},
        raw.get("sloPresets") or {},
        _limits(spec.limits),
    )


def _limits(limits: Limits) -> dict[str, tuple[Any, Any]]:
    found = {}
    for name, ends in (limits.knobs or {}).items():
        spec = knob(name)
        low, high = ends.get("min"), ends.get("max")
        found[name] = (spec.low if low is None else spec.parse(low), spec.high if high is None else spec.parse(high))
    return found


def _cross_problems(spec: ClassSpec, defaults: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong between fields that are each fine: a class must not break its own rules."""
    for name, (low, high) in _limits(spec.limits).items():
        if low > high:
            yield Problem(f"spec.limits.knobs.{name}", dict((spec.limits.knobs or {})[name]), "min ≤ max", "swap them")
    preset = (defaults.get("slo") or {}).get("preset")
    if preset is not None and preset not in (spec.slo_presets or {}):
        yield Problem("spec.defaults.slo.preset", preset, "a name of spec.sloPresets", "add it there, or remove it here")
    yield from _default_knob_problems(spec, defaults.get("batching") or {})
    if spec.limits.strategies is not None and not spec.limits.strategies:
        yield Problem("spec.limits.strategies", [], "at least one", "name the strategies, or leave the list out")


def _default_knob_problems(spec: ClassSpec, batching: Mapping[str, Any]) -> Iterator[Problem]:
    try:
        knobs_from_wire(batching)
    except KnobError as error:
        for v in error.violations:
            yield Problem(f"spec.defaults.batching.{v.field}", v.value, v.bound, v.remedy)
        return
    limits = _limits(spec.limits)
    for name, value in batching.items():
        low, high = limits.get(name, (None, None))
        if low is not None and not low <= knob(name).parse(value) <= high:
            bound = f"spec.limits.knobs.{name}"
            yield Problem(f"spec.defaults.batching.{name}", value, f"inside {bound}", "change the default or the limit")
    strategy, allowed = batching.get("strategy"), spec.limits.strategies
    if strategy is not None and allowed and strategy not in allowed:
        yield Problem("spec.defaults.batching.strategy", strategy, f"one of {', '.join(allowed)}", "choose one of them")
