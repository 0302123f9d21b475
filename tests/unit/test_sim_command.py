"""The command `paceline simulate`: its JSON, its picture and its complaints."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from paceline_cli.simulate import simulate
from paceline_cli.timeline import Marks, draw
from paceline_core.knobs import Strategy
from paceline_sim import teach

STREAM = "120,30,60,300,40,90,25,150,50,70,35,80"


def invoke(*args: str, **env: str) -> str:
    result = CliRunner().invoke(simulate, args, env=env)
    assert result.exit_code == 0, result.output
    return result.output


def test_json_has_exactly_the_four_figures():
    figures = json.loads(
        invoke("--lengths", STREAM, "--arrive-every", "10", "--slots", "4", "--strategy", "static", "--json")
    )
    assert set(figures) == {"steps", "slot_utilisation", "mean_latency", "latencies"}
    assert figures["steps"] == 560
    assert figures["slot_utilisation"] == 0.46875
    assert round(figures["mean_latency"]) == 402
    assert figures["latencies"][:2] == [330, 320]
    assert len(figures["latencies"]) == 12


def rows(lengths, strategy, *, slots=4, width=80, every=0):
    result = teach(lengths, every=every, slots=slots, strategy=Strategy(strategy))
    return [line.plain for line in draw(result, width=width, marks=Marks())]


def test_static_shows_slots_that_are_held_after_their_request_ended():
    lines = rows((4, 1, 2), "static", slots=4, width=16)  # eight columns for four steps
    assert lines[0] == "slot 1  AAAAAAAA"
    assert lines[1] == "slot 2  BB░░░░░░"
    assert lines[2] == "slot 3  CCCC░░░░"
    assert lines[3].startswith("and 1 more slot, idle")


def test_continuous_refills_and_shows_what_is_idle_and_who_waits():
    lines = rows((2, 1, 2, 1), "continuous", slots=2, width=8 + 12)
    assert lines[0] == "slot 1  AAAAAAAADDDD"
    assert lines[1] == "slot 2  BBBBCCCCCCCC"
    assert lines[2] == "waiting 22221111    "
    lines = rows((1, 1), "continuous", slots=2, every=2, width=8 + 12)
    assert lines[0] == "slot 1  AAAA····BBBB"


@pytest.mark.parametrize("width", [20, 37, 80, 200])
@pytest.mark.parametrize("strategy", Strategy)
def test_the_picture_fits_the_terminal_and_hides_no_request(width, strategy):
    result = teach([int(n) for n in STREAM.split(",")], every=10, slots=4, strategy=strategy)
    lines = [line.plain for line in draw(result, width=width, marks=Marks())]
    slots = [line for line in lines if line.startswith("slot")]
    assert len(slots) == 4
    assert all(len(line) <= width for line in slots)
    if width >= 80:
        assert set("ABCDEFGHIJKL") <= set("".join(line[8:] for line in slots))


def test_the_summary_adds_up():
    output = invoke("--lengths", STREAM, "--arrive-every", "10", "--strategy", "static", COLUMNS="80")
    assert (
        "static: 560 steps, mean latency 402 steps, slots 47% used (48% held by requests that had ended, 5% idle)" in output
    )
    assert "held" not in invoke("--lengths", "1,2", "--strategy", "continuous").splitlines()[-1]


def test_more_requests_than_letters_and_slots_than_rows():
    output = invoke("--lengths", ",".join(["3"] * 200), "--slots", "150", "--strategy", "static")
    assert "and 102 more slots, 102 of them used" in output
    assert "and 174 more" in output


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--lengths", ""], "item 1 is ''"),
        (["--lengths", "3,,4"], "item 2 is ''"),
        (["--lengths", "3,x"], "item 2 is 'x'"),
        (["--lengths", "0"], "item 1 is '0'"),
        (["--lengths", "-3"], "item 1 is '-3'"),
        (["--lengths", "1.5"], "item 1 is '1.5'"),
        (["--lengths", "99999999999"], "item 1 is '99999999999'"),
        (["--lengths", "3", "--slots", "0"], "--slots"),
        (["--lengths", "3", "--strategy", "magic"], "'magic' is not one of"),
        (["--lengths", "3", "--max-wait", "-1"], "--max-wait"),
        (["--lengths", "3", "--max-wait", "nan", "--strategy", "dynamic"], "--max-wait"),
        (["--lengths", "3", "--arrive-every", "-1"], "--arrive-every"),
        (["--lengths", "3", "--nope"], "--nope"),
        (["--lengths", "3", "--slo", "ttft=1s"], "--slo needs --trace or --generate"),
        (["--lengths", "3", "--model", "llama-3.1-8b"], "--model needs --trace or --generate"),
        (["--lengths", "3", "--set", "maxNumSeqs=2"], "--set needs --trace or --generate"),
        (["--lengths", "3", "--load", "1,2"], "--load needs --trace or --generate"),
        ([], "--lengths"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(args, says, capsys, monkeypatch):
    from paceline_cli.__main__ import main

    monkeypatch.setattr(sys, "argv", ["paceline", "simulate", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert says in err


def test_help_teaches_with_examples_that_run():
    output = invoke("--help")
    assert "Examples:" in output
    invoke("--lengths", "8,2,2,2,6,4,4,4", "--strategy", "static")


def test_a_terminal_without_unicode_gets_a_picture_too():
    command = [
        sys.executable,
        "-m",
        "paceline_cli",
        "simulate",
        "--lengths",
        "3,1",
        "--slots",
        "100",
        "--strategy",
        "static",
    ]
    done = subprocess.run(
        command, env={"PYTHONIOENCODING": "ascii", "COLUMNS": "40"}, capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert b"BBBBBBBBBB----" in done.stdout
