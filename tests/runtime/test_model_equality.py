"""Greedy output equals `transformers`, token for token, whatever the scheduler does (the full matrix, on a tiny Llama)."""

import itertools
import random

import model_harness as harness
import pytest

from paceline_core.knobs import Strategy
from paceline_runtime.loader import load_model

STRATEGIES = list(Strategy)
BUDGETS = (16, 512)
COUNT = 12  # requests


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A loaded tiny Llama, mixed requests and their references."""
    folder = tmp_path_factory.mktemp("tiny")
    reference_model = harness.tiny_llama(seed=1)
    uri = harness.save_folder(reference_model, folder)
    random.seed(5)
    shared = [random.randrange(199) for _ in range(40)]
    arrivals = []
    for index in range(COUNT):
        # a third of the prompts share a prefix of two and a half blocks; lengths span one token to five blocks
        own = [random.randrange(199) for _ in range(random.choice([1, 3, 15, 16, 17, 33, 70]))]
        prompt = shared + own if index % 3 == 0 else own
        arrivals.append(harness.Arrival(prompt, harness.greedy(random.choice([1, 4, 11, 20])), step=index // 3 * 4))
    references = {i: harness.reference(reference_model, a.prompt, a.params.max_tokens) for i, a in enumerate(arrivals)}
    model = load_model(uri, max_model_len=256, num_blocks=2, max_num_seqs_limit=64)  # each run resizes it
    yield model, arrivals, references
    model.runner.close()


def drive(setting, *, blocks=64, depth=1, actions=None, arrivals=None, **knobs):
    model, all_arrivals, references = setting
    run = harness.Drive(model, harness.step_knobs(**knobs), blocks, depth, actions or {})
    outputs = run.run(arrivals or all_arrivals)
    return run, harness.divergences(outputs, references)


def test_near_ties_are_rare_in_the_reference(setting):
    margins = [margin for reference in setting[2].values() for margin in reference.margins]
    assert sum(margin < harness.NEAR_TIE for margin in margins) <= len(margins) * 0.01


@pytest.mark.parametrize("index", range(COUNT))
def test_alone(setting, index):
    model, arrivals, references = setting
    run = harness.Drive(model, harness.step_knobs(), 64)
    outputs = run.run([arrivals[index]])
    assert harness.divergences({index: outputs[0]}, {index: references[index]}) == 0


@pytest.mark.parametrize(
    ("strategy", "caching", "budget", "pool", "depth"),
    list(itertools.product(STRATEGIES, (False, True), BUDGETS, ("ample", "scarce", "resized"), (1, 2))),
)
def test_mixed(setting, strategy, caching, budget, pool, depth):
    # 12 blocks hold the longest request (110 + 20 tokens) and little else; a resize goes down to them and up again
    blocks = 12 if pool == "scarce" else 64
    actions = {}
    if pool == "resized":
        actions = {6: lambda scheduler: scheduler.resize_pool(12), 14: lambda scheduler: scheduler.resize_pool(48)}
    run, near_ties = drive(
        setting,
        blocks=blocks,
        depth=depth,
        actions=actions,
        strategy=strategy,
        prefix_caching=caching,
        max_num_batched_tokens=budget,
        long_prefill_threshold=budget,
    )
    assert near_ties <= 1
    assert run.cached_tokens == 0 or caching
    if pool == "scarce" and strategy is Strategy.CONTINUOUS:
        assert run.preemptions > 0


def test_the_matrix_meets_what_it_is_for(setting):
    run, _ = drive(setting, strategy=Strategy.CONTINUOUS)
    assert run.cached_tokens > 0, "no prefix was shared"
    assert run.preemptions == 0
    assert max(len(end.request.tokens) for end in run.ended) > 2 * 16, "no prompt spans chunks of 16"


def test_strategy_switches_while_running(setting):
    def to(strategy):
        return lambda scheduler: scheduler.set_knobs(harness.step_knobs(strategy=strategy))

    actions = {2: to(Strategy.STATIC), 8: to(Strategy.CONTINUOUS), 14: to(Strategy.DYNAMIC), 20: to(Strategy.ITERATION)}
    _, near_ties = drive(setting, actions=actions, strategy=Strategy.CONTINUOUS, depth=2)
    assert near_ties <= 1
