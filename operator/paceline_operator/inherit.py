"""Puts a class under a service's spec: what the service states wins, field by field. Pure.

The two are merged as manifest data before anything is parsed, so that "left out" is told apart from "set to the default".
A default gives way also where a stated value needs it to: `maxNumSeqs: 512` raises the class's `maxNumSeqsLimit: 256`. The
limits of the class are another matter, they are checked on the result (`limits`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from paceline_core.knobs import KNOBS, CostClass, Knobs, knob, knobs_to_wire
from paceline_operator.class_spec import InferenceClass
from paceline_operator.errors import Problem, SpecError
from paceline_operator.fields import camel, wire_form
from paceline_operator.names import digest
from paceline_operator.spec import InferenceService, parse_service
from paceline_operator.upgrade import ELSEWHERE

__all__ = ["resolve"]

Data = Mapping[str, Any]
_SLO_KNOBS = {"ttft": "sloTtft", "tpot": "sloTpot"}
_RESTART = {spec.name for spec in KNOBS if spec.cost is CostClass.RESTART}
# fields whose leaves are shown in status with their origin; env may hold what shouldn't be copied around
_SHOWN = ("accelerator", "image", "nodeSelector", "resources", "slo", "tolerations", "tuning")


def resolve(body: Data, cls: InferenceClass | None) -> InferenceService:
    """Return the service of a manifest under its class (None: there is none). Raises `SpecError` with every problem."""
    own = body.get("spec")
    if not isinstance(own, Mapping):
        return parse_service(body)
    problems: list[Problem] = []
    merged = _with_preset(cls, own, problems)
    inherited: frozenset[str] = frozenset()
    if cls is not None:
        merged = _placed(cls, _merge(_defaults(cls, own, problems), merged), problems)
        inherited = _stated_knobs(merged) - _stated_knobs(own)
    try:
        service = parse_service({**body, "spec": merged}, inherited)
    except SpecError as error:
        raise SpecError((*problems, *error.problems)) from None
    if problems:
        raise SpecError(tuple(problems))
    asked = digest(_of_pods(own))
    shown = {".".join(path): (value, "spec" if _has(own, path) else "class") for path, value in _shown(merged)}
    if cls is None:
        return replace(service, own=asked, stated=shown)
    return replace(service, own=asked, stated=shown, class_name=cls.name, limits=cls.limits)


def _with_preset(cls: InferenceClass | None, own: Data, problems: list[Problem]) -> dict[str, Any]:
    """Return the spec with the objectives that its preset stands for under those that it states."""
    preset = _object(own.get("slo")).get("preset")
    return {**own, "slo": _merge(_preset(cls, preset, problems), own["slo"])} if preset is not None else dict(own)


def _preset(cls: InferenceClass | None, name: Any, problems: list[Problem]) -> dict[str, Any]:
    presets = cls.presets if cls else {}
    if isinstance(name, str) and name in presets:
        return dict(presets[name])
    what = f"class {cls.name} has: {', '.join(sorted(presets)) or 'none'}" if cls else "the service has no class"
    problems.append(Problem("spec.slo.preset", name, what, "use one of its class's presets, or state ttft and tpot"))
    return {}


def _defaults(cls: InferenceClass, own: Data, problems: list[Problem]) -> dict[str, Any]:
    """Return the class's defaults as far as they make sense next to what the service states."""
    defaults = dict(cls.defaults)
    if batching := _batching(cls, _object(own.get("batching"))):
        defaults["batching"] = batching
    if preset := _object(defaults.get("slo")).get("preset"):
        stated = _object(own.get("slo")).get("preset")
        # the service's own preset takes the place of the class's, also where it says less
        defaults["slo"] = {} if stated else {**_preset(cls, preset, problems), **defaults["slo"]}
    device = _object(own.get("accelerator")).get("resource")
    if device not in (None, _object(defaults.get("accelerator")).get("resource", "nvidia.com/gpu")):
        del defaults["accelerator"]  # its product and count are about another device
    return defaults


