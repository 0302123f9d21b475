"""What the demo prints of its measurements: whole at 80 columns, and true whichever strategy came out ahead."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from paceline_cli.demo_view import StrategyRun, results_table, sentence
from paceline_cli.load import LoadSummary


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
