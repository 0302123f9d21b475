"""The server under soak, a process of its own, watched from outside: memory, descriptors, records, what is left over."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

TOKEN = "soak-token"
START_SECONDS = 120.0

# steps of 20 to 40 ms: what two cores can stream to a few hundred clients, so that batching and not Python is what waits
CLOCK_MODEL = {
    "constant": 0.02,
    "decodeTokens": 2e-4,
    "prefillTokens": 2e-5,
    "contextTokens": 1e-8,
    "prefillAttention": 1e-9,
}
CLOCK = (
    "--device", "clock", "--max-num-seqs", "64", "--max-num-seqs-limit", "128", "--max-model-len", "4096",
    "--num-gpu-blocks-override", "1500",
)  # fmt: skip
COMMON = ("--read-timeout", "5s", "--max-queue-len", "300", "--drain-propagation", "1ms", "--drain-timeout", "20s")


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes and descriptors at a moment (monotonic seconds)."""

    at: float
    api_rss: int
    engine_rss: int
    descriptors: int
    engine_pid: int


@dataclass(slots=True)
class Latency:
    """Seconds of all requests that finished, by cause."""

    requests: int = 0
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def other_share(self) -> float:
        return self.parts.get("other", 0.0) / self.total if self.total else 0.0


class SoakServer:
    """A `paceline-runtime` with `args`, its log in `folder`; `step_model` is the clock device's."""

    def __init__(self, folder: Path, args: tuple[str, ...], step_model: Mapping[str, float] = CLOCK_MODEL) -> None:
        self._log = folder / "soak-runtime.log"
        token = folder / "token"
        token.write_text(TOKEN + "\n")
        if "clock" in args:
            path = folder / "step-model.json"
            path.write_text(json.dumps(step_model))
            args = (*args, "--step-model", str(path))
        ports = ("--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--admin-token-file", str(token))
        command = [sys.executable, "-m", "paceline_runtime", *ports, *COMMON, *args]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self._cursor = 0
        self.latency = Latency()
        public, admin = self._wait(r"event=listening .*?port=(\d+) admin_port=(\d+)\n")
        self.url = f"http://127.0.0.1:{public}"
        self.admin = httpx.Client(
            base_url=f"http://127.0.0.1:{admin}", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60
        )
        self._public = httpx.Client(base_url=self.url, timeout=60)
        self.wait_ready()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def engine_pid(self) -> int:
        return int(re.findall(r"event=engine_started pid=(\d+)", self.log)[-1])

    def _wait(self, pattern: str) -> tuple[str, ...]:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            if found := re.search(pattern, self.log):
                return found.groups()
            time.sleep(0.05)
        raise RuntimeError(f"the server didn't start:\n{self.log[-2000:]}")

    def wait_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self._public.get("/health/ready").status_code == 200:
                return
            time.sleep(0.05)
        raise RuntimeError(f"the server isn't ready:\n{self.log[-2000:]}")

    def sample(self) -> Sample:
        """Look at both processes."""
        engine = self.engine_pid
        return Sample(
            time.monotonic(), _resident(self.process.pid), _resident(engine), _descriptors(self.process.pid), engine
        )

    def kill_engine(self) -> None:
        """End the engine process as an out-of-memory killer would."""
        try:
            os.kill(self.engine_pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # it is being started again already

    def flip(self, knobs: dict[str, Any]) -> bool:
        """Change knobs; False while there is no engine that could confirm, or that can't run under them."""
        return self.admin.patch("/admin/knobs", json={"knobs": knobs}).is_success

    def observe(self) -> dict[str, Any]:
        """Read what is new, add up where the time of finished requests went, and return the last page."""
        while True:
            page: dict[str, Any] = self.admin.get("/admin/observe", params={"since": self._cursor}).json()
            for record in page["requests"]:
                if record["outcome"] == "finished":
                    self.latency.requests += 1
                    for name, seconds in record["parts"].items():
                        self.latency.parts[name] += seconds
            done, self._cursor = page["cursor"] == self._cursor, page["cursor"]
            if done or len(page["requests"]) + len(page["steps"]) < 4000:
                return page

    def idle(self, seconds: float = 60.0) -> dict[str, Any]:
        """Wait until nothing runs or waits, and return the gauges."""
        end = time.monotonic() + seconds
        gauges: dict[str, Any] = {}
        while time.monotonic() < end:
            gauges = self.observe()["gauges"]
            if not gauges["running"] and not gauges["waiting"]:
                break
            time.sleep(0.1)
        return gauges

    def close(self) -> int:
        """End it as a kubelet would and return its exit code."""
        self.admin.close()
        self._public.close()
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(10)


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _descriptors(pid: int) -> int:
    try:
        return psutil.Process(pid).num_fds()
    except psutil.Error:
        return 0
