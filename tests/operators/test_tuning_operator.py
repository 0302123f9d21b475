"""What survives the operator and what pods and people are told: overrides, trials, the decision log, the words."""

import asyncio
import json
from dataclasses import replace

import pytest
from operator_kit import MINIMAL, service

from paceline_cli.tune_text import explain_service
from paceline_operator.effective import effective, read_override, spec_hash
from paceline_operator.knob_sync import Target
from paceline_operator.metrics import Metrics
from paceline_operator.settings import Settings
from paceline_operator.tuning.brain import Brain
from paceline_operator.tuning.decide import Decision
from paceline_operator.tuning.loop import Tuner
from paceline_operator.tuning.overrides import IN_FORCE, config_map, read_state, read_trying
from paceline_operator.tuning.state import Change, Phase, State, Trial
from paceline_operator.tuning.status import report

AUTO = MINIMAL | {"batching": {"maxNumSeqs": 4}, "tuning": {"mode": "Auto"}}
CHANGE = Change(1.0, {"maxNumSeqs": 4}, {"maxNumSeqs": 16}, "better", "Settled(Verified)", "98 % instead of 3 %")


def trying(found, **changes):
    trial = Trial({"maxNumSeqs": 4}, {"maxNumSeqs": 16}, "better", 1.0, ("chat-1",), "uid/1", 0.1, 0.4, 0.9, 8.0)
    return replace(State(spec_hash=spec_hash(found), phase=Phase.CANARY, trial=trial), **changes)


def test_a_trial_reaches_only_its_pods():
    found = service(AUTO)
    live = config_map(found, trying(found))
    assert read_override(live) is None and read_state(live) == trying(found)
    trial = read_trying(live, spec_hash(found))
    target = Target({"maxNumSeqs": 4, "x": 1}, "digest", "hash", "token", trial.pods, trial.knobs)
    assert target.knobs_of("chat-1") == {"maxNumSeqs": 16, "x": 1} and target.knobs_of("chat-2") == {"maxNumSeqs": 4, "x": 1}
    assert not read_trying(live, "the spec was edited").pods


def test_an_override_is_in_force_until_the_knob_is_edited():
    found = service(AUTO)
    live = config_map(found, State(spec_hash=spec_hash(found), override={"maxNumSeqs": 16}))
    assert effective(found, read_override(live)).knobs.max_num_seqs == 16
    edited = service(AUTO | {"batching": {"maxNumSeqs": 8}})
    assert effective(edited, read_override(live)).knobs.max_num_seqs == 8
    assert effective(service(AUTO | {"tuning": {"mode": "Off"}}), read_override(live)).knobs.max_num_seqs == 4


def test_looking_writes_nothing():
    found = service(AUTO)
    settled = State(spec_hash=spec_hash(found), override={"maxNumSeqs": 16}, history=(CHANGE,))
    searched = replace(settled, next_search=9.0, idle_searches=3, signature=(1.0,), kept=True).told("NoBetter", "24.7 %")
    assert config_map(found, settled) == config_map(found, searched)


def test_an_override_that_was_taken_out_leaves_its_history():
    found = service(AUTO)
    state = State(
        spec_hash=spec_hash(found), phase=Phase.SETTLED, override={"maxNumSeqs": 16}, history=(CHANGE,), begun=(1.0,)
    )
    live = config_map(found, state)
    live["data"] = {key: text for key, text in live["data"].items() if key not in IN_FORCE}
    kept = read_state(live)
    assert kept.history == (CHANGE,) and not kept.override and kept.phase is Phase.OBSERVING and not kept.begun


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"phase": "Dancing"}', '{"trial": {"pods": 3}}', '{"trial": {"pods": ["a"]}}']
)
def test_a_state_that_cannot_be_read_is_none(text):
    assert read_state({"data": {"state.json": text}}) is None
    assert not read_trying({"data": {"trial.json": text}}, "").pods


def test_people_are_told_in_words():
    found = service(AUTO)
    brain = Brain(trying(found, history=(CHANGE,)).told("Trying", "tried on chat-1"))
    brain.decision = Decision("Freeze", "TwinOff", "the twin's tpot p50 is off by 40 %")
    status = report(brain, "Auto", {"maxNumSeqs": 4})
    conditions = {c.type: (c.status, c.reason) for c in status.conditions}
    assert conditions["Tuned"] == ("Unknown", "Canary") and conditions["Recommended"] == ("False", "TwinOff")
    text = "\n".join(explain_service({"metadata": {"name": "chat"}, "status": {"tuning": status.content}}))
    for part in (
        "tries a change on one pod",
        "maxNumSeqs 16 on chat-1",
        "maxNumSeqs 4 → 16: Settled(Verified)",
        "98 % instead",
    ):
        assert part in text
    assert json.loads(json.dumps(status.content)) == status.content  # a status is JSON


def test_a_status_that_says_nothing_is_explained_without_a_word_too_many():
    names = ("observed", "recommended", "trial", "applied", "history", "lastChange", "reason", "message")
    tuning = {"mode": "Auto", "state": "Observing", **dict.fromkeys(names)}
    for status in (None, {}, {"tuning": None, "conditions": None}, {"tuning": {"mode": None}}, {"tuning": tuning}):
        first, *more = explain_service({"metadata": {"name": "chat"}, "status": status})
        assert first.startswith("chat: tuning.mode is ") and len(more) == (status == {"tuning": tuning})
    empty = dict.fromkeys(("from", "to", "time", "outcome", "why", "measuredEffect"))
    tuning |= {"history": [empty], "trial": {"pods": None, "knobs": None}, "recommended": {"target": None, "advice": None}}
    tuning |= {"observed": {"sloAttainment": None, "kvUsage": None}}
    assert len([*explain_service({"metadata": {"name": "chat"}, "status": {"tuning": tuning}})]) == 6


async def test_a_round_that_fails_ends_neither_tuning_nor_the_trials_that_are_watched(monkeypatch):
    rounds = []

    async def fails(self):
        rounds.append(self)
        if len(rounds) < 3:
            raise KeyError("a pod that is gone")
        raise asyncio.CancelledError

    monkeypatch.setattr(Tuner, "round", fails)
    monkeypatch.setattr("paceline_operator.tuning.loop._LEAST", 0.0)
    tuner = Tuner(Settings(tuning_interval=0.01), None, None, None, Metrics(), {}, {}, lambda key: None)
    with pytest.raises(asyncio.CancelledError):
        await tuner.run()
    assert len(rounds) == 3 and tuner._own.failures._value.get() == 2
