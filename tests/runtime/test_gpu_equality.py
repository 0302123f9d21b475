"""The GPU path under Triton's interpreter gives the tokens of `transformers`: graphs, look-ahead, padding, preemption."""

import random

import model_harness as harness
import pytest

pytest.importorskip("triton")

from paceline_core.knobs import Strategy
from paceline_runtime.gpu_runner import PagedRunner
from paceline_runtime.loader import load_model
from paceline_runtime.sampling_params import SamplingParams

# The interpreter takes a tenth of a second for each kernel: one layer, one KV head, few and short requests.
TINY = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_key_value_heads": 1, "vocab_size": 97}
LENGTHS = ((5, 5), (33, 3), (1, 4), (17, 2), (16, 6))  # prompt, new tokens; the second spans three blocks
COUNT = len(LENGTHS)


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    reference_model = harness.tiny_llama(seed=3, num_attention_heads=2, **TINY)
    uri = harness.save_folder(reference_model, tmp_path_factory.mktemp("gpu"))
    numbers = random.Random(5)
    arrivals = [
        harness.Arrival([numbers.randrange(97) for _ in range(length)], harness.greedy(new), step=index)
        for index, (length, new) in enumerate(LENGTHS)
    ]
    references = {i: harness.reference(reference_model, a.prompt, a.params.max_tokens) for i, a in enumerate(arrivals)}
    model = load_model(uri, max_model_len=64, num_blocks=2, max_num_seqs_limit=4, kernels="triton")
    assert isinstance(model.runner, PagedRunner)
    yield model, arrivals, references, uri
    model.runner.close()


def drive(setting, *, blocks=16, depth=2, actions=None, count=COUNT, **knobs):
    model, arrivals, references, _ = setting
    limits = {"max_num_seqs": 3, "max_num_seqs_limit": 4, "max_num_batched_tokens": 24, "long_prefill_threshold": 24}
    run = harness.Drive(model, harness.step_knobs(**(limits | knobs)), blocks, depth, actions or {})
    outputs = run.run(arrivals[:count])
    assert harness.divergences(outputs, {i: references[i] for i in range(count)}) <= 1
    return run


def test_chunks_and_decodes_with_a_step_of_look_ahead(setting):
    run = drive(setting)
    assert run.preemptions == 0
    recorded = setting[0].part.executor.graphs.recorded
    assert len(recorded) >= 2, "decodes of several sizes ran as graphs"


def test_a_preempted_sequence_is_computed_again_from_tokens_that_the_host_has_yet_to_read(setting):
    run = drive(setting, actions={4: lambda scheduler: scheduler.resize_pool(4)}, count=3)
    assert run.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True])
def test_every_strategy(setting, strategy, depth, caching):
    drive(setting, depth=depth, strategy=strategy, prefix_caching=caching)


@pytest.mark.slow
def test_a_scarce_pool(setting):
    drive(setting, blocks=4, depth=2)  # who comes waits for memory; that it is taken away is the test of a resized pool


def test_a_seed_gives_the_same_tokens_in_any_company(setting):
    model, arrivals, _, _ = setting
    prompt = arrivals[0].prompt

    def seeded(seed):
        return SamplingParams(max_tokens=3, temperature=1.0, top_k=20, seed=seed, ignore_eos=True)

    def run(*params):
        return harness.Drive(model, harness.step_knobs(max_num_seqs_limit=4, max_num_seqs=4), 16, 2).run(
            [harness.Arrival(prompt, each) for each in params]
        )

    alone = run(seeded(7))[0]
    mixed = run(seeded(1), harness.greedy(3), seeded(7))
    assert mixed[2] == alone
    assert mixed[0] != alone or mixed[1] != alone


def test_what_depends_on_the_tokens_before_waits_for_them(setting):
    """A repetition penalty beyond all logits never lets a token come twice, and log-probabilities come with their tokens."""
    model, arrivals, _, uri = setting
    params = SamplingParams(max_tokens=5, temperature=0, frequency_penalty=2.0, logprobs=2, ignore_eos=True)
    knobs = harness.step_knobs(max_num_seqs_limit=4, max_num_seqs=4)
    run = harness.Drive(model, knobs, 16, 2)
    gpu = run.run([harness.Arrival(arrivals[0].prompt, params), harness.Arrival(arrivals[2].prompt, harness.greedy(4))])
    plain = load_model(uri, max_model_len=64, num_blocks=16, max_num_seqs_limit=4)
    reference_run = harness.Drive(plain, knobs, 16, 1)
    cpu = reference_run.run([harness.Arrival(arrivals[0].prompt, params)])
    plain.runner.close()
    assert gpu[0] == cpu[0]
    assert len(run.logprobs[0]) == 5
    for ours, theirs in zip(run.logprobs[0], reference_run.logprobs[0], strict=True):
        assert ours.chosen == pytest.approx(theirs.chosen, abs=1e-3)
        assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
