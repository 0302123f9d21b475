"""What an InferenceService may say: the one definition of its fields, and the parser built on it.

`parse_service` turns the manifest's data into frozen dataclasses or raises a `SpecError` that names every field that can't
be used. The CRD's schema comes from the same definitions (`SPEC`), the knobs from the core's table.
"""
# ruff: noqa: RUF009  `item` returns a dataclass field; ruff knows only `field` itself

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline_core.errors import KnobError
from paceline_core.knobs import KNOBS, CostClass, Knobs, knob, knobs_from_wire
from paceline_operator.errors import Problem, SpecError
from paceline_operator.fields import Item, item, record, table, unknown_fields
from paceline_operator.kinds import Integer, ListOf, MapOf, Quantity, Raw, Text
from paceline_operator.kinds_knob import KnobKind
from paceline_operator.spec_cache import Cache, cache_problems
from paceline_operator.spec_platform import SCALING, Monitoring, NetworkRules, Rollout, Routing, Scaling, scaling_problems
from paceline_operator.spec_pod import Accelerator, EnvVar, Resources, Toleration, env_problems

__all__ = [
    "SPEC",
    "Accelerator",
    "EnvVar",
    "InferenceService",
    "Model",
    "ServiceSpec",
    "Toleration",
    "knob_path",
    "parse_service",
]

_NAME = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
_WORD = r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$"
# the objectives are knobs of the core, but a user states them under slo
_SLO_FIELDS = {"ttft": "sloTtft", "tpot": "sloTpot"}
_BATCHING = tuple(spec for spec in KNOBS if spec.name not in _SLO_FIELDS.values())
_TUNABLE = ("maxNumSeqs", "maxNumBatchedTokens", "maxQueueDelay", "longPrefillThreshold", "kvMemoryFraction")
_COST_TEXT = {
    CostClass.STEP: "applies to running pods",
    CostClass.PAUSE: "applies to running pods after a short pause",
    CostClass.RESTART: "rolls pods",
}
_TOP_LEVEL = ["apiVersion", "kind", "metadata", "spec", "status"]


def _knob_item(name: str) -> Item:
    spec = knob(name)
    default = spec.to_wire(spec.default)
    text = "" if default is None else f" Default {str(default).lower() if isinstance(default, bool) else default}."
    return Item(KnobKind(spec), f"{spec.description}{text} A change {_COST_TEXT[spec.cost]}.")


