"""The operator as a process under the bench: what it calls, what it costs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from bench.fleet_plane import HOST, free_ports

_SERIES = re.compile(r"^(paceline_operator_\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_SAMPLE_S = 0.5


class Operator:
    """Runs `python -m paceline_operator` for all namespaces, with further variables; use it as a context."""

    def __init__(self, kubeconfig: Path, folder: Path, name: str = "operator", **environment: str) -> None:
        self._log = folder / f"{name}.log"
        (self._port,) = free_ports(1)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
        self._env = clean | {
            "KUBECONFIG": str(kubeconfig),
            "PACELINE_OPERATOR_KEY": "bench-only-key-of-thirty-two-bytes!!",
            "PACELINE_RUNTIME_IMAGE": "example/runtime:1",
            "PACELINE_METRICS_PORT": str(self._port),
            "PACELINE_METRICS_HOST": HOST,
            **environment,
        }

    def __enter__(self) -> Operator:
        self.started = time.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline_operator"], env=self._env, stdout=log, stderr=log
            )
        self.process = psutil.Process(self._process.pid)
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def log(self) -> str:
        """Return what it has said so far."""
        return self._log.read_text()

    def check(self) -> None:
        """End the run, with the operator's last words, if the operator has ended."""
        if self._process.poll() is not None:
            raise SystemExit("the operator ended: " + "\n".join(self.log().strip().splitlines()[-3:]))

    def series(self, name: str, *labels: str) -> Counter[tuple[str, ...]]:
        """Return the values of a metric by the given labels; nothing while the operator doesn't answer."""
        self.check()
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self._port}/metrics", timeout=10) as answer:
                text = answer.read().decode()
        except OSError:
            return Counter()
        found: Counter[tuple[str, ...]] = Counter()
        for series, given, value in _SERIES.findall(text):
            if series == name:
                have = dict(_LABEL.findall(given))
                found[tuple(have.get(label, "") for label in labels)] += float(value)  # type: ignore[assignment]
        return found

    def calls(self) -> Counter[tuple[str, ...]]:
        """Return the calls so far by verb, kind and code."""
        return self.series("paceline_operator_api_calls_total", "verb", "kind", "code")

    def passes(self) -> int:
        """Return the passes over services so far."""
        return int(sum(self.series("paceline_operator_reconciles_total").values()))


@dataclass
class Cost:
    """What a phase cost: wall and CPU seconds, peak memory, all calls by verb, writes that were taken by kind, and how many
    weren't."""

    seconds: float = 0.0
    operator_cpu: float = 0.0
    server_cpu: float = 0.0
    peak_mb: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)
    refused: int = 0

    def document(self) -> dict[str, object]:
        return asdict(self)


class Meter:
    """Measures a phase: `with Meter(operator, servers) as cost: …`; figures are in `cost` afterwards."""

    def __init__(self, operator: Operator, servers: list[psutil.Process]) -> None:
        self._operator, self._servers, self.cost = operator, servers, Cost()
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Cost:
        self._calls = self._operator.calls()
        self._cpu = self._seconds_of([self._operator.process]), self._seconds_of(self._servers)
        self._begin = time.monotonic()
        self._sampler.start()
        return self.cost

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._sampler.join()
        cost = self.cost
        cost.seconds = cost.seconds or time.monotonic() - self._begin  # unless the phase has told its end
        cost.operator_cpu = self._seconds_of([self._operator.process]) - self._cpu[0]
        cost.server_cpu = self._seconds_of(self._servers) - self._cpu[1]
        made = self._operator.calls() - self._calls
        verbs, writes = Counter[str](), Counter[str]()
        for (verb, kind, code), count in made.items():
            verbs[verb] += int(count)
            if verb != "GET" and code.startswith("2"):
                writes[kind] += int(count)
            elif verb != "GET":
                cost.refused += int(count)
        cost.calls, cost.writes = dict(sorted(verbs.items())), dict(sorted(writes.items()))

    @staticmethod
    def _seconds_of(processes: list[psutil.Process]) -> float:
        times = [process.cpu_times() for process in processes]
        return sum(each.user + each.system for each in times)

    def _sample(self) -> None:
        while True:
            memory = sum(p.memory_info().rss for p in [self._operator.process, *self._operator.process.children()])
            self.cost.peak_mb = max(self.cost.peak_mb, memory / 1e6)
            if self._stop.wait(_SAMPLE_S):
                return
