"""Wire contracts of the admin API: what runtime, operator, twin and tests say to each other.

Plain dataclasses with a schema version. `to_json` gives JSON-ready data under camelCase names; `from_json` ignores fields
that it doesn't know (a newer pod may say more) and raises `FormatError` for a missing field, a wrong type or another
schema version.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from paceline_core.errors import FormatError

__all__ = [
    "SCHEMA_VERSION",
    "Gauges",
    "KnobsDocument",
    "KnobsPatch",
    "ObserveDocument",
    "RequestRecord",
    "StepModelDocument",
    "StepRecord",
    "TimelineDocument",
    "TimelineMember",
    "TimelineStep",
    "from_json",
    "to_json",
]

SCHEMA_VERSION = 1
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KnobsDocument:
    """Answer of `GET`, `PATCH` and `POST …/rollback` on `/admin/knobs`. The revision is also the `ETag`.

    `knobs` are the values in force (wire form), `status` says per knob `applied`, `pending` or `needs-restart`; `desired`
    holds the values of those that aren't applied yet. `epoch` counts the changes that steps were run under.
    """

    revision: int
    epoch: int
    knobs: Mapping[str, Any]
    status: Mapping[str, str]
    desired: Mapping[str, Any] = field(default_factory=dict)
    instance: str = ""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class KnobsPatch:
    """Body of `PATCH /admin/knobs`: some knobs in wire form, and the sender's fencing number (Lease transitions)."""

    knobs: Mapping[str, Any]
    fencing: int = 0
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the twin and the tuner need it: times (seconds since the Unix epoch), lengths, never text.

    `outcome` is `finished`, `aborted`, `refused` or `unfinished` (still there when observed). `prefix_hashes` are keyed
    hashes of the prompt's full blocks. `epoch` is the knob epoch at arrival, `end_epoch` that of the last token.

    `parts` are the seconds from arrival to the result by cause (see `causes.py`; `delivery` is from the engine to the API
    process, `other` what the causes don't explain), `delayed_by` and `preempted_by` the requests that were most to blame
    (`-` is nobody: a pool that was rebuilt).
    `reason` says in a word why it was refused or aborted; of one that was refused before it was read `prompt_tokens` is 0.
    `tenant` is the name of its API key.
    """

    request_id: str
    arrival: float
    prompt_tokens: int
    output_tokens: int
    outcome: str
    epoch: int
    end_epoch: int
    first_scheduled: float | None = None
    first_token: float | None = None
    end: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    priority: int = 0
    max_tokens: int = 0
    prefix_hashes: tuple[int, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    delayed_by: Mapping[str, float] = field(default_factory=dict)
    preempted_by: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One engine step: when it ended (Unix seconds), how long it took (seconds) and its size (see `plan.StepShape`)."""

    end: float
    duration: float
    epoch: int
    decode_tokens: int
    prefill_tokens: int
    context_tokens: int
    prefill_attention: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Gauges:
    """The engine now. KV figures are blocks; `slot_steps` sums maxNumSeqs over all steps, `slot_steps_busy` those in use.

    `prefix_queries` are prompt tokens that were looked up in the prefix cache, `prefix_hits` those found there.
    `draft_tokens` were guessed, in `draft_checks` portions of a sequence and a step each; `accepted_drafts` were right.
    """

    running: int = 0
    waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    preemptions: int = 0
    slot_steps: int = 0
    slot_steps_busy: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    draft_checks: int = 0
    draft_tokens: int = 0
    accepted_drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepModelDocument:
    """A fitted step-time model, also the file of `--device clock --step-model FILE`.

    Seconds = `constant` + Σ coefficient × feature, with the features of `plan.StepShape`. `seen` gives per feature the
    range (low, high) it was fitted on, `residual` the relative error at the 90th percentile, `steps` how many it saw.
    `uneven` is for the clock only: what its device does that no linear model says (see `uneven.py`).
    """

    constant: float
    decode_tokens: float
    prefill_tokens: float
    context_tokens: float
    prefill_attention: float
    residual: float = 0.0
    steps: int = 0
    seen: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    uneven: Mapping[str, float] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class ObserveDocument:
    """Answer of `GET /admin/observe?since=CURSOR`: everything new since the cursor, oldest first, bounded in size.

    `instance` changes when the engine restarts: a cursor of another instance starts from the oldest record kept.
    `now` is the pod's clock (Unix seconds). `truncated` says that records between the cursor and the first one were lost.
    """

    instance: str
    cursor: int
    now: float
    epoch: int
    revision: int
    gauges: Gauges
    requests: tuple[RequestRecord, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    step_model: StepModelDocument | None = None
    truncated: bool = False
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class TimelineMember:
    """A request's share of a step: how many tokens, and whether they are of its prompt (or recomputed)."""

    request_id: str
    tokens: int
    prefill: bool


@dataclass(frozen=True, slots=True)
class TimelineStep:
    """One step with its members: number since the engine's start, end (Unix seconds), seconds, knob epoch."""

    step: int
    end: float
    duration: float
    epoch: int
    members: tuple[TimelineMember, ...]


@dataclass(frozen=True, slots=True)
class TimelineDocument:
    """Answer of `GET /admin/timeline?since=STEP`: the last steps with who was in them, oldest first.

    Steps are recorded while somebody looks: each look keeps it on for `recording_seconds`. `cursor` is the newest step.
    """

    instance: str
    cursor: int
    now: float
    recording_seconds: float
    steps: tuple[TimelineStep, ...] = ()
    schema_version: int = SCHEMA_VERSION


def to_json(document: Any) -> Any:
    """Return `document` (a dataclass of this module) as JSON-ready data with camelCase names."""
    if dataclasses.is_dataclass(document) and not isinstance(document, type):
        return {_camel(f.name): to_json(getattr(document, f.name)) for f in dataclasses.fields(document)}
    if isinstance(document, Mapping):
        return {key: to_json(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [to_json(value) for value in document]
    return document


def from_json(kind: type[T], data: Any) -> T:
    """Return `data` (parsed JSON) as the dataclass `kind`. Raises `FormatError` that names the field."""
    if not isinstance(data, Mapping):
        raise FormatError(f"{kind.__name__} must be a JSON object, got {type(data).__name__}")
    values, missing = {}, []
    hints = _hints(typing.cast("Hashable", kind))
    for spec in dataclasses.fields(kind):  # type: ignore[arg-type]  # kind is a dataclass of this module
        name = _camel(spec.name)
        if name in data:
            values[spec.name] = _decode(hints[spec.name], data[name], f"{kind.__name__}.{name}")
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            missing.append(name)
    if missing:
        raise FormatError(f"{kind.__name__} lacks the field{'s' * (len(missing) > 1)} {', '.join(missing)}")
    if values.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise FormatError(f"{kind.__name__} has schema version {values['schema_version']}, this code reads {SCHEMA_VERSION}")
    return kind(**values)


@cache
def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


@cache
def _hints(kind: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        return _decode(next(a for a in args if a is not type(None)), value, where)
    if origin is tuple:
        return _decode_tuple(args, value, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise FormatError(f"{where} must be an object, got {type(value).__name__}")
        return {key: _decode(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast("type[Any]", hint), value)
    return _decode_scalar(hint, value, where)


def _decode_tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise FormatError(f"{where} must be a list, got {type(value).__name__}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(args):
        raise FormatError(f"{where} must have {len(args)} items, got {len(value)}")
    return tuple(_decode(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, value, strict=True)))


def _decode_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    accepted = (int, float) if hint is float else hint
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise FormatError(f"{where} must be {hint.__name__}, got {value!r}")
    return float(value) if hint is float else value
