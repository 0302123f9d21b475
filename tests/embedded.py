"""Start the embedded API server in a process of its own; used by the control-plane suite and by other suites' fixtures."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 120.0  # it takes one; more on a machine that has much else to do


@dataclass(frozen=True)
class Embedded:
    """A running server: its process, its state folder and its kubeconfig."""

    process: subprocess.Popen[str]
    state: Path
    line: str

    @property
    def kubeconfig(self) -> Path:
        return self.state / "kubeconfig"

    @property
    def port(self) -> int:
        return int(self.line.split(" (")[0].rpartition(":")[2])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the server by a signal and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def command(state: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "paceline_local.apiserver", "--state", str(state), *arguments]


def start(state: Path, *arguments: str) -> Embedded:
    """Start a server on `state` and wait until it says that it's ready."""
    environment = {key: value for key, value in os.environ.items() if key != "KUBECONFIG"}
    process = subprocess.Popen(command(state, *arguments), stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    deadline = time.monotonic() + START_TIMEOUT_S
    readable, _, _ = select.select([process.stdout], [], [], deadline - time.monotonic())
    line = process.stdout.readline() if readable else ""
    if not line.startswith("ready"):
        process.kill()
        process.wait()
        process.stdout.close()
        raise AssertionError(f"the embedded API server did not start: {line!r}")
    return Embedded(process, state, line)


@contextmanager
def embedded_server(state: Path, *arguments: str) -> Iterator[Embedded]:
    server = start(state, *arguments)
    try:
        yield server
    finally:
        server.stop()