def _batching(cls: InferenceClass, own: Data) -> dict[str, Any]:
    """Return what the class says about knobs: its defaults, and its limits where the operator's defaults are outside."""
    values = dict(cls.defaults.get("batching") or {})
    plain = knobs_to_wire(Knobs())
    for name, (low, high) in cls.limits.items():
        default = knob(name).parse(plain[name])
        if name not in values and not low <= default <= high:
            values[name] = knob(name).to_wire(min(max(default, low), high))
    allowed = cls.spec.limits.strategies
    if allowed and "strategy" not in values and plain["strategy"] not in allowed:
        values["strategy"] = allowed[0]
    return _fitting(values, own)


def _fitting(values: dict[str, Any], own: Data) -> dict[str, Any]:
    """Return defaults that the rules between knobs allow next to what the service states."""
    seqs, *ceilings = (_count(own.get(name)) for name in ("maxNumSeqs", "maxNumBatchedTokens", "maxNumSeqsLimit"))
    if seqs is not None:
        for name in values.keys() & {"maxNumBatchedTokens", "maxNumSeqsLimit"}:
            values[name] = max(values[name], seqs)
    elif "maxNumSeqs" in values:
        values["maxNumSeqs"] = min(v for v in (values["maxNumSeqs"], *ceilings) if v is not None)
    return values


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _placed(cls: InferenceClass, spec: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Add the class's own node labels, which the service can't change, and its tolerations; what can't be added to stays
    for the parser to refuse."""
    stated, given = spec.get("nodeSelector", {}), spec.get("tolerations", [])
    if (wanted := cls.spec.node_selector) and isinstance(stated, Mapping):
        for key in sorted(key for key in wanted if stated.get(key, wanted[key]) != wanted[key]):
            bound = f"class {cls.name} sets {wanted[key]}"
            problems.append(Problem(f"spec.nodeSelector[{key}]", stated[key], bound, "remove it, or use another class"))
        spec["nodeSelector"] = {**stated, **wanted}
    if cls.spec.tolerations and isinstance(given, list):
        spec["tolerations"] = [*given, *map(wire_form, cls.spec.tolerations)]
    return spec


def _merge(base: Any, top: Any, name: str = "") -> Any:
    """Return `top` over `base`: objects field by field, env by name, everything else whole."""
    if isinstance(base, Mapping) and isinstance(top, Mapping):
        merged = dict(base)
        for key, value in top.items():
            merged[key] = _merge(base[key], value, key) if key in base else value
        return merged
    if name == "env" and isinstance(base, list) and isinstance(top, list):
        stated = {entry.get("name") for entry in top if isinstance(entry, Mapping)}
        return top + [entry for entry in base if entry["name"] not in stated]  # the service's first: messages count them
    return top


def _stated_knobs(spec: Data) -> frozenset[str]:
    slo = _object(spec.get("slo"))
    return frozenset(_object(spec.get("batching"))) | {knob for name, knob in _SLO_KNOBS.items() if name in slo}


def _of_pods(own: Data) -> dict[str, Any]:
    """Return what a spec states about the pods' template, its class included."""
    elsewhere = {camel(name) for name in ELSEWHERE} - {"className"}
    batching = {name: value for name, value in _object(own.get("batching")).items() if name in _RESTART}
    return {name: value for name, value in own.items() if name not in elsewhere} | {"batching": batching}


def _shown(spec: Data) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and value of what status shows besides knobs."""
    leaves = _leaves({name: spec[name] for name in _SHOWN if name in spec})
    return ((path, value) for path, value in leaves if path[0] != "slo" or path[1] == "percentile")


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def _has(spec: Any, path: tuple[str, ...]) -> bool:
    for key in path:
        if not isinstance(spec, Mapping) or key not in spec:
            return False
        spec = spec[key]
    return True


def _object(value: Any) -> Data:
    return value if isinstance(value, Mapping) else {}