BATCHING = table(
    {spec.name: _knob_item(spec.name) for spec in _BATCHING},
    (
        "!has(self.maxNumSeqs) || !has(self.maxNumBatchedTokens) || self.maxNumBatchedTokens >= self.maxNumSeqs",
        "maxNumBatchedTokens must not be below maxNumSeqs: every running sequence needs a token per step",
    ),
    (
        "!has(self.maxNumSeqs) || !has(self.maxNumSeqsLimit) || self.maxNumSeqsLimit >= self.maxNumSeqs",
        "maxNumSeqs must not be above maxNumSeqsLimit: lower it, or raise the limit (which rolls the pods)",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretRef:
    """A key of a Secret in the service's namespace."""

    name: str = item(Text(pattern=_NAME, example="hf-token"), "Name of the Secret.", required=True)
    key: str = item(Text(pattern=r"^[A-Za-z0-9._-]+$", example="token"), "Its key. Default token.", default="token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Which model to serve."""

    uri: str = item(
        Text(1024, r"^[a-z][a-z0-9+]*://[!-~]+$", example="hf://HuggingFaceTB/SmolLM2-135M-Instruct"),
        "Where the weights are: hf://org/name, pvc://claim/path, pkg://package/file or file:///path, as far as the operator "
        "allows the scheme. A change rolls the pods.",
        required=True,
    )
    name: str | None = item(
        Text(128, _WORD, example="smollm2"), "Model name that clients use. Default: the InferenceService's name."
    )
    revision: str | None = item(Text(128, _WORD, example="main"), "Revision of an hf:// model: branch, tag or commit.")
    quantization: str | None = item(Text(32, _WORD, example="q4_1"), "Quantization, if the files alone don't tell.")
    max_model_len: int | None = item(Integer(1, 1 << 24), "Most tokens of prompt and output together. Default: the model's.")
    secret_ref: SecretRef | None = item(record(SecretRef), "Token for gated hf:// models.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What the service promises; strategy iteration keeps it, the tuner optimises under it."""

    ttft: str | None = item(KnobKind(knob("sloTtft")), "Objective for the time to the first token, as in 500ms.")
    tpot: str | None = item(KnobKind(knob("sloTpot")), "Objective for the time per output token after it, as in 50ms.")
    preset: str | None = item(
        Text(63, _NAME, example="interactive"), "Objectives that the class names; those stated here come on top."
    )
    percentile: int = item(Integer(50, 99), "Percent of requests that must meet them. Default 95.", default=95)


def _bounds_item(name: str) -> Item:
    kind = KnobKind(knob(name))
    ends = {
        "min": Item(kind, "Lowest value the tuner may choose."),
        "max": Item(kind, "Highest value the tuner may choose."),
    }
    return Item(table(ends), f"Bounds of {name} for the tuner.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Whether and how far the operator may tune the knobs."""

    mode: str = item(
        Text(choices=("Off", "Recommend", "Auto")),
        "Off, Recommend (shown in status) or Auto (applied to pods). Default Off.",
        default="Off",
    )
    bounds: Mapping[str, Mapping[str, Any]] | None = item(
        table({name: _bounds_item(name) for name in _TUNABLE}), "Bounds per knob, inside the knob's own.", default=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """The spec of an InferenceService."""

    model: Model = item(record(Model), "The model to serve.", required=True)
    batching: Mapping[str, Any] | None = item(BATCHING, "How requests are batched.")
    slo: Slo | None = item(record(Slo), "Latency objectives.")
    tuning: Tuning | None = item(record(Tuning), "Live tuning of the knobs.")
    class_name: str | None = item(
        Text(253, _NAME, example="gpu-shared"),
        "InferenceClass with defaults and limits. Default: the class that is annotated as the default, if there is one.",
    )
    replicas: int = item(Integer(0, 10_000), "Number of pods. Default 1.", default=1, crd_default=1)
    accelerator: Accelerator | None = item(record(Accelerator), "The device of each pod; left out: CPU.")
    resources: Resources | None = item(record(Resources), "CPU and memory of each pod.")
    image: str | None = item(Text(512, r"^[!-~]+$", example="registry/paceline-runtime:1.0"), "Runtime image, if allowed.")
    env: tuple[EnvVar, ...] = item(ListOf(record(EnvVar), 256), "Environment of the runtime container.", default=())
    node_selector: Mapping[str, str] | None = item(MapOf(Text(63, min_length=0)), "Labels that nodes must have.")
    tolerations: tuple[Toleration, ...] = item(ListOf(record(Toleration), 64), "Taints that pods tolerate.", default=())
    shared_memory: str | None = item(
        Quantity(), "Size of /dev/shm; it counts as memory of the container. Default 1Gi per device, none on CPU."
    )
    priority_class_name: str | None = item(Text(pattern=_NAME, example="serving"), "PriorityClass of the pods.")
    queue_name: str | None = item(Text(63, _NAME, example="team-a"), "Kueue LocalQueue that admits the pods.")
    cache: Cache | None = item(record(Cache), "Where downloaded models are kept. Default: in each pod, until it ends.")
    rollout: Rollout | None = item(record(Rollout), "How pods are replaced.")
    scaling: Scaling | None = item(SCALING, "Autoscaling; spec.replicas is the autoscaler's then.")
    network_policy: NetworkRules | None = item(record(NetworkRules), "Who may reach the pods.")
    routing: Routing | None = item(record(Routing), "Gateway API objects.")
    monitoring: Monitoring | None = item(record(Monitoring), "Prometheus operator objects.")
    template: Mapping[str, Any] | None = item(
        Raw(("metadata", "spec")),
        "Overlay on the pod template (metadata, spec), if allowed: lists of named things are merged by name, null removes.",
    )


SPEC = record(ServiceSpec)


@dataclass(frozen=True, slots=True)
class InferenceService:
    """A parsed InferenceService: identity, spec, and the knobs that result from it and from its class.

    `given` names the knobs that the spec states, `inherited` those that it leaves to the class. What the tuner found comes
    on top of them (`effective`). `class_name` is the class in force ("": none), `limits` its lowest and highest value by
    knob, `stated` the value and origin ("spec", "class") by path of what else spec or class say, `own` the hash of what the
    service asks for by itself.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    spec: ServiceSpec
    knobs: Knobs
    given: frozenset[str] = field(default_factory=frozenset)
    inherited: frozenset[str] = field(default_factory=frozenset)
    class_name: str = ""
    limits: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    stated: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    own: str = ""

    @property
    def model_name(self) -> str:
        """The name that clients use for the model."""
        return self.spec.model.name or self.name

    @property
    def slo(self) -> Slo:
        """The objectives, with defaults."""
        return self.spec.slo or Slo()

    @property
    def tuning(self) -> Tuning:
        """The tuning settings, with defaults."""
        return self.spec.tuning or Tuning()


def parse_service(body: Mapping[str, Any], inherited: frozenset[str] = frozenset()) -> InferenceService:
    """Return the parsed form of an InferenceService's JSON data. Raises `SpecError` with every problem found.

    `inherited` names the knobs in it that come from a class.
    """
    problems: list[Problem] = list(unknown_fields(body, _TOP_LEVEL, ""))
    spec = SPEC.parse(body.get("spec", {}), "spec", problems)
    values = {} if spec is None else _knob_values(spec)
    knobs = Knobs() if spec is None else _knobs(values, problems)
    if spec is not None:
        problems.extend(_cross_problems(spec))
    if problems:
        raise SpecError(tuple(problems))
    meta = body["metadata"]
    identity = (meta["name"], meta["namespace"], meta["uid"], int(meta.get("generation", 0)))
    return InferenceService(*identity, spec, knobs, frozenset(values) - inherited, inherited)


def _knob_values(spec: ServiceSpec) -> dict[str, Any]:
    slo = {name: getattr(spec.slo, field) for field, name in _SLO_FIELDS.items() if spec.slo and getattr(spec.slo, field)}
    return dict(spec.batching or {}) | slo


def _knobs(values: Mapping[str, Any], problems: list[Problem]) -> Knobs:
    try:
        return knobs_from_wire(values)
    except KnobError as error:
        problems.extend(Problem(knob_path(v.field), v.value, v.bound, v.remedy) for v in error.violations)
        return Knobs()


def knob_path(name: str) -> str:
    """Return the path of a knob in an InferenceService."""
    slo = {knob_name: field_name for field_name, knob_name in _SLO_FIELDS.items()}
    return f"spec.slo.{slo[name]}" if name in slo else f"spec.batching.{name}"


def _cross_problems(spec: ServiceSpec) -> list[Problem]:
    """Return what is wrong between fields that are each fine."""
    return [*env_problems(spec.env), *_tuning_problems(spec.tuning), *_platform_problems(spec)]


def _platform_problems(spec: ServiceSpec) -> Iterator[Problem]:
    yield from scaling_problems(spec.scaling)
    yield from cache_problems(spec.cache, spec.model.uri)


def _tuning_problems(tuning: Tuning | None) -> Iterator[Problem]:
    for name, ends in ((tuning.bounds if tuning else None) or {}).items():
        low, high = (knob(name).parse(ends[end]) if end in ends else None for end in ("min", "max"))
        if low is not None and high is not None and low > high:
            yield Problem(f"spec.tuning.bounds.{name}", dict(ends), "min ≤ max", "swap them")
