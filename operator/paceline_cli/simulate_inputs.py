"""What `paceline simulate` and `paceline plan` are given: traffic, settings and engines, read from options and files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline_core.durations import parse_duration
from paceline_core.errors import FormatError
from paceline_core.knobs import Knobs, knob, knobs_from_wire
from paceline_core.step_time import StepModel
from paceline_core.wire import StepModelDocument, from_json
from paceline_sim import Engine, Roofline, Slo, Trace, read_trace, sweep_values
from paceline_sim.generate import Lengths, Prefixes, bursty
from paceline_sim.hardware import DTYPES, find_accelerator, find_model

__all__ = [
    "FixedPool",
    "measured_engine",
    "parse_changes",
    "parse_generator",
    "parse_settings",
    "read_knobs",
    "read_traffic",
    "roofline_engine",
]

_GENERATOR = "rate=5,duration=10m,prompt=500/2000/8000,output=200/600/1000"
_KEYS = ("rate", "duration", "prompt", "output", "burst", "every", "prefixes", "prefix", "seed")


@dataclass(frozen=True, slots=True)
class FixedPool:
    """A KV pool of a known number of blocks, whatever the knobs say."""

    blocks: int

    def __call__(self, block_size: int, kv_memory_fraction: float) -> int:
        """Return the number of blocks."""
        return self.blocks


def roofline_engine(
    model: str, accelerator: str, dtype: str, efficiency: float, max_model_len: int | None, depth: int
) -> Engine:
    """Return an engine whose steps take what the roofline says. Raises `FormatError`, also if the model doesn't fit."""
    shape = find_model(model)
    roofline = Roofline(shape, find_accelerator(accelerator), DTYPES[dtype], efficiency)
    roofline.num_blocks(Knobs().block_size, 1.0)  # says so at once if it doesn't fit
    return Engine(roofline, roofline.num_blocks, max_model_len or shape.max_len, depth)


def measured_engine(path: Path, kv_blocks: int | None, max_model_len: int | None, depth: int) -> Engine:
    """Return an engine whose step times were measured: `path` holds a `StepModelDocument`, or what `/admin/observe` says."""
    if kv_blocks is None or max_model_len is None:
        raise FormatError("--step-model needs --kv-blocks and --max-model-len: they don't follow from step times")
    data = _load(path)
    document = data.get("stepModel") or data
    try:
        model = StepModel.from_document(from_json(StepModelDocument, document))
    except FormatError as error:
        raise FormatError(f"{path.name}: {error}") from None
    return Engine(model, FixedPool(kv_blocks), max_model_len, depth)


def read_traffic(path: Path | None, generator: str | None, start: str, length: str) -> Trace:
    """Return the trace of a file or of a generator's description, cut to a window of time."""
    trace = read_trace(path) if path is not None else parse_generator(generator or _GENERATOR)
    if start == "0s" and length == "never":
        return trace
    return trace.window(_duration("--from", start), _duration("--for", length))


def read_knobs(path: Path | None, changes: Mapping[str, Any], slo: Slo) -> Knobs:
    """Return the defaults, with what a file says, with `changes` (wire form) on top.

    The file is a knobs file of the runtime (`{"knobs": {…}}`) or an InferenceService; strategy iteration is given the
    objectives of `slo` where neither names any. Raises `FormatError` and `KnobError`.
    """
    values: dict[str, Any] = {}
    objectives = (("sloTtft", slo.ttft), ("sloTpot", slo.tpot))
    values |= {name: knob(name).to_wire(seconds) for name, seconds in objectives if seconds is not None}
    if path is not None:
        values |= _knobs_in(_load(path), path)
    return knobs_from_wire(values | dict(changes))


def parse_changes(option: str, items: Sequence[str]) -> dict[str, list[Any]]:
    """Read `knob=value` (or a sweep's values) of a repeatable option. Raises `FormatError` that quotes the item."""
    changes: dict[str, list[Any]] = {}
    for item in items:
        name, equals, values = item.partition("=")
        if not equals or not values:
            raise FormatError(f"{option} {item}: expected KNOB=VALUE, as in maxNumSeqs=64")
        if name in changes:
            raise FormatError(f"{option} {name} is given twice")
        try:
            changes[name] = sweep_values(name, values)
        except FormatError as error:
            raise FormatError(f"{option} {error}") from None
    return changes


