"""Drafts change how fast tokens come, never which: the model's output with and without them, token for token."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import model_harness as harness
import pytest

from paceline_core.knobs import Strategy
from paceline_core.plan import ScheduledSequence, StepPlan, StepShape
from paceline_core.prompt_lookup import PromptLookup
from paceline_core.request import FinishReason
from paceline_runtime.draft_check import num_standing
from paceline_runtime.loader import load_model
from paceline_runtime.sampler import SequenceSampling
from paceline_runtime.sampling_params import SamplingParams

PROMPT = [5, 17, 101, 44, 9, 60, 3]


class Foresight:
    """Proposes what came without drafts, but for one token in `wrong_every`."""

    def __init__(self, outputs: Mapping[int, Sequence[int]], wrong_every: int = 5) -> None:
        self.outputs = outputs
        self.random = random.Random(3)
        self.wrong_every = wrong_every

    def propose(self, seq_id, prompt, generated, most):
        coming = self.outputs[seq_id][len(generated) : len(generated) + most]
        return tuple(self.random.randrange(199) if self.random.randrange(self.wrong_every) == 0 else t for t in coming)

    def forget(self, seq_id):
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    uri = harness.save_folder(harness.tiny_llama(seed=4), tmp_path_factory.mktemp("speculation"))
    model = load_model(uri, max_model_len=256, num_blocks=2, max_num_seqs_limit=64)
    yield model
    model.runner.close()


def mixed_arrivals():
    """Greedy and seeded requests side by side, with all that edits logits; a third share a prefix."""
    rng = random.Random(7)
    shared = [rng.randrange(199) for _ in range(40)]
    kinds = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "logprobs": 3},
        {"temperature": 0.7, "presence_penalty": 0.6, "frequency_penalty": 0.4},
        {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2},
        {
            "temperature": 0.9,
            "logit_bias": ((7, 3.0),),
            "min_tokens": 4,
            "stop_token_ids": tuple(range(0, 199, 9)),
        },
    ]
    arrivals = []
    for index in range(12):
        own = [rng.randrange(199) for _ in range(rng.choice([1, 15, 17, 33, 70]))]
        # with seeds from 0 on one draw falls on the edge between two tokens, and float32's rounding by a step's rows decides
        params = SamplingParams(max_tokens=rng.choice([4, 11, 24]), seed=100 + index, ignore_eos=True, **kinds[index % 6])
        arrivals.append(harness.Arrival(shared + own if index % 3 == 0 else own, params, step=index // 3 * 4))
    return arrivals


@pytest.fixture(scope="module")
def plain(model):
    """What comes without drafts: tokens, log-probabilities and reasons."""
    run = harness.Drive(model, harness.step_knobs(), 64)
    outputs = run.run(mixed_arrivals())
    return dict(outputs), dict(run.logprobs), {end.request.seq_id: end.reason for end in run.ended}


def assert_same(run, outputs, plain):
    tokens, logprobs, reasons = plain
    assert outputs == tokens
    assert {end.request.seq_id: end.reason for end in run.ended} == reasons
    for index, entries in logprobs.items():
        got = run.logprobs[index]
        assert [e.chosen for e in got] == pytest.approx([e.chosen for e in entries], abs=1e-4)
        assert [[i for i, _ in e.top] for e in got] == [[i for i, _ in e.top] for e in entries]


@pytest.mark.parametrize(("strategy", "pool"), list(itertools.product(Strategy, ("ample", "scarce", "resized"))))
def test_the_same_tokens_come(model, plain, strategy, pool):
    """Under each strategy, with chunks of 16, prefix cache, preemption and a pool that is rebuilt."""
    actions = {6: lambda scheduler: scheduler.resize_pool(12), 14: lambda scheduler: scheduler.resize_pool(48)}
    run = harness.Drive(
        model,
        harness.step_knobs(strategy=strategy, speculative=4, max_num_batched_tokens=24, long_prefill_threshold=16),
        12 if pool == "scarce" else 64,
        actions=actions if pool == "resized" else {},
        proposer=Foresight(plain[0]),
    )
    assert_same(run, run.run(mixed_arrivals()), plain)
    assert run.gauges.draft_tokens > run.gauges.accepted_drafts > 10


def test_two_plans_in_flight_leave_no_time_for_drafts(model, plain):
    """A sequence's newest token isn't known yet when its next step is planned; what comes is the same."""
    run = harness.Drive(model, harness.step_knobs(speculative=4), 64, depth=2, proposer=Foresight(plain[0]))
    assert_same(run, run.run(mixed_arrivals()), plain)


def test_drafts_save_steps(model, plain):
    """With perfect foresight and four drafts a sequence of 24 tokens is there after a fifth of the steps."""
    arrival = harness.Arrival(PROMPT, harness.greedy(24))
    slow = harness.Drive(model, harness.step_knobs(), 64)
    tokens = slow.run([arrival])
    foresight = Foresight({0: tokens[0]}, wrong_every=10**9)
    fast = harness.Drive(model, harness.step_knobs(speculative=4), 64, proposer=foresight)
    assert fast.run([arrival]) == tokens
    # the chance that the next draft is right is one in two at first, so that the first checks are shorter
    assert fast.gauges.slot_steps_busy <= 1 + 6
    assert slow.gauges.slot_steps_busy == 24


def test_lookup_finds_what_repeats(model):
    """A model that is made to repeat its prompt by a bias is guessed right from the prompt."""
    params = SamplingParams(max_tokens=24, temperature=0, logit_bias={11: 100.0}, ignore_eos=True)
    run = harness.Drive(model, harness.step_knobs(speculative=8), 64, proposer=PromptLookup())
    assert run.run([harness.Arrival([*PROMPT, 11, 11], params)])[0] == [11] * 24
    assert run.gauges.accepted_drafts == run.gauges.draft_tokens >= 16


def test_a_stop_token_inside_a_run_of_right_drafts_ends_it_there(model):
    free = harness.Drive(model, harness.step_knobs(), 64).run([harness.Arrival(PROMPT, harness.greedy(12))])[0]
    place = next(i for i in range(3, 12) if free[i] not in free[:i])
    params = replace(harness.greedy(12), stop_token_ids=(free[place],), logprobs=0)
    run = harness.Drive(model, harness.step_knobs(speculative=8), 64, proposer=Foresight({0: free}, 10**9))
    assert run.run([harness.Arrival(PROMPT, params)])[0] == free[: place + 1]
    assert run.ended[0].reason is FinishReason.STOP
    assert len(run.logprobs[0]) == place + 1


def test_penalties_count_the_drafts_before_a_place():
    """What follows a draft is sampled as if the draft had been generated, and nothing is if it wasn't accepted."""
    sampling = SequenceSampling.of(SamplingParams(presence_penalty=1.0), (), [1, 2])
    sampling.accept(5)
    ahead = sampling.ahead((6, 6, 7))
    assert (ahead.history.ids, ahead.history.counts) == ([5, 6, 7], [1, 2, 1])
    assert (sampling.history.ids, sampling.history.counts) == ([5], [1])
    assert SequenceSampling.of(SamplingParams(), ()).ahead((6,)).history is None


