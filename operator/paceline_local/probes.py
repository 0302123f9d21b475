"""Probes: the rules (thresholds and delays, pure) and the three ways to ask a container how it is."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from paceline_local.errors import LocalError
from paceline_local.manifests import Manifest
from paceline_local.processes import kill_all, marked

__all__ = ["Answer", "ProbeRules", "ProbeTracker", "Target", "ask", "rules_of", "run_command"]

_MAX_MESSAGE = 200
_EXEC_MARKER = "PACELINE_LOCAL_EXEC"


@dataclass(frozen=True, slots=True)
class ProbeRules:
    """Delays in seconds and thresholds in successive answers, with Kubernetes' defaults."""

    initial_delay: float = 0.0
    period: float = 10.0
    timeout: float = 1.0
    success_threshold: int = 1
    failure_threshold: int = 3


def rules_of(probe: Manifest) -> ProbeRules:
    """Return the rules of a probe's manifest."""
    return ProbeRules(
        initial_delay=float(probe.get("initialDelaySeconds") or 0),
        period=float(probe.get("periodSeconds") or 10),
        timeout=float(probe.get("timeoutSeconds") or 1),
        success_threshold=int(probe.get("successThreshold") or 1),
        failure_threshold=int(probe.get("failureThreshold") or 3),
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """What one probe said: well or not, and why not."""

    ok: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class ProbeTracker:
    """Successive equal answers so far, and the verdict: None until a threshold was reached for the first time."""

    rules: ProbeRules
    verdict: bool | None = None
    run: int = 0
    last: bool | None = None

    def observe(self, ok: bool) -> ProbeTracker:
        """Return the tracker after one more answer."""
        run = self.run + 1 if self.last == ok else 1
        enough = run >= (self.rules.success_threshold if ok else self.rules.failure_threshold)
        return replace(self, run=run, last=ok, verdict=ok if enough else self.verdict)


@dataclass(frozen=True, slots=True)
class Target:
    """The container that is asked: its pod's address, named ports, and how a command of it would run."""

    host: str
    ports: Mapping[str, int]
    env: Mapping[str, str]
    cwd: Path

    def port(self, value: int | str) -> int:
        """Return a port's number, given as number or name."""
        if isinstance(value, int) or value.isdigit():
            return int(value)
        if value not in self.ports:
            raise LocalError(f"port {value!r} isn't a named port of the container")
        return self.ports[value]


async def ask(session: aiohttp.ClientSession, handler: Manifest, target: Target, limit: float) -> Answer:
    """Carry out one probe (or lifecycle handler): httpGet, tcpSocket or exec. Never raises for a bad answer."""
    try:
        async with asyncio.timeout(limit):
            if "httpGet" in handler:
                return await _http(session, handler["httpGet"], target)
            if "tcpSocket" in handler:
                return await _tcp(handler["tcpSocket"], target)
            return await run_command(handler["exec"]["command"], target)
    except TimeoutError:
        return Answer(False, f"no answer within {limit:g} s")
    except (aiohttp.ClientError, OSError, LocalError, ValueError) as error:
        return Answer(False, str(error)[:_MAX_MESSAGE] or type(error).__name__)


async def _http(session: aiohttp.ClientSession, action: Manifest, target: Target) -> Answer:
    scheme = (action.get("scheme") or "HTTP").lower()
    host, path = action.get("host") or target.host, (action.get("path") or "/").lstrip("/")
    url = f"{scheme}://{host}:{target.port(action['port'])}/{path}"
    headers = {h["name"]: h["value"] for h in action.get("httpHeaders") or ()}
    async with session.get(url, headers={"User-Agent": "kube-probe/paceline"} | headers, ssl=False) as response:
        if 200 <= response.status < 400:
            return Answer(True)
        body = (await response.content.read(_MAX_MESSAGE)).decode(errors="replace").strip()
        return Answer(False, f"HTTP probe failed with statuscode: {response.status}" + (f": {body}" if body else ""))


async def _tcp(action: Manifest, target: Target) -> Answer:
    _, writer = await asyncio.open_connection(action.get("host") or target.host, target.port(action["port"]))
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return Answer(True)


async def run_command(command: list[str], target: Target) -> Answer:
    """Run a command as the container would; exit code 0 is success. What it left running is killed if we are cancelled."""
    mark = f"{id(command)}-{asyncio.get_running_loop().time()}"
    process = await asyncio.create_subprocess_exec(
        *command,
        env=dict(target.env) | {_EXEC_MARKER: mark},
        cwd=target.cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        kill_all([p for p, _ in marked(_EXEC_MARKER, mark)], signal.SIGKILL)
        await process.wait()
        raise
    message = output.decode(errors="replace").strip()[:_MAX_MESSAGE]
    return Answer(process.returncode == 0, message or f"exit code {process.returncode}")
