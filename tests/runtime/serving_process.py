"""A `paceline-runtime` in a process of its own, on free loopback ports, for tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

T = TypeVar("T")
PATIENCE = 60.0  # how long a condition may take before a test fails; nothing is decided by how long it did take
TOKEN = "test-token-one"
FAST = {"constant": 0.002, "decodeTokens": 0.0001, "prefillTokens": 0.00001, "contextTokens": 0, "prefillAttention": 0}
SLOW = {**FAST, "constant": 0.05}


def eventually(check: Callable[[], T], what: str) -> T:
    """Poll until `check` returns something true."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if result := check():
            return result
        time.sleep(0.02)
    raise AssertionError(f"didn't come true within {PATIENCE:g} s: {what}")


def alive(pid: int) -> bool:
    """True unless the process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


class RuntimeProcess:
    """Starts with `args`; `url` and `admin_url` come from its own log."""

    def __init__(self, folder: Path, args: Sequence[str]) -> None:
        self._log = folder / "runtime.log"
        self._token = folder / "token"
        self._token.write_text(TOKEN + "\n")
        ports = ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--admin-token-file", str(self._token)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline_runtime", *ports, *args], stdout=log, stderr=log, env=environment
            )
        line = eventually(self._listening, "the server listens")
        self.url = f"http://127.0.0.1:{line[1]}"
        self.admin_url = f"http://127.0.0.1:{line[2]}"
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)
        self.admin = httpx.Client(base_url=self.admin_url, timeout=PATIENCE, headers={"Authorization": f"Bearer {TOKEN}"})

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def token_file(self) -> Path:
        return self._token

    @property
    def engine_pid(self) -> int:
        """The engine process that was started last."""
        return int(re.findall(r"event=engine_started pid=(\d+)", self.log)[-1])

    def wait_ready(self) -> RuntimeProcess:
        eventually(self.is_ready, "the server is ready")
        return self

    def is_ready(self) -> bool:
        assert self.process.poll() is None, f"the server has ended:\n{self.log}"
        return self.http.get("/health/ready").status_code == 200

    def knobs(self, **changes: Any) -> dict[str, Any]:
        """PATCH some knobs and return the document once nothing is pending any more."""
        answer = self.admin.patch("/admin/knobs", json={"knobs": changes})
        assert answer.status_code == 200, answer.text
        return eventually(self._settled, "the knobs are applied")

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that carry `labels`."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            if re.match(re.escape(name) + r"[{ ]", line) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def gauges(self) -> dict[str, int]:
        return self.admin.get("/admin/observe").json()["gauges"]

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "x", **body})

    def stream(self, **body: Any) -> Any:
        return self.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True, **body})

    def close(self) -> None:
        self.http.close()
        self.admin.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE)

    def _listening(self) -> re.Match[str] | None:
        assert self.process.poll() is None, f"the server has ended:\n{self.log}"
        return re.search(r"event=listening .*?port=(\d+) admin_port=(\d+)\n", self.log)

    def _settled(self) -> dict[str, Any] | None:
        document = self.admin.get("/admin/knobs").json()
        return None if "pending" in document["status"].values() else document


@contextmanager
def clock_runtime(folder: Path, *args: str, model: dict[str, Any] | None = None) -> Iterator[RuntimeProcess]:
    """A ready runtime on the clock device."""
    step_model = folder / "step-model.json"
    step_model.write_text(json.dumps(model or FAST))
    runtime = RuntimeProcess(folder, ["--device", "clock", "--step-model", str(step_model), *args])
    try:
        yield runtime.wait_ready()
    finally:
        runtime.close()


def events(response: httpx.Response) -> Iterator[dict[str, Any] | str]:
    """Yield the server-sent events of a stream, parsed; `[DONE]` as it is."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)