def test_tokens_stand_up_to_the_first_that_is_no_draft():
    assert num_standing([4], ()) == 1
    assert num_standing([4, 5, 6], (4, 5)) == 3
    assert num_standing([4, 9, 6], (4, 5)) == 2
    assert num_standing([9, 5, 6], (4, 5)) == 1


def test_samples_of_a_place_that_was_passed_are_void(model):
    """A step before gave several tokens, so the next plan, made before that was known, ends inside what is known."""
    reference = harness.Drive(model, harness.step_knobs(), 64).run([harness.Arrival(PROMPT, harness.greedy(4))])[0]
    model.runner.add(91, PROMPT, harness.greedy(9))
    table, drafts = [0, 1], (reference[1], reference[2])
    for step, entry in enumerate(
        (
            ScheduledSequence(91, 0, 7, table, samples=True),
            ScheduledSequence(91, 7, 3, table, samples=True, drafts=drafts),
            ScheduledSequence(91, 0, 9, table, samples=True),
        )
    ):
        model.runner.submit(StepPlan(step, 0, (entry,), StepShape()))
    results = [model.runner.collect().tokens for _ in range(3)]
    assert results == [{91: (reference[0],)}, {91: tuple(reference[1:4])}, {}]
    model.runner.submit(StepPlan(3, 0, (), StepShape(), removed=(91,)))
    model.runner.collect()
