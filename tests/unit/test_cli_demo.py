"""What the demo prints of its measurements: whole at 80 columns, and true whichever strategy came out ahead."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from paceline_cli.demo import _Stage
from paceline_cli.demo_tuning import REAL
from paceline_cli.demo_view import StrategyRun, results_table, sentence
from paceline_cli.load import LoadSummary
from paceline_local.processes import marked
from paceline_local.state import MARKER


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_ended_leaves_nothing(tmp_path, number):
    command = [sys.executable, "-m", "paceline_cli", "demo"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("up ("):
                break
        demo.send_signal(number)
        rest = demo.stdout.read()
    assert demo.returncode == 130, rest
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []
    assert [p for p, environment in marked(MARKER) if environment[MARKER].startswith(os.fspath(tmp_path))] == []


@pytest.mark.parametrize("left", [False, True])
def test_the_acts_leave_no_files_either(tmp_path, monkeypatch, left):
    home = tmp_path / "home"
    home.mkdir()
    (home / "tuned.json").write_text("{}")
    if left:
        (home / "supervisor.lock").write_text("")  # something of the stack that couldn't be stopped
    stage = _Stage(Console(file=io.StringIO()), home, REAL)
    monkeypatch.setattr(stage, "_run", lambda *args, **options: None)
    stage.stop()
    assert [path.name for path in tmp_path.rglob("*")] == (["home", "supervisor.lock"] if left else [])


def run(strategy, rate, utilisation=0.5, latency=30.0):
    load = LoadSummary(
        requests=48, failed=0, duration=4800 / rate, output_tokens_per_s=rate, mean_latency=latency,
        p95_latency=123.4, ttft_p50=12.34, ttft_p95=45.67,
    )  # fmt: skip
    return StrategyRun(strategy, load, utilisation)


def test_the_table_is_whole_at_eighty_columns():
    runs = [run(name, 1234.5) for name in ("static", "dynamic", "continuous", "iteration")]
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(results_table(runs, "48 requests at once"))
    text = console.export_text()
    assert "…" not in text
    assert all(word in text for word in ("continuous", "tok/s", "latency", "1234.5", "123.4 s", "45.67 s"))


@pytest.mark.parametrize(
    ("rate", "says"),
    [
        (30.0, "1.50× the tokens per second of static batching at 0.50× its mean latency: 90% of the slots did useful work"),
        (20.0, "no gain here"),
        (17.8, "0.89× the tokens per second of static batching at 0.50× its mean latency: no gain here"),
    ],
)
def test_the_sentence_fits_the_figures(rate, says):
    told = sentence([run("static", 20.0), run("continuous", rate, 0.9, latency=15.0)])
    assert says in told
    assert ("because nobody waits" in told) == (rate > 20)
