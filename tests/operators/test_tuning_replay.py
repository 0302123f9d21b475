"""`paceline tune replay`: a log that was written by the operator, and one that was damaged by anybody."""

import json

import pytest
from click.testing import CliRunner
from tuning_kit import bad_start

from paceline_cli.tune import tune
from paceline_core.errors import FormatError
from paceline_operator.tuning.decide import decide
from paceline_operator.tuning.decision_log import DecisionLog
from paceline_operator.tuning.facts import Ask
from paceline_operator.tuning.replay import replay


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A log of one decision, which is quick to make."""
    few = bad_start(pods=1, rate=1.0)
    few.mode = "Off"
    few.run(40)
    question = few.brain.question(few.situation(), Ask(only=({"maxNumSeqs": 8},)), few.now)
    path = tmp_path_factory.mktemp("log") / "decisions" / "log.jsonl"
    DecisionLog(path).add(question, decide(question), {"pod-0": 0})
    DecisionLog(None).add(question, decide(question), {})
    return path.read_text(encoding="utf-8")


@pytest.fixture
def log(text, tmp_path):
    """Return what writes a log, its decision changed by `change`, and returns its path."""

    def write(change=lambda line: None, *, lines=lambda line: line + "\n"):
        line, path = json.loads(text), tmp_path / "log.jsonl"
        change(line)
        path.write_text(lines(json.dumps(line)), encoding="utf-8")
        return path

    return write


def run(path):
    """Return exit code or error, and output, of `paceline tune replay`."""
    result = CliRunner().invoke(tune, ["replay", str(path)], standalone_mode=False)
    return result.exception or result.return_value, result.output


def test_logged_decisions_come_out_the_same_offline(log):
    code, output = run(log())
    assert code == 0 and "same" in output
    code, output = run(log(lambda line: line["decision"].update(kind="Unchanged")))
    assert code == 1 and "different" in output and "logged: Unchanged" in output


def test_a_log_of_the_last_version_is_read(log):
    def last(line):
        for name in ("traffic", "doubt", "bend"):
            del line["question"][name]

    assert len(list(replay(log(last)))) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda q: q.update(at="noon"),
        lambda q: q.update(numBlocks=0),
        lambda q: q.update(numBlocks=10**400),
        lambda q: q.update(load=float("nan")),
        lambda q: q.update(load=float("inf")),
        lambda q: q.update(load=0),
        lambda q: q.update(load=10**9),
        lambda q: q.update(pods=0),
        lambda q: q.update(bend=[]),
        lambda q: q.update(bend=[1, -1, 1, 1]),
        lambda q: q.update(bend=[1, 1, 0, 1]),
        lambda q: q.update(bend="no"),
        lambda q: q.update(knobs={"maxNumSeqs": -1}),
        lambda q: q.update(knobs={}),
        lambda q: q.update(knobs=None),
        lambda q: q.update(bounds={"maxNumSeqs": 5}),
        lambda q: q.update(bounds={"maxNumSeqs": ["a", "b"]}, only=None),
        lambda q: q.update(samples=5),
        lambda q: q.update(samples=[[[0.0]]]),
        lambda q: q["samples"][0][0].__setitem__(0, -1.0),
        lambda q: q["samples"][0][0].__setitem__(1, 10**12),
        lambda q: q["samples"][0][0].__setitem__(2, 10**400),
        lambda q: q["samples"][0][0].__setitem__(3, "soon"),
        lambda q: q.update(only=[{"maxNumSeqs": "many"}]),
        lambda q: q.update(blocked=[5]),
        lambda q: q.update(factors=[[1, 2, 3]]),
        lambda q: q["model"].update(constant=10**400),
        lambda q: q["model"].update(constant=-1.0),
        lambda q: q["model"].update(seen={"decode_tokens": 5}),
        lambda q: q["objective"].update(percentile=0),
        lambda q: q["objective"].update(colour="red"),
        lambda q: q.pop("samples"),
        lambda q: q.clear(),
    ],
)
def test_a_damaged_decision_is_one_line_that_names_file_and_line(log, damage):
    path = log(lambda line: damage(line["question"]), lines=lambda line: f"\n{line}\n")
    error, _ = run(path)
    assert isinstance(error, FormatError), error
    words = str(error)
    assert words.startswith(f"{path}, line 2: ") and "\n" not in words and len(words) < len(str(path)) + 300


@pytest.mark.parametrize(
    "line", ["{", "[]", "5", "{}", "[" * 100_000, '{"question": NaN}', '{"question": 1e999}', '{"question": {}}', "\x00"]
)
def test_what_is_no_decision_at_all_is_told_by_its_line(text, tmp_path, line):
    path = tmp_path / "log.jsonl"
    path.write_text(text + line + "\n", encoding="utf-8")
    decisions = replay(path)
    assert next(decisions)  # what comes before it is told all the same
    with pytest.raises(FormatError, match="line 2: "):
        next(decisions)


@pytest.mark.parametrize("change", [lambda d: d.pop("kind"), lambda d: d.update(message=5), lambda d: d.clear()])
def test_a_logged_answer_that_is_none_is_told_too(log, change):
    error, _ = run(log(lambda line: change(line["decision"])))
    assert isinstance(error, FormatError) and "line 1: decision" in str(error)


def test_an_empty_log_is_no_proof(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("\n\n", encoding="utf-8")
    error, _ = run(path)
    assert isinstance(error, FormatError) and "PACELINE_TUNING_LOG" in str(error)


def test_bytes_that_are_no_text_are_told(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\xff\xfe\n")
    error, _ = run(path)
    assert isinstance(error, FormatError) and "line 1: " in str(error)
