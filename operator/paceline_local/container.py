"""One container as a local process: start it, probe it, restart it with back-off, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import aiohttp

from paceline_local.backoff import BackOff
from paceline_local.container_record import Record, forget_old_logs, load_record, save_record, tail
from paceline_local.container_state import ContainerState, Waiting, exit_of, should_restart
from paceline_local.errors import ApiUnavailable, ConfigMissing, LocalError
from paceline_local.manifests import Manifest
from paceline_local.probes import Answer, ProbeTracker, Target, ask, rules_of
from paceline_local.processes import Process, end, kill_all, marked, start
from paceline_local.waiting import set_within

__all__ = ["CONTAINER_MARKER", "ContainerRunner", "Launch", "PodHooks", "resolve_command"]

log = logging.getLogger(__name__)
CONTAINER_MARKER = "PACELINE_LOCAL_CONTAINER"  # pod uid/container, in the environment of all its processes
_RETRY_S = 2.0
_EAGER_S = 0.5


@dataclass(frozen=True)
class Launch:
    """All that is needed to start a container."""

    command: list[str]
    env: Mapping[str, str]
    cwd: Path
    target: Target


class PodHooks(Protocol):
    """What a container needs of its pod."""

    folder: Path
    session: aiohttp.ClientSession

    async def launch(self, container: Manifest) -> Launch:
        """Return how to start the container. Raises `ConfigMissing`, `LocalError` or `ApiUnavailable`."""

    def changed(self) -> None:
        """Note that the container's state changed."""

    def note(self, kind: str, reason: str, message: str) -> None:
        """Record an event about the pod."""


def resolve_command(command: list[str], env: Mapping[str, str], cwd: Path) -> list[str]:
    """Return the command with its program's full path. Raises `LocalError` that says what images mean here."""
    if not command:
        raise LocalError("no command given: images are ignored locally, so the container needs a 'command' that is on PATH")
    program = shutil.which(os.fspath(cwd / command[0]) if "/" in command[0] else command[0], path=env.get("PATH", ""))
    if program is None:
        raise LocalError(
            f"command {command[0]!r} not found: images are ignored locally, so it must be on PATH on this machine"
        )
    return [program, *command[1:]]


