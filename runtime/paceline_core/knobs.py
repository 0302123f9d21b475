"""The knobs: one typed table of everything that may be tuned, with bounds, defaults and the cost of a change.

The admin API, the CRD, the ConfigMaps, the command line, the twin and the tuner all read this table, so a knob is
described once. Wire names are camelCase (`maxNumSeqs`), attributes of `Knobs` are snake_case (`max_num_seqs`).
On the wire durations are texts with a unit (`50ms`); in `Knobs` they are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from paceline_core.durations import format_duration, parse_duration
from paceline_core.errors import FormatError, KnobError, KnobViolation

__all__ = ["KNOBS", "CostClass", "KnobSpec", "Knobs", "Strategy", "change_cost", "knob", "knobs_from_wire", "knobs_to_wire"]


class Strategy(StrEnum):
    """How requests are grouped into batches (DESIGN §2)."""

    STATIC = "static"
    DYNAMIC = "dynamic"
    CONTINUOUS = "continuous"
    ITERATION = "iteration"


class CostClass(StrEnum):
    """What a change costs a running engine."""

    STEP = "step"  # applies at the next step boundary, nobody notices
    PAUSE = "pause"  # the KV pool is rebuilt in place: some sequences are recomputed, nobody sees an error
    RESTART = "restart"  # sizes buffers or weights: a new process


@dataclass(frozen=True, slots=True)
class Knobs:
    """One consistent setting of every knob. Durations are seconds, sizes are tokens, counts are sequences."""

    strategy: Strategy = Strategy.CONTINUOUS
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_queue_delay: float = 0.05
    preferred_batch_sizes: tuple[int, ...] = ()
    static_flush: float = 1.0
    long_prefill_threshold: int = 2048
    prefix_caching: bool = True
    speculative: int = 0
    slo_ttft: float | None = None
    slo_tpot: float | None = None
    kv_memory_fraction: float = 0.9
    max_num_seqs_limit: int = 256
    block_size: int = 16

    def __post_init__(self) -> None:
        violations = tuple(v for spec in KNOBS for v in spec.violations(getattr(self, spec.attribute)))
        violations = violations or tuple(_cross_violations(self))
        if violations:
            raise KnobError(violations)

    def updated(self, changes: Mapping[str, Any]) -> Knobs:
        """Return these knobs with `changes` (wire names and wire values) applied, validated as a whole.

        Raises `KnobError` that lists every unknown name and every bad value.
        """
        violations: list[KnobViolation] = []
        parsed: dict[str, Any] = {}
        for name, value in changes.items():
            spec = _BY_NAME.get(name)
            if spec is None:
                violations.append(KnobViolation(name, value, "the known knobs", f"use one of {', '.join(_BY_NAME)}"))
                continue
            try:
                parsed[spec.attribute] = spec.parse(value)
            except KnobError as error:
                violations.extend(error.violations)
        if violations:
            raise KnobError(tuple(violations))
        return replace(self, **parsed)


@dataclass(frozen=True, slots=True)
class KnobSpec:
    """One row of the table: name, type, unit, bounds, default and what a change costs.

    `kind` is one of `enum`, `int`, `float`, `bool`, `duration`, `ints`. `low` and `high` are inclusive, in seconds for
    durations. `nullable` knobs accept null, which switches their effect off.
    """

    name: str
    attribute: str
    kind: str
    unit: str
    cost: CostClass
    description: str
    low: float | None = None
    high: float | None = None
    low_exclusive: bool = False
    nullable: bool = False

    @property
    def default(self) -> Any:
        """The default in Python form."""
        return Knobs.__dataclass_fields__[self.attribute].default

    @property
    def bound(self) -> str:
        """The allowed values in words."""
        if self.kind == "enum":
            return "one of " + ", ".join(s.value for s in Strategy)
        if self.kind == "bool":
            return "true or false"
        text = format_duration if self.kind == "duration" else str
        less = "<" if self.low_exclusive else "≤"
        what = "each value" if self.kind == "ints" else "value"
        assert self.low is not None and self.high is not None, self.name
        return f"{text(self.low)} {less} {what} ≤ {text(self.high)}"

    def parse(self, value: Any) -> Any:
        """Turn a wire value into its Python form. Raises `KnobError` on a wrong type or a value out of bounds."""
        if value is None and self.nullable:
            return None
        try:
            parsed = _PARSERS[self.kind](value)
        except (TypeError, ValueError, OverflowError, FormatError):
            remedy = f"give {_EXAMPLES[self.kind]}"
            raise KnobError((KnobViolation(self.name, value, f"type {self.kind}", remedy),)) from None
        violations = self.violations(parsed)
        if violations:
            raise KnobError(violations)
        return parsed

    def to_wire(self, value: Any) -> Any:
        """Turn a Python value into its wire form."""
        if value is None:
            return None
        if self.kind == "duration":
            return format_duration(value)
        if self.kind == "ints":
            return list(value)
        return value.value if self.kind == "enum" else value

    def violations(self, value: Any) -> tuple[KnobViolation, ...]:
        """Return the bounds that a Python value breaks (none if it is fine)."""
        if value is None and self.nullable:
            return ()
        # an infinite staticFlush is "never": a group waits until it is full, as the teaching examples want it
        values = value if self.kind == "ints" else (value,)
        if self.low is None or self.high is None or all(self._inside(v) for v in values):
            return ()
        shown = value if value != value else self.to_wire(value)  # NaN has no wire form
        return (KnobViolation(self.name, shown, self.bound, "choose a value inside the bound"),)

    def _inside(self, value: float) -> bool:
        assert self.low is not None and self.high is not None, self.name
        if value != value:  # NaN; `math.isnan` fails on a whole number that no float can hold
            return False
        if self.name == "staticFlush" and math.isinf(value):
            return value > 0
        return (value > self.low if self.low_exclusive else value >= self.low) and value <= self.high


def _parse_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(value)
    return value


def _parse_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(value)
    return float(value)


def _parse_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(value)
    return value


def _parse_ints(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(value)
    return tuple(sorted({_parse_int(v) for v in value}))


_PARSERS: dict[str, Any] = {
    "enum": Strategy,
    "int": _parse_int,
    "float": _parse_float,
    "bool": _parse_bool,
    "duration": parse_duration,
    "ints": _parse_ints,
}
_EXAMPLES = {
    "enum": "one of " + ", ".join(s.value for s in Strategy),
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "duration": "a number with a unit, as in '50ms'",
    "ints": "a list of whole numbers, as in [4, 8]",
}
_STEP, _PAUSE, _RESTART = CostClass.STEP, CostClass.PAUSE, CostClass.RESTART
_HOUR = 3600.0
_MAX_SEQS = 65_536
_MAX_TOKENS = 1 << 20

KNOBS: tuple[KnobSpec, ...] = (
    KnobSpec("strategy", "strategy", "enum", "", _STEP, "How requests are grouped into batches."),
    KnobSpec("maxNumSeqs", "max_num_seqs", "int", "sequences", _STEP,
             "Most sequences in one step (slots). Never above maxNumSeqsLimit.", 1, _MAX_SEQS),
    KnobSpec("maxNumBatchedTokens", "max_num_batched_tokens", "int", "tokens", _STEP,
             "Token budget of one step: decodes first, then chunks of prefill. Never below maxNumSeqs.", 1, _MAX_TOKENS),
    KnobSpec("maxQueueDelay", "max_queue_delay", "duration", "seconds", _STEP,
             "Strategy dynamic: the longest that the oldest request waits for a batch to fill.", 0, _HOUR),
    KnobSpec("preferredBatchSizes", "preferred_batch_sizes", "ints", "sequences", _STEP,
             "Strategy dynamic: start at once when this many requests wait.", 1, _MAX_SEQS),
    KnobSpec("staticFlush", "static_flush", "duration", "seconds", _STEP,
             "Strategy static: start a batch that isn't full when its oldest request has waited this long.", 0, _HOUR),
    KnobSpec("longPrefillThreshold", "long_prefill_threshold", "int", "tokens", _STEP,
             "Most prefill tokens that one sequence takes of a step while others want tokens too.", 1, _MAX_TOKENS),
    KnobSpec("prefixCaching", "prefix_caching", "bool", "", _STEP, "Reuse the KV blocks of equal prompt prefixes."),
    KnobSpec("speculative", "speculative", "int", "tokens", _STEP,
             "Most tokens guessed ahead per sequence and step by prompt lookup; 0: none. So far on CPUs only.", 0, 16),
    KnobSpec("sloTtft", "slo_ttft", "duration", "seconds", _STEP,
             "Strategy iteration: objective for the time to the first token.", 0, _HOUR, low_exclusive=True, nullable=True),
    KnobSpec("sloTpot", "slo_tpot", "duration", "seconds", _STEP,
             "Strategy iteration: objective for the time per output token after the first.", 0, _HOUR,
             low_exclusive=True, nullable=True),
    KnobSpec("kvMemoryFraction", "kv_memory_fraction", "float", "fraction", _PAUSE,
             "Share of the memory left after weights and peak activations that the KV cache takes.", 0, 1,
             low_exclusive=True),
    KnobSpec("maxNumSeqsLimit", "max_num_seqs_limit", "int", "sequences", _RESTART,
             "The envelope of maxNumSeqs that buffers are sized for.", 1, _MAX_SEQS),
    KnobSpec("blockSize", "block_size", "int", "tokens", _RESTART, "Tokens of one KV block.", 1, 256),
)  # fmt: skip
_BY_NAME = {spec.name: spec for spec in KNOBS}


def knob(name: str) -> KnobSpec:
    """Return the row of a wire name. Raises `KeyError` if there is none."""
    return _BY_NAME[name]


def knobs_from_wire(values: Mapping[str, Any]) -> Knobs:
    """Return the defaults with `values` (wire names and values) on top; a budget or limit that was left out follows.

    `maxNumSeqsLimit` rises to `maxNumSeqs` and `maxNumBatchedTokens` to `maxNumSeqs` where only the latter was given, so
    that `{"maxNumSeqs": 512}` is a complete statement. Raises `KnobError`.
    """
    given = dict(values)
    seqs = given.get("maxNumSeqs")
    if isinstance(seqs, int) and not isinstance(seqs, bool):
        given.setdefault("maxNumSeqsLimit", max(seqs, _DEFAULTS.max_num_seqs_limit))
        given.setdefault("maxNumBatchedTokens", max(seqs, _DEFAULTS.max_num_batched_tokens))
    elif isinstance(limit := given.get("maxNumSeqsLimit"), int) and not isinstance(limit, bool) and limit >= 1:
        given["maxNumSeqs"] = min(limit, _DEFAULTS.max_num_seqs)
    return Knobs().updated(given)


def knobs_to_wire(knobs: Knobs) -> dict[str, Any]:
    """Return every knob under its wire name, in wire form (JSON-ready)."""
    return {spec.name: spec.to_wire(getattr(knobs, spec.attribute)) for spec in KNOBS}


def change_cost(old: Knobs, new: Knobs) -> CostClass | None:
    """Return the dearest cost class among the knobs that differ, or None if nothing does."""
    costs = {spec.cost for spec in KNOBS if getattr(old, spec.attribute) != getattr(new, spec.attribute)}
    return next((cost for cost in (_RESTART, _PAUSE, _STEP) if cost in costs), None)


def _cross_violations(knobs: Knobs) -> list[KnobViolation]:
    """Return the rules between knobs that are broken."""
    violations = []
    if knobs.max_num_seqs > knobs.max_num_seqs_limit:
        remedy = "lower maxNumSeqs, or raise maxNumSeqsLimit (which restarts the pods)"
        bound = f"maxNumSeqs ≤ maxNumSeqsLimit ({knobs.max_num_seqs_limit})"
        violations.append(KnobViolation("maxNumSeqs", knobs.max_num_seqs, bound, remedy))
    if knobs.max_num_batched_tokens < knobs.max_num_seqs:
        bound = f"maxNumBatchedTokens ≥ maxNumSeqs ({knobs.max_num_seqs})"
        remedy = "raise maxNumBatchedTokens or lower maxNumSeqs: every running sequence needs a token per step"
        violations.append(KnobViolation("maxNumBatchedTokens", knobs.max_num_batched_tokens, bound, remedy))
    return violations


_DEFAULTS = Knobs()  # last: building one runs the checks above
