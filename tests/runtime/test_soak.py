"""The soak, short: every request ends well, nothing is left behind. Minutes of it are `make soak`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import soak
from bench.soak_clients import Tally
from bench.soak_report import Phase
from bench.soak_server import Latency, Sample


def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    lengths = ["--seconds", "5", "--kill-seconds", "5", "--kill-every", "2", "--clients", "25"]
    code = soak.main([*lengths, "--out", str(tmp_path)])
    document = json.loads((tmp_path / "soak_clock.json").read_text())
    assert (code, document["problems"]) == (0, [])
    quiet, killed = document["phases"]
    assert quiet["answers"]["stream"] > 0 and killed["kills"] >= 1
    assert "Problems: none." in (tmp_path / "soak_clock.md").read_text()


def phase(**changes: object) -> Phase:
    samples = [Sample(float(i), 100_000_000, 50_000_000, 20, 1) for i in range(100)]
    idle = {"kvBlocksUsed": 0, "running": 0, "waiting": 0, "preemptions": 0}
    fields = {"tally": Tally(), "samples": samples, "latency": Latency(), "idle": idle, "idle_descriptors": 20, **changes}
    return Phase("p", 600.0, flips=1, kills=0, **fields)  # type: ignore[arg-type]


def test_a_clean_phase_has_no_problems() -> None:
    assert phase().problems(20) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"idle": {"kvBlocksUsed": 1, "running": 0, "waiting": 0, "preemptions": 0}}, "not idle"),
        ({"idle_descriptors": 40}, "descriptors"),
        ({"samples": [Sample(float(i), 100 + i, 50, 20, 1) for i in range(100)]}, "api_rss grew"),
        ({"samples": [Sample(float(i), 100, 50 + i, 20, 1) for i in range(100)]}, "engine_rss grew"),
        ({"latency": Latency(1, {"decode": 9.0, "other": 1.0})}, "unexplained"),
    ],
)
def test_what_a_soak_must_not_find(changes: dict[str, object], words: str) -> None:
    assert any(words in problem for problem in phase(**changes).problems(20))


def test_violations_are_problems() -> None:
    tally = Tally()
    tally.violations["a stream without an end"] += 2
    assert phase(tally=tally).problems(20) == ["p: 2 × a stream without an end"]