def parse_settings(items: Sequence[str]) -> dict[str, Any]:
    """Read `knob=value` of the option `--set`. Raises `FormatError` that quotes the item."""
    settings: dict[str, Any] = {}
    for name, values in parse_changes("--set", items).items():
        lists = knob(name).kind == "ints"
        if len(values) > 1 and not lists:
            raise FormatError(f"--set {name}: expected one value; --compare and --sweep take several")
        settings[name] = [number for value in values for number in value] if lists else values[0]
    return settings


def parse_generator(text: str) -> Trace:
    """Make the traffic that `text` describes. Raises `FormatError` that names the part."""
    parts: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in _KEYS or not equals or name in parts:
            raise FormatError(
                f"--generate: {part.strip()!r}, expected each of {', '.join(_KEYS)} at most once, as in {_GENERATOR}"
            )
        parts[name] = value
    number = _reader(parts, float, "a number")
    whole = _reader(parts, int, "a whole number")
    groups, shared = whole("prefixes", 0), whole("prefix", 0)
    return bursty(
        number("rate", 5.0),
        _duration("--generate duration", parts.get("duration", "10m")),
        _lengths("prompt", parts.get("prompt", "500/2000/8000")),
        _lengths("output", parts.get("output", "200/600/1000")),
        burst=number("burst", 1.0),
        every=_duration("--generate every", parts.get("every", "1m")),
        prefixes=Prefixes(groups, shared) if groups and shared else None,
        seed=whole("seed", 0),
    )


def _reader(parts: Mapping[str, str], kind: Callable[[str], Any], expected: str) -> Callable[[str, float], Any]:
    def read(name: str, default: float) -> Any:
        text = parts.get(name)
        if text is None:
            return default
        try:
            value = kind(text)
        except ValueError:
            value = -1
        if not 0 <= value < float("inf"):
            raise FormatError(f"--generate {name}={text}: expected {expected} ≥ 0, as in {_GENERATOR}")
        return value

    return read


def _lengths(name: str, text: str) -> Lengths:
    """Read `n` (always n tokens) or `p50/p95/most`."""
    items = text.split("/")
    if not all(item.isdigit() and len(item) < 8 for item in items) or len(items) not in (1, 3):
        raise FormatError(f"--generate {name}={text}: expected tokens, as in 500, or P50/P95/MOST, as in 500/2000/8000")
    lengths = [int(item) for item in items]
    if len(lengths) == 1:
        return Lengths({100: lengths[0]}, least=lengths[0])
    return Lengths({50: lengths[0], 95: lengths[1], 100: lengths[2]}, least=max(1, lengths[0] // 10))


def _duration(option: str, text: str) -> float:
    try:
        return parse_duration(text)
    except FormatError as error:
        raise FormatError(f"{option}: {error}") from None


def _load(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise FormatError(f"can't read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise FormatError(f"{path.name} is neither JSON nor YAML: {error}") from None
    if not isinstance(data, dict):
        raise FormatError(f"{path.name}: expected a mapping at the top")
    return data


def _knobs_in(data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the knobs of a knobs file, or of an InferenceService's batching and objectives."""
    if "knobs" in data:
        return _mapping(data["knobs"], path, "knobs")
    if "spec" not in data:
        raise FormatError(f"{path.name}: expected knobs (a knobs file) or spec (an InferenceService) at the top")
    spec = _mapping(data["spec"], path, "spec")
    slo = _mapping(spec.get("slo"), path, "spec.slo")
    objectives = {name: slo[field] for name, field in (("sloTtft", "ttft"), ("sloTpot", "tpot")) if field in slo}
    return objectives | _mapping(spec.get("batching"), path, "spec.batching")


def _mapping(value: Any, path: Path, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FormatError(f"{path.name}: {where} is {value!r}, expected a mapping")
    return value
