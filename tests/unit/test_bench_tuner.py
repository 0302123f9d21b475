"""The tuner's benchmarks on pods: their scenarios tell settings apart, and their reports say what was missed."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from bench import tuner_real
from bench.tuner_clock import SETTINGS, todo
from bench.tuner_clock_report import missed, report
from bench.tuner_clock_scenarios import best_of, scenarios, skipped_of, start_of, worth
from bench.tuner_pods import Run, errors_of, kept

from paceline_cli import real_service
from paceline_cli.clock_service import Sent, Traffic
from paceline_cli.fleet import FleetError
from paceline_cli.load import Outcome

FOUND = scenarios(None)
HONEST = [s for s in FOUND if not s.lie]
GOOD = Run("", "", goodput=9.0, attainment=1.0, overall=0.9, requests=900, failed=0, changes=1, final="16/8192")


@pytest.mark.parametrize("scenario", HONEST, ids=lambda s: s.name)
def test_whoever_changes_nothing_misses_the_goal(scenario):
    good, start = worth(scenario, 16, 8192)[0], worth(scenario, *start_of(scenario))[0]
    assert good > 0.95 and start < 0.95 * good


def test_of_settings_that_serve_as_many_in_time_the_best_answers_soonest():
    assert best_of({(8, 512): (0.9, -0.5), (16, 512): (1.0, -0.9), (32, 512): (1.0, -0.7)}) == (32, 512)


@pytest.mark.parametrize("scenario", FOUND, ids=lambda s: s.name)
def test_the_best_setting_runs_for_all_that_counts(scenario):
    skipped = skipped_of(scenario, "best")
    assert 0 < skipped < scenario.judged and skipped_of(scenario, "tuned") == skipped_of(scenario, "vllm") == 0.0


def runs(**changed):
    """One good run of each scenario and setting; `changed` are those of one tuned run."""
    name = changed.pop("name", "")
    rows = [
        replace(GOOD, scenario=s.name, setting=setting, changes=0 if s.lie else 1)
        for s in FOUND
        for setting in (SETTINGS[:1] if s.lie else SETTINGS)
    ]
    return [replace(r, **changed) if (r.scenario, r.setting) == (name, "tuned") else r for r in rows]


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("", {}, []),
        ("day", {"goodput": 8.6}, ["day: 95.6% of vLLM's defaults (goal 98%)"]),
        ("burst", {"goodput": 8.0, "attainment": 0.9}, ["90.0% of the best", "88.9% of vLLM's"]),
        ("shift", {"overall": 0.8}, ["88.9% of vLLM's defaults over all of it"]),
        ("slots", {"overall": 0.4}, []),  # its start was made worse than vLLM's: only what it becomes counts
        ("large", {"failed": 2}, ["large: 2 requests failed, 0 restarts (goal: none)"]),
        ("slots", {"restarts": 1}, ["slots: 0 requests failed, 1 restarts (goal: none)"]),
        ("day", {"changes": 4}, ["day: 4 changes (goal: at most 3)"]),
        ("frozen", {"changes": 1}, ["frozen: 1 changes (goal: none)"]),
        ("frozen", {"failed": 90}, []),  # the queue of the one slot it starts with is full, and nothing was changed
        ("frozen", {"failed": 9, "changes": 1}, ["9 requests failed", "frozen: 1 changes (goal: none)"]),
    ],
)
def test_what_misses_a_goal_is_said(name, changed, says):
    texts = missed(runs(name=name, **changed), FOUND)
    assert len(texts) == len(says) and all(part in text for part, text in zip(says, texts, strict=True))


def test_runs_go_on_where_they_were_stopped(tmp_path):
    path = tmp_path / "runs.jsonl"
    every = todo(path, FOUND)
    assert len(every) == 3 * len(HONEST) + 2
    assert [t for _, t in every[:2]] == ["tuned", "vllm"] and every[0][0] is every[1][0]  # side by side, on the same traffic
    path.write_text("".join(json.dumps(asdict(r)) + "\n" for r in runs() if r.scenario == "day" or r.setting == "best"))
    left = todo(path, FOUND)
    assert {(s.name, t) for s, t in every} - {(s.name, t) for s, t in left} == {(r.scenario, r.setting) for r in kept(path)}
    assert {s.name for s, _ in todo(path, FOUND, ["slots", "day"])} == {"slots"} and not todo(path, FOUND, ["day"])


def test_a_report_names_the_runs_that_are_missing():
    few = [s for s in FOUND if s.name == "slots"]
    text = report([r for r in runs() if r.setting == "tuned"], few, "a made-up day", ["slots best"])
    assert "Not run yet, so nothing is known of them: slots best." in text
    assert "| 9.00 |" in text and "1/8192: 0%" in text  # the run and the sweep


def test_prompts_have_as_many_words_as_asked_for_and_differ_in_their_first_block():
    traffic = Traffic("http://127.0.0.1:1", "m", lambda _: 40.0, lambda t: (20, 30) if t < 5 else (100, 100))
    early, late = traffic._chunk(0.0), traffic._chunk(6.0)
    assert all(20 <= len(r.prompt.split()) <= 30 for r in early) and all(len(r.prompt.split()) == 100 for r in late)
    blocks = [tuple(r.prompt.split()[:16]) for r in early + late]
    assert len(set(blocks)) == len(blocks) > 40


class FakeFleet:
    name = "tuned"

    def url(self):
        return "http://127.0.0.1:1"


@pytest.mark.parametrize("error", ["", "HTTP 500: broken"])
def test_the_rate_that_is_too_much_is_half_as_much_again_as_what_was_served(monkeypatch, error):
    async def served(url, model, requests, *, concurrency):
        return [Outcome(0.0, 0.1, 8.0 * (i + 1) / len(requests), r.max_tokens, error) for i, r in enumerate(requests)]

    monkeypatch.setattr(real_service, "run_load", served)
    if error:
        with pytest.raises(FleetError, match="HTTP 500: broken"):
            real_service.too_much_for(FakeFleet())
    else:
        assert real_service.too_much_for(FakeFleet()) == pytest.approx(1.5 * 32 / 8.0)


def real_runs(**tuned):
    rows = [replace(GOOD, scenario=str(n), setting=s, rate=7.5) for n in range(3) for s in (*tuner_real.SWEEP, "tuned")]
    rows = [replace(r, attainment=0.1) if r.setting == "1" else r for r in rows]
    return [replace(r, **tuned) if r.setting == "tuned" else r for r in rows]


@pytest.mark.parametrize(
    ("tuned", "says"),
    [
        ({}, ""),
        ({"attainment": 0.5}, "50.0% of the best fixed setting"),
        ({"failed": 1}, "3 requests failed"),
        ({"changes": 4}, "4 changes"),
    ],
)
def test_the_real_engine_is_held_to_the_same_goals(tuned, says):
    rows = real_runs(**tuned)
    assert says in " ".join(tuner_real.missed(rows)) and bool(says) == bool(tuner_real.missed(rows))
    assert "7.5 requests/s" in tuner_real.report(rows)


def test_failed_requests_are_told_by_what_they_were_told():
    def seen(at, error=""):
        return Sent(at, Outcome(at, None if error else at + 0.1, at + 1.0, 5, error))

    sent = [seen(1.0), seen(2.0, "HTTP 429: retry in 3 s"), seen(9.0, "HTTP 429: retry in 12 s"), seen(4.0, "ReadError: ")]
    assert errors_of(sent) == ["2 from 2 to 9 s: HTTP #: retry in # s", "1 from 4 to 4 s: ReadError: "]
    told = report(runs(name="burst", failed=2, errors=["2 from 2 to 9 s: HTTP #: full"]), FOUND, "a day", [])
    assert "- burst, tuned: 2 from 2 to 9 s: HTTP #: full" in told


def test_who_skips_the_beginning_sends_the_rest_of_the_same_requests():
    def traffic():
        return Traffic("http://127.0.0.1:1", "m", lambda t: 5.0 + t, lambda t: (20, 30) if t < 5 else (60, 80))

    whole, rest = traffic(), traffic()
    texts = [request.prompt for second in range(9) for request in whole._chunk(float(second))]
    begun = len([request for second in range(6) for request in rest._chunk(float(second))])
    assert [request.prompt for second in range(6, 9) for request in rest._chunk(float(second))] == texts[begun:]
