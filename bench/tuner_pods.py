"""Services on pods under `paceline local` for the tuner's benchmarks: a stack, one service at a time, what came of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline_cli.fleet import Fleet

__all__ = ["Run", "Seen", "Stack", "errors_of", "kept", "run"]

READY = 180.0  # seconds; real pods load a model
_LONGEST = 200  # characters of an error
SLICE = 5.0  # seconds of one point of a run's series


class Seen(Protocol):
    """One request as its client saw it."""

    at: float

    @property
    def good(self) -> bool: ...
    @property
    def failed(self) -> bool: ...
    @property
    def error(self) -> str: ...


class Load(Protocol):
    """Traffic while it is entered."""

    seconds: float
    sent: Sequence[Seen]

    def __enter__(self) -> Load: ...
    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Run:
    """One scenario under one setting. `goodput` (requests/s) and `attainment` are of the judged part, `overall` of all.

    `rate` is that of the traffic (requests/s) where it was the same throughout, else 0. `series` holds requests in time and
    all requests per five seconds, `story` what the status said and when, `errors` what failed requests were told, when the
    first of them was sent (seconds), and how many were told so.
    """

    scenario: str
    setting: str
    goodput: float
    attainment: float
    overall: float
    requests: int
    failed: int
    changes: int
    final: str
    restarts: int = 0
    load: float = 0.0
    rate: float = 0.0
    series: Sequence[Sequence[int]] = ()
    story: Sequence[str] = field(default=())
    errors: Sequence[str] = field(default=())


class Stack:
    """A local stack of its own in `folder`, with the tuner at `interval` seconds; `PACELINE_TUNING_LOG` may name its log."""

    def __init__(self, folder: Path, interval: float) -> None:
        self.folder, self._home = folder, folder / "home"
        self._env = os.environ | {"PACELINE_HOME": str(self._home), "PACELINE_TUNING_INTERVAL": str(interval)}

    def __enter__(self) -> Stack:
        self.paceline("local", "up")
        return self

    def __exit__(self, *_: object) -> None:
        self.paceline("local", "down", "--keep-state")

    def paceline(self, *args: str) -> None:
        """Run a subcommand."""
        subprocess.run([sys.executable, "-m", "paceline_cli", *args], env=self._env, check=True, stdout=subprocess.DEVNULL)

    def start(self, manifest: Mapping[str, Any]) -> Fleet:
        """Apply an InferenceService and wait until it is Ready."""
        name = manifest["metadata"]["name"]
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(manifest), encoding="utf-8")
        self.paceline("local", "apply", "-f", str(path))
        fleet = Fleet(self._home / "kubeconfig", name)
        deadline = time.monotonic() + READY
        while fleet.conditions().get("Ready", {}).get("status") != "True":
            if time.monotonic() > deadline:
                raise SystemExit(f"{name} didn't become Ready: {fleet.conditions().get('Ready')}")
            time.sleep(0.5)
        return fleet

    def remove(self, name: str) -> None:
        """Delete a service."""
        self.paceline("local", "delete", "infsvc", name)


def run(
    stack: Stack, manifest: Mapping[str, Any], load: Callable[[Fleet], Load], *, scenario: str, setting: str,
    seconds: float, judged: float, rate: float = 0.0,
) -> Run:  # fmt: skip
    """Start a service, put a load on it for `seconds`, remove it. Goodput counts from `judged` seconds on."""
    fleet, story = stack.start(manifest), list[str]()
    with load(fleet) as traffic:
        while traffic.seconds < seconds:
            _tell(fleet, traffic.seconds, story)
            time.sleep(1.0)
    service, pods = fleet.get(), fleet.pods()
    stack.remove(fleet.name)
    status = service.get("status", {})
    part = [s for s in traffic.sent if judged <= s.at < seconds]
    good = sum(s.good for s in part)
    effective = status.get("effective", {})
    return Run(
        scenario=scenario,
        setting=setting,
        goodput=good / (seconds - judged),
        attainment=good / max(1, len(part)),
        overall=sum(s.good for s in traffic.sent) / max(1, len(traffic.sent)),
        requests=len(traffic.sent),
        failed=sum(s.failed for s in traffic.sent),
        changes=len(status.get("tuning", {}).get("history", [])),
        final="/".join(str(effective.get(k, {}).get("value")) for k in ("maxNumSeqs", "maxNumBatchedTokens")),
        restarts=sum(pod.restarts for pod in pods),
        load=os.getloadavg()[0],
        rate=rate,
        series=_series(traffic.sent, seconds),
        story=story,
        errors=errors_of(traffic.sent),
    )


def _tell(fleet: Fleet, seconds: float, story: list[str]) -> None:
    tuning = fleet.get().get("status", {}).get("tuning", {})
    if tuning.get("mode") != "Auto":
        return
    line = f"{tuning.get('state')} {tuning.get('reason')}: {tuning.get('message')}"
    if not story or not story[-1].endswith(line):
        story.append(f"{seconds:.0f} s {line}")
        print(f"  {story[-1]}", file=sys.stderr, flush=True)


def errors_of(sent: Sequence[Seen]) -> list[str]:
    """Return in words what failed requests were told: figures in it apart, the same text counts as one."""
    found: dict[str, list[float]] = {}
    for s in sent:
        if s.failed:
            found.setdefault(re.sub(r"\d+(\.\d+)?", "#", s.error)[:_LONGEST], []).append(s.at)
    return [f"{len(at)} from {min(at):.0f} to {max(at):.0f} s: {text}" for text, at in found.items()]


def _series(sent: Sequence[Seen], seconds: float) -> list[list[int]]:
    found = [[0, 0] for _ in range(int(seconds // SLICE))]
    for s in sent:
        if (number := int(s.at // SLICE)) < len(found):
            found[number][0] += s.good
            found[number][1] += 1
    return found


def kept(path: Path) -> list[Run]:
    """Return the runs that earlier goes have finished."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Run(**json.loads(line)) for line in lines]