class ContainerRunner:
    """Runs one container of a pod until it has ended for good or is stopped. `state` is what the API should show."""

    def __init__(
        self, pod_uid: str, container: Manifest, policy: str, grace: float, hooks: PodHooks, *, init: bool = False
    ) -> None:
        self._container, self._hooks, self._grace = container, hooks, grace
        # an init container has its turn once, so under Always, too, only a failure starts it again
        self._policy = "OnFailure" if init and policy == "Always" else policy
        self._init = init
        self.name: str = container["name"]
        self.mark = f"{pod_uid}/{self.name}"
        self._record_path = hooks.folder / "containers" / f"{self.name}.json"
        record = load_record(self._record_path, time.time())
        self.state: ContainerState = record.state
        self._run = record.run
        self._back_off = BackOff(failures=record.failures)
        self._launch: Launch | None = None
        self._process: Process | None = None
        self._stop = asyncio.Event()

    @property
    def log(self) -> Path:
        """The log file of the present run."""
        return self.log_folder / f"{max(self._run, 0)}.log"

    @property
    def log_folder(self) -> Path:
        """The folder of the container's logs, one file per run."""
        return self._hooks.folder / "logs" / self.name

    async def run(self) -> None:
        """Run the container until it has ended for good or is stopped."""
        if self._done():
            return
        while not self._stop.is_set():
            process = self._adopt() or await self._start()
            if process is None:
                return
            code = await self._attend(process)
            self._ended(code)
            if self._done():
                return
            await self._pause()

    async def stop(self, grace: float) -> None:
        """Stop the container: preStop, SIGTERM, and SIGKILL after `grace` seconds. `run` then returns."""
        self._stop.set()
        process = self._process
        if process is None and self.state.process is not None:  # an earlier agent's, not adopted yet
            process = Process(self.state.process)
        if process is not None:
            await self._end(process, grace)
            await asyncio.to_thread(self._end_others)

    def _done(self) -> bool:
        ended = self.state.ended
        return ended is not None and not should_restart(self._policy, ended.exit_code)

    def _adopt(self) -> Process | None:
        """Take over a process that runs already, once."""
        if self.state.process is None or self._process is not None:
            return None
        self._process = Process(self.state.process)
        return self._process

    async def _start(self) -> Process | None:
        """Start the process, again and again until that works; None if the container is stopped before."""
        while not self._stop.is_set():
            try:
                launch = await self._hooks.launch(self._container)
                return None if self._stop.is_set() else self._spawn(launch)
            except ConfigMissing as error:
                self._wait_for("CreateContainerConfigError", str(error))
            except ApiUnavailable as error:
                log.info("%s waits: %s", self.mark, error)
            except (LocalError, OSError, ValueError) as error:  # ValueError: a NUL in an argument or a variable
                self._wait_for("CreateContainerError", str(error))
            await self._sleep(_RETRY_S)
        return None

    def _spawn(self, launch: Launch) -> Process:
        command = resolve_command(launch.command, launch.env, launch.cwd)
        self._end_others()  # whatever an agent started and had no time to write down
        self._run += 1
        process = start(command, dict(launch.env) | {CONTAINER_MARKER: self.mark}, launch.cwd, self.log)
        forget_old_logs(self.log_folder)
        self._launch, self._process = launch, process
        probed = self._container.get("startupProbe") is not None
        ready = not probed and self._container.get("readinessProbe") is None and not self._init
        self._set(self.state.running(process.id, time.time(), started=not probed, ready=ready))
        self._hooks.note("Normal", "Started", f"Started container {self.name} as process {process.id.pid}")
        return process

    async def _attend(self, process: Process) -> int | None:
        """Probe the process until it ends, then end what it left behind; return its exit code."""
        probes = asyncio.create_task(self._probe(process))
        try:
            return await process.wait()
        finally:
            probes.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await probes
            # a container's processes end with its first one, as they do in a PID namespace
            await asyncio.to_thread(self._end_others)

    def _end_others(self) -> None:
        kill_all([process for process, _ in marked(CONTAINER_MARKER, self.mark)], signal.SIGKILL)

    def _ended(self, code: int | None) -> None:
        now = time.time()
        failed = code != 0
        from_logs = self._container.get("terminationMessagePolicy") == "FallbackToLogsOnError"
        message = tail(self.log) if failed and from_logs else ""
        self._back_off = self._back_off.ended(now - self.state.started_at)
        self._process = None
        self._set(self.state.terminated(exit_of(code, message, self.state.started_at, now)))

    async def _pause(self) -> None:
        delay = self._back_off.delay
        if delay > 0 and not self._stop.is_set():
            message = f"back-off {delay:g}s restarting failed container {self.name}"
            self._wait_for("CrashLoopBackOff", message, event="BackOff")
            await self._sleep(delay)

    async def _sleep(self, seconds: float) -> None:
        await set_within(self._stop, seconds)

    def _wait_for(self, reason: str, message: str, *, event: str = "Failed") -> None:
        waiting = Waiting(reason, message)
        if self.state.waiting != waiting:
            self._set(self.state.waits(waiting))
            self._hooks.note("Warning", event, message)

    def _set(self, state: ContainerState) -> None:
        if state != self.state:
            self.state = state
            save_record(self._record_path, Record(state, self._back_off.failures, self._run))
            self._hooks.changed()

    async def _end(self, process: Process, grace: float) -> None:
        hook = (self._container.get("lifecycle") or {}).get("preStop")
        began = time.monotonic()
        if hook and self._launch and grace > 0:
            answer = await ask(self._hooks.session, hook, self._launch.target, grace)
            if not answer.ok:
                self._hooks.note("Warning", "FailedPreStopHook", f"preStop of container {self.name}: {answer.message}")
        await end(process, max(grace - (time.monotonic() - began), 0.0))

    async def _probe(self, process: Process) -> None:
        """Startup probe first, then readiness and liveness side by side."""
        if not self.state.started:
            await self._follow("startupProbe", process, until_ok=True)
            no_readiness = self._container.get("readinessProbe") is None
            self._set(replace(self.state, started=True, ready=no_readiness and not self._init))
        async with asyncio.TaskGroup() as group:
            for kind in ("readinessProbe", "livenessProbe"):
                if self._container.get(kind):
                    group.create_task(self._follow(kind, process, until_ok=False))

    async def _follow(self, kind: str, process: Process, *, until_ok: bool) -> None:
        """Carry out one probe over and over and act on its verdict; `until_ok`: return at the first good one.

        Until the container is ready it is asked more often than the period says, so that nobody waits for a period that
        began a moment too early; bad answers count once a period, so thresholds mean what they say.
        """
        probe = self._container[kind]
        rules, eager = rules_of(probe), kind != "livenessProbe"
        tracker, counted = ProbeTracker(rules), -math.inf
        # a process that was adopted has had its delay; whether one lives is asked a period after its start at the earliest:
        # at once it can only be "no", and with a threshold of one it would never come up
        delay = rules.initial_delay if eager else max(rules.initial_delay, rules.period)
        await asyncio.sleep(max(delay - (time.time() - self.state.started_at), 0.0))
        while True:
            answer = await ask(self._hooks.session, probe, await self._target(), rules.timeout)
            if answer.ok or time.monotonic() - counted >= rules.period:
                tracker, counted = tracker.observe(answer.ok), time.monotonic()
                await self._judge(kind, tracker, answer, process)
            if tracker.verdict and until_ok:
                return
            await asyncio.sleep(min(rules.period, _EAGER_S) if eager and not self.state.ready else rules.period)

    async def _judge(self, kind: str, tracker: ProbeTracker, answer: Answer, process: Process) -> None:
        """Act on a probe's answer and verdict: say it, show it, or end the process."""
        word = kind.removesuffix("Probe")
        if not answer.ok:
            self._hooks.note("Warning", "Unhealthy", f"{word} probe of {self.name} failed: {answer.message}")
        if kind == "readinessProbe":
            if tracker.verdict is not None:
                self._set(replace(self.state, ready=tracker.verdict))
        elif tracker.verdict is False:
            self._hooks.note("Normal", "Killing", f"Container {self.name} failed {word} probe, will be restarted")
            await self._end(process, self._probe_grace(self._container[kind]))

    def _probe_grace(self, probe: Manifest) -> float:
        return float(probe.get("terminationGracePeriodSeconds") or self._grace)

    async def _target(self) -> Target:
        """Return what to probe; for a process that was adopted that may take until its ConfigMaps can be read."""
        while self._launch is None:
            try:
                self._launch = await self._hooks.launch(self._container)
            except LocalError as error:
                log.warning("%s isn't probed: %s", self.mark, error)
                await asyncio.sleep(_RETRY_S)
        return self._launch.target
