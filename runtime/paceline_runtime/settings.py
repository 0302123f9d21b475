"""Settings of a runtime: what the command line, the knob files and the environment come to. Frozen, checked, explicit."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline_core.errors import FormatError, KnobError, PacelineError
from paceline_core.knobs import Knobs, knobs_from_wire
from paceline_core.uneven import UnevenDevice
from paceline_core.wire import StepModelDocument, from_json

__all__ = [
    "STEP_MODEL_EXAMPLE",
    "EngineSettings",
    "RuntimeSettings",
    "SettingsError",
    "cpu_threads",
    "merge_knobs",
    "read_step_model",
]

logger = logging.getLogger(__name__)

STEP_MODEL_EXAMPLE = (
    '{"constant": 0.01, "decodeTokens": 1e-4, "prefillTokens": 1e-4, "contextTokens": 0, "prefillAttention": 0}'
)


class SettingsError(PacelineError):
    """A flag, file or environment variable that can't be used; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine process needs; crosses the process border as JSON.

    `knobs` are complete and in wire form. `gpu_memory_utilization` (share of the device's whole memory, as in vLLM) replaces
    the knob kvMemoryFraction for the size of the first pool. `num_blocks` overrides the size of the pool altogether.
    `kernels` is one of `paceline_kernels.KERNELS`; `tensor_parallel_size` processes share the model, one per GPU.
    `first_epoch` is the knob epoch that it starts with.
    """

    model: str | None
    knobs: Mapping[str, Any]
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    num_blocks: int | None = None
    step_model: StepModelDocument | None = None
    seed: int = 0
    threads: int = 1
    pipeline_depth: int | None = None
    kernels: str = "auto"
    tensor_parallel_size: int = 1
    first_epoch: int = 0
    log_format: str = "text"


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """What the API process needs. Times are seconds, sizes bytes.

    Without `admin_token_file` there is no admin port. `max_queue_len` bounds the requests that wait for a slot,
    `hang_timeout` is how long one step may take before the pod counts as hung, `max_queue_wait` the longest predicted wait
    for a slot with which a request is still taken, `read_timeout` how long a client may leave unread what it is sent, and
    `slow_request` the latency above which the log says where the time went. `otlp_traces_endpoint` is where traces go.
    """

    engine: EngineSettings
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    admin_port: int = 9000
    admin_token_file: Path | None = None
    drain_propagation: float = 5.0
    drain_timeout: float = 30.0
    hang_timeout: float = 300.0
    max_queue_len: int = 1024
    max_queue_wait: float = 300.0
    max_body_bytes: int = 8 << 20
    read_timeout: float = 60.0
    slow_request: float = 30.0
    api_key_file: Path | None = None
    otlp_traces_endpoint: str | None = None
    start_knobs: Knobs = field(default_factory=Knobs)


def merge_knobs(files: Sequence[Path], flags: Mapping[str, Any]) -> Knobs:
    """Return the knobs of files (later wins, a missing one says nothing) under flags (wire names; they win over files).

    A file may state the `specHash` that it was made for; one whose hash differs from that of an earlier file is left out:
    it tunes a spec that isn't in force any more.

    Raises `SettingsError` for a file that can't be read as `{"knobs": {…}}` or that holds a bad knob, `KnobError` for flags.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Path] = {}
    spec_hash: Any = None
    for path in files:
        document = _read_knobs_file(path)
        found, stated = document.get("knobs", {}), document.get("specHash")
        if None not in (spec_hash, stated) and stated != spec_hash:
            logger.info("%s was made for another spec (%s, not %s): left out", path, stated, spec_hash)
            continue
        spec_hash = spec_hash or stated
        values.update(found)
        origins.update(dict.fromkeys(found, path))
    try:
        return knobs_from_wire({**values, **flags})
    except KnobError as error:
        guilty = {str(origins[v.field]) for v in error.violations if v.field in origins and v.field not in flags}
        if not guilty:
            raise
        raise SettingsError(f"{error} (in {', '.join(sorted(guilty))})") from None


def _read_knobs_file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}  # an optional ConfigMap that doesn't exist (yet)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"can't read the knobs file {path}: {error}") from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"the knobs file {path} isn't JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("knobs"), dict):
        raise SettingsError(f'the knobs file {path} must look like {{"knobs": {{"maxNumSeqs": 64}}}}')
    return data


def read_step_model(path: Path) -> StepModelDocument:
    """Return the step-time model in a JSON file. Raises `SettingsError`."""
    try:
        document = from_json(StepModelDocument, json.loads(path.read_text(encoding="utf-8")))
        UnevenDevice.from_document(document)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"can't read the step model {path}: {error}") from None
    except (ValueError, RecursionError, FormatError) as error:
        raise SettingsError(f"the step model {path} can't be used: {error}") from None
    return document


def cpu_threads(environment: Mapping[str, str], cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many threads to compute with: the smallest of this process's CPUs, its cgroup's quota and the pod's limit.

    The pod's limit is `PACELINE_CPU_LIMIT` (downward API: whole CPUs, rounded up by the kubelet). Raises `SettingsError`.
    """
    limits = [float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)]
    if text := environment.get("PACELINE_CPU_LIMIT"):
        try:
            limits.append(float(text))
        except ValueError:
            raise SettingsError(f"PACELINE_CPU_LIMIT={text!r} must be a number of CPUs, as in 2") from None
    limits.append(_cgroup_cpus(cgroup))
    return max(1, math.floor(min(limit for limit in limits if limit > 0)))


def _cgroup_cpus(path: Path) -> float:
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf  # no cgroup v2 here, or none of ours: no limit known
