"""What is known of a container, as frozen data, and how the API shows it. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import Any

from paceline_local.manifests import Manifest, timestamp
from paceline_local.processes import ProcessId

__all__ = ["ContainerState", "Termination", "Waiting", "container_status", "exit_of", "should_restart"]

_UNKNOWN_EXIT = 137  # what a kubelet reports for a container whose end it didn't see


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a container doesn't run now."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Termination:
    """How a run ended; times in Unix seconds."""

    exit_code: int
    reason: str
    message: str
    started_at: float
    finished_at: float


@dataclass(frozen=True, slots=True)
class ContainerState:
    """One container: it waits, or runs (`process` is set), or has ended for good (`ended` is set and nothing else)."""

    waiting: Waiting | None = Waiting("ContainerCreating")
    process: ProcessId | None = None
    started_at: float = 0.0
    ended: Termination | None = None
    last: Termination | None = None
    restarts: int = 0
    started: bool = False
    ready: bool = False

    def running(self, process: ProcessId, now: float, *, started: bool, ready: bool) -> ContainerState:
        """Return the state after a start; a container that ran before counts a restart."""
        restarts = self.restarts + (self.last is not None)
        return replace(
            self, waiting=None, process=process, started_at=now, ended=None, restarts=restarts, started=started, ready=ready
        )

    def terminated(self, end: Termination) -> ContainerState:
        """Return the state right after an end."""
        return replace(self, waiting=None, process=None, ended=end, last=end, started=False, ready=False)

    def waits(self, waiting: Waiting) -> ContainerState:
        """Return the state while it can't start (again) yet."""
        return replace(self, waiting=waiting, process=None, ended=None, started=False, ready=False)


def exit_of(code: int | None, message: str, started_at: float, now: float) -> Termination:
    """Return how a run ended, from a process's exit code: negative for a signal, None if nobody saw it."""
    if code is None:
        text = message or "the node agent was restarted meanwhile, so nobody saw how the process ended"
        return Termination(_UNKNOWN_EXIT, "ContainerStatusUnknown", text, started_at, now)
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return Termination(128 - code, "Error", message or f"ended by {name}", started_at, now)
    return Termination(code, "Completed" if code == 0 else "Error", message, started_at, now)


def should_restart(policy: str, exit_code: int) -> bool:
    """Whether a container that ended is started again under the pod's restartPolicy."""
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)


def _terminated(end: Termination) -> Manifest:
    shown: dict[str, Any] = {
        "exitCode": end.exit_code,
        "reason": end.reason,
        "startedAt": timestamp(end.started_at),
        "finishedAt": timestamp(end.finished_at),
    }
    return shown | ({"message": end.message} if end.message else {})


def _shown_state(state: ContainerState) -> Manifest:
    if state.process is not None:
        return {"running": {"startedAt": timestamp(state.started_at)}}
    if state.ended is not None:
        return {"terminated": _terminated(state.ended)}
    waiting = state.waiting or Waiting("ContainerCreating")
    return {"waiting": {"reason": waiting.reason} | ({"message": waiting.message} if waiting.message else {})}


def container_status(container: Manifest, state: ContainerState, pod_uid: str) -> Manifest:
    """Return the entry of `status.containerStatuses`."""
    image = container.get("image") or ""
    status: Manifest = {
        "name": container["name"],
        "image": image,
        "imageID": "",
        "restartCount": state.restarts,
        "ready": state.ready,
        "started": state.started,
        "state": _shown_state(state),
        "lastState": {"terminated": _terminated(state.last)} if state.last and state.last is not state.ended else {},
    }
    if state.process is not None:
        status["containerID"] = f"process://{pod_uid}/{state.process.pid}"
    return status
