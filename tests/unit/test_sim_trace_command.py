"""`paceline simulate --trace` and `paceline plan`: tables, JSON, pictures and complaints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from paceline_cli.__main__ import main
from paceline_cli.plan import plan
from paceline_cli.simulate import simulate
from paceline_core.errors import FormatError
from paceline_core.step_time import StepModel
from paceline_core.wire import to_json
from paceline_sim import read_trace

ROOT = Path(__file__).parents[2]
SLO = ("--slo", "ttft=500ms,tpot=20ms")


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "requests.csv"
    rows = [f"2024-05-01 10:00:{i * 0.4:06.3f},{100 + 37 * (i % 7)},{5 + 11 * (i % 5)}" for i in range(100)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    return str(path)


def run(command, *args: str, width: int = 140) -> str:
    result = CliRunner().invoke(command, args, env={"COLUMNS": str(width)}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_one_setting_is_told_in_full(trace):
    output = run(simulate, "--trace", trace, *SLO, width=80)
    assert "100 requests in 40 s (2.50 requests/s), 20,915 prompt, 2,700 output tokens" in output
    assert "llama-3.1-8b (bf16) on one h200: roofline at 70% of the data sheet's figures" in output
    assert "(100.0% within the SLO: met)" in output
    assert "decoding" in output
    assert max(map(len, output.splitlines())) <= 100


def test_json_has_every_figure_of_every_run(trace):
    args = (
        "--compare",
        "strategy=static,continuous",
        "--sweep",
        "maxNumSeqs=2:8",
        "--load",
        "1,4",
        "--json",
        "--workers",
        "1",
    )
    data = json.loads(run(simulate, "--trace", trace, *SLO, *args))
    assert data["trace"] == {"requests": 100, "seconds": pytest.approx(39.6), "left_out": 0}
    assert len(data["runs"]) == 2 * 3 * 2
    first = data["runs"][0]
    assert first["label"] == "static maxNumSeqs=2"
    assert first["knobs"]["maxNumSeqs"] == 2
    assert first["knobs"]["sloTpot"] == "20ms"
    assert {"ttft", "tpot", "e2e", "goodput", "causes", "preemptions"} <= first.keys()
    static, continuous = (sum(r["goodput"] for r in data["runs"] if r["label"].startswith(s)) for s in ("static", "cont"))
    assert continuous > static


def test_a_table_marks_the_best_and_fits_narrow_terminals(trace):
    args = ("--trace", trace, *SLO, "--compare", "strategy=static,continuous", "--workers", "1")
    for width in (80, 140):
        output = run(simulate, *args, width=width)
        assert "Best goodput: continuous (meets the SLO)" in output
        table = [line for line in output.splitlines() if line.startswith((" static", " continuous", " strategy"))]
        assert len(table) == 3
        assert "…" not in "".join(table)
        assert max(map(len, table)) <= width
    assert "KV peak" in output


def test_window_settings_and_strategy_are_obeyed(trace):
    args = (
        "--from",
        "10s",
        "--for",
        "20s",
        "--strategy",
        "dynamic",
        "--set",
        "maxNumSeqs=4",
        "--set",
        "preferredBatchSizes=2,4",
    )
    data = json.loads(run(simulate, "--trace", trace, *args, "--json"))
    assert data["trace"]["requests"] == 50
    knobs = data["runs"][0]["knobs"]
    assert (knobs["strategy"], knobs["maxNumSeqs"], knobs["preferredBatchSizes"]) == ("dynamic", 4, [2, 4])


def test_the_pipelines_depth_is_the_engines(trace):
    one, two = (
        json.loads(run(simulate, "--trace", trace, "--load", "20", "--pipeline-depth", depth, "--json"))["runs"][0]
        for depth in ("1", "2")
    )
    assert two["ttft"]["mean"] > one["ttft"]["mean"]


def test_config_is_a_knobs_file_or_a_manifest(trace, tmp_path):
    knobs = tmp_path / "knobs.json"
    knobs.write_text('{"knobs": {"maxNumSeqs": 3}}')
    assert (
        json.loads(run(simulate, "--trace", trace, "--config", str(knobs), "--json"))["runs"][0]["knobs"]["maxNumSeqs"] == 3
    )
    manifest = str(ROOT / "examples" / "smollm2.yaml")
    shown = json.loads(run(simulate, "--trace", trace, "--config", manifest, "--json"))["runs"][0]["knobs"]
    assert (shown["maxNumBatchedTokens"], shown["sloTtft"]) == (256, "5s")


def test_measured_step_times_replace_the_roofline(trace, tmp_path):
    model = tmp_path / "steps.json"
    document = to_json(StepModel(0.05).to_document())
    args = ("--trace", trace, "--step-model", str(model), "--kv-blocks", "100", "--max-model-len", "1000", "--json")
    for content in (document, {"stepModel": document, "gauges": {}}):
        model.write_text(json.dumps(content))
        data = json.loads(run(simulate, *args))
        assert data["runs"][0]["tpot"]["p50"] == pytest.approx(0.05)


def test_made_up_traffic():
    spec = "rate=4,duration=30s,prompt=100,output=5/20/30,burst=3,every=10s,prefixes=2,prefix=64,seed=7"
    data = json.loads(run(simulate, "--generate", spec, "--json"))
    assert data["trace"]["requests"] == pytest.approx(120, abs=40)
    assert data["runs"][0]["cached"] > 0.2
    assert data == json.loads(run(simulate, "--generate", spec, "--json"))


def test_plots_are_drawn_with_knees_and_labels(trace, tmp_path):
    args = ("--trace", trace, *SLO, "--compare", "strategy=static,continuous", "--load", "1,20,200", "--workers", "1")
    svg, png = tmp_path / "load.svg", tmp_path / "load.png"
    assert f"plot: {svg}" in run(simulate, *args, "--plot", str(svg))
    texts = [node.text for node in ET.parse(svg).iter() if node.tag.endswith("}text")]
    assert "continuous" in texts
    assert "static (meets the SLO at no load)" in texts
    assert "knee: the last load that meets the SLO" in texts
    assert any("ttft ≤ 500ms" in (text or "") for text in texts)
    run(simulate, *args, "--plot", str(png))
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_plot_of_many_settings_draws_the_best(trace, tmp_path):
    svg = tmp_path / "many.svg"
    args = ("--trace", trace, *SLO, "--sweep", "maxNumSeqs=1,2,3,4,5,6,7,8,9,10", "--load", "1,2", "--workers", "1")
    run(simulate, *args, "--plot", str(svg))
    assert "(2 settings with less goodput aren't drawn)" in svg.read_text()


def test_without_matplotlib_the_extra_is_named(trace, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "paceline_cli.simulate_plot", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "paceline_cli.simulate_plot")
    with pytest.raises(FormatError, match=r"pip install 'paceline\[plot\]'"):
        CliRunner().invoke(simulate, ["--trace", trace, *SLO, "--plot", str(tmp_path / "a.png")], catch_exceptions=False)


def test_plan_shows_the_arithmetic():
    output = run(plan)
    assert "8.03 G parameters × 2 bytes = 16.06 GB" in output
    assert "16.06 GB ÷ 4.80 TB/s = 3.35 ms per token: at most 299 tok/s" in output
    assert "128 KiB per token" in output
    rows = [line.split() for line in output.splitlines() if line.strip().endswith(("296", "7,584", "24,767"))]
    assert [row[0] for row in rows] == ["1", "32", "256"]


def test_plan_counts_replicas_per_accelerator():
    args = ("--generate", "rate=60,duration=10s,prompt=500,output=50", "--accelerator", "h200,l40s", *SLO, "--workers", "1")
    output = run(plan, *args)
    data = json.loads(run(plan, *args, "--json"))
    h200, l40s = data["verdicts"]
    assert h200["replicas"] >= 1
    assert f"h200: {h200['replicas']} replica" in output
    assert l40s["replicas"] is None  # reading 16 GB at 70 % of 864 GB/s takes longer than 20 ms
    assert "l40s: no number of replicas meets the SLO: reading the weights alone takes 26.6 ms per token" in output


def fails(capsys, monkeypatch, *args: str) -> str:
    """Run the command line as a user does; return the one line it ends with."""
    monkeypatch.setattr(sys, "argv", ["paceline", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--slo", "ttft=500"], "SLO ttft: '500' is not a duration: write a number and a unit"),
        (["--slo", "ttft=-5ms"], "SLO ttft: '-5ms' is not a duration"),
        (["--slo", "ttft=0ms"], "SLO ttft: 0ms is no objective"),
        (["--slo", "speed=5ms"], "SLO part 'speed=5ms'"),
        (["--slo", "ttft=5ms,ttft=6ms"], "SLO: ttft is given twice"),
        (["--slo", "ttft=5ms,percentile=101"], "SLO percentile: '101'"),
        (["--sweep", "maxNumSeqs=100000:200000"], "--sweep maxNumSeqs=100000:200000: no candidate is inside the bounds"),
        (["--sweep", "maxNumSeqs"], "--sweep maxNumSeqs: expected KNOB=VALUE"),
        (["--sweep", "colour=red"], "--sweep colour: there is no such knob"),
        (["--compare", "strategy=magic"], "--compare strategy=magic: no candidate is inside the bounds"),
        (["--set", "maxNumSeqs=4,8"], "--set maxNumSeqs: expected one value"),
        (["--set", "maxNumSeqs=0"], "--set maxNumSeqs=0: no candidate"),
        (["--load", "0"], "--load 0"),
        (["--load", "fast"], "--load fast"),
        (["--slots", "4"], "--slots belongs to --lengths"),
        (["--lengths", "3"], "give one of --lengths"),
        (["--max-model-len", "200"], "request 4 of the trace: the prompt has 211 tokens"),
        (["--model", "gpt-9"], "'gpt-9' is not a built-in model"),
        (["--accelerator", "abacus"], "'abacus' is not a built-in accelerator"),
        (["--model", "llama-3.1-70b"], "llama-3.1-70b doesn't fit one h200"),
        (["--efficiency", "1.5"], "efficiency is 1.5"),
        (["--from", "5"], "--from: '5' is not a duration"),
        (["--from", "2h"], "no request arrives from 7200 s"),
        (["--plot", "a.png"], "--plot marks where goodput stops growing"),
        (["--slo", "ttft=1s", "--plot", "a.gif"], "ends with .png or .svg"),
        (["--slo", "ttft=1s", "--plot", "/nowhere/a.png"], "there is no folder /nowhere"),
        (["--config", "/nowhere.yaml"], "can't read /nowhere.yaml"),
        (["--step-model", "steps.json"], "--step-model needs --kv-blocks and --max-model-len"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(trace, capsys, monkeypatch, args, says):
    assert says in fails(capsys, monkeypatch, "simulate", "--trace", trace, *args)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("knobs: 5", "knobs is 5, expected a mapping"),
        ("{}", "expected knobs (a knobs file) or spec (an InferenceService)"),
        ("[1]", "expected a mapping at the top"),
        ("a: b: c", "is neither JSON nor YAML"),
        ("knobs: {maxNumSeqs: -1}", "maxNumSeqs=-1 breaks 1 ≤ value"),
        ("spec: {batching: {colour: red}}", "colour='red' breaks the known knobs"),
    ],
)
def test_bad_config_files(trace, tmp_path, capsys, monkeypatch, text, says):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert says in fails(capsys, monkeypatch, "simulate", "--trace", trace, "--config", str(path))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("rate=fast", "--generate rate=fast: expected a number"),
        ("rate=1,rate=2", "--generate: 'rate=2'"),
        ("speed=1", "--generate: 'speed=1'"),
        ("prompt=5/3/1", "must grow with the percentile"),
        ("prompt=5/6", "--generate prompt=5/6: expected tokens"),
        ("duration=5", "--generate duration: '5' is not a duration"),
        ("seed=1.5", "--generate seed=1.5: expected a whole number"),
        ("rate=1e9,duration=1h", "rate 1e+09 for 3600 s makes 3.6e+12 requests, more than 5,000,000: lower the rate"),
        ("rate=0", "must all be above 0"),
    ],
)
def test_bad_generators(capsys, monkeypatch, spec, says):
    assert says in fails(capsys, monkeypatch, "simulate", "--generate", spec)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--model", "llama-3.1-70b", "--accelerator", "h100", "--dtype", "fp16"], "doesn't fit one h100"),
        (["--generate", "rate=1,duration=10s"], "--slo is missing"),
        (["--generate", "rate=1,duration=10s", "--trace", "x.csv", "--slo", "ttft=1s"], "give either --trace or --generate"),
        (["--trace", "/nowhere.csv", "--slo", "ttft=1s"], "can't read the trace /nowhere.csv"),
    ],
)
def test_bad_plans(capsys, monkeypatch, args, says):
    assert says in fails(capsys, monkeypatch, "plan", *args)


@pytest.mark.parametrize("args", [("--generate", "rate=1,duration=10s"), ("--trace", "/nowhere.csv", "--slo", "ttft=1s")])
def test_a_load_that_cannot_be_planned_for_is_said_before_anything_else(capsys, monkeypatch, args):
    monkeypatch.setattr(sys, "argv", ["paceline", "plan", *args])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out == ""


def test_help_teaches_by_example():
    for command in (simulate, plan):
        text = run(command, "--help")
        assert "Examples:" in text
        assert text.count(f"paceline {command.name} ") >= 4


def test_the_fixture_is_what_it_says(trace):
    assert len(read_trace(Path(trace)).requests) == 100


def test_several_knobs_side_by_side_fit_eighty_columns(trace):
    sweeps = ("--sweep", "maxNumSeqs=64:256", "--sweep", "maxNumBatchedTokens=8192:16384", "--workers", "1")
    output = run(
        simulate, "--trace", trace, *SLO, *sweeps, "--compare", "strategy=continuous,iteration", "--load", "1,2", width=80
    )
    rows = [line for line in output.splitlines() if line.startswith((" continuous", " iteration"))]
    assert len(rows) == 2 * 3 * 2 * 2
    assert all(len(row) <= 80 and "…" not in row for row in rows)
    assert rows[0].split()[:3] == ["continuous", "64", "8192"]
