"""The runner beside greedy equality: seeds, logprobs, stop bans, state of sequences, errors, and the pool's size."""

import math

import model_harness as harness
import psutil
import pytest
import torch

from paceline_core.errors import FormatError
from paceline_core.plan import ScheduledSequence, StepPlan, StepShape
from paceline_runtime import memory
from paceline_runtime.loader import load_model
from paceline_runtime.memory import MEMORY_LIMIT_ENV, MemoryBudget, cpu_memory_limit
from paceline_runtime.model_errors import MemoryBudgetError
from paceline_runtime.sampler import SequenceSampling
from paceline_runtime.sampling_params import SamplingParams

PROMPT = [5, 17, 101, 44, 9, 60, 3]


@pytest.fixture(scope="module")
def reference_model():
    return harness.tiny_llama(seed=2)


@pytest.fixture(scope="module")
def model(reference_model, tmp_path_factory):
    uri = harness.save_folder(reference_model, tmp_path_factory.mktemp("runner"))
    model = load_model(uri, max_model_len=128, num_blocks=64)
    yield model
    model.runner.close()


def drive(model, *params, prompt=PROMPT, blocks=64, depth=2):
    run = harness.Drive(model, harness.step_knobs(), blocks, depth)
    return run, run.run([harness.Arrival(prompt, each) for each in params])


def test_a_seed_gives_the_same_tokens_in_any_company(model):
    def seeded(seed):
        return SamplingParams(max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True)

    _, alone = drive(model, seeded(7))
    _, mixed = drive(model, *[seeded(seed) for seed in (1, 7, 3, 7, 2)], harness.greedy(12))
    assert mixed[1] == mixed[3] == alone[0]
    assert len({tuple(mixed[i]) for i in (0, 1, 2, 4)}) == 4
    crowded = harness.Drive(model, harness.step_knobs(), 64, 2, {4: lambda scheduler: scheduler.resize_pool(4)})
    recomputed = crowded.run([harness.Arrival(PROMPT, seeded(seed)) for seed in (1, 7, 3, 7, 2)])
    assert crowded.preemptions > 0
    assert recomputed[1] == recomputed[3] == alone[0]


def test_without_a_seed_runs_differ(model):
    params = SamplingParams(max_tokens=16, temperature=1.5, ignore_eos=True)
    _, outputs = drive(model, params, params)
    assert outputs[0] != outputs[1]


def test_random_numbers_are_even_over_tokens_and_seeds():
    def number(seed, index):
        return SequenceSampling.of(SamplingParams(seed=seed), ()).row(index).uniform

    for numbers in ([number(5, index) for index in range(1000)], [number(seed, 5) for seed in range(1000)]):
        assert all(0 <= value < 1 for value in numbers)
        tenths = [sum(int(value * 10) == tenth for value in numbers) for tenth in range(10)]
        assert all(60 < count < 140 for count in tenths)  # 100 expected, 9.5 the standard deviation


def test_a_negative_seed_works(model):
    params = SamplingParams(max_tokens=5, seed=-1)
    assert drive(model, params)[1] == drive(model, params)[1]


def test_sampling_follows_the_distribution(model, reference_model):
    """Over many seeds the first token's frequencies are the reference's probabilities (chi-squared, fixed seeds)."""
    count = 400
    arrivals = [harness.Arrival(PROMPT, SamplingParams(max_tokens=1, temperature=1.0, seed=seed)) for seed in range(count)]
    outputs = harness.Drive(model, harness.step_knobs(max_num_seqs=64), 64).run(arrivals)
    probabilities = harness.reference_logits(reference_model, PROMPT)[-1].softmax(-1)
    likely = (probabilities * count >= 5).nonzero()[:, 0].tolist()
    drawn = [tokens[0] for tokens in outputs.values()]
    statistic = sum(
        (drawn.count(i) - count * float(probabilities[i])) ** 2 / (count * float(probabilities[i])) for i in likely
    )
    assert len(likely) > 3
    assert statistic < len(likely) + 5 * math.sqrt(2 * len(likely))


def test_logprobs(model, reference_model):
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=4, ignore_eos=True)
    run, outputs = drive(model, params, harness.greedy(2))
    assert run.logprobs[1] == []
    tokens = PROMPT + outputs[0]
    expected = harness.reference_logits(reference_model, tokens).log_softmax(-1)
    for place, (token, entry) in enumerate(zip(outputs[0], run.logprobs[0], strict=True), len(PROMPT) - 1):
        best = expected[place].topk(4)
        assert [i for i, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert entry.chosen == pytest.approx(float(expected[place, token]), abs=1e-4)


def test_zero_logprobs_report_the_chosen_token_only(model):
    run, _ = drive(model, SamplingParams(max_tokens=1, temperature=0, logprobs=0))
    assert run.logprobs[0][0].top == ()


def test_stop_tokens_are_banned_until_min_tokens(model):
    _, free = drive(model, harness.greedy(4))
    first = free[0][0]
    stopping = SamplingParams(max_tokens=8, temperature=0, stop_token_ids=(first,))
    assert drive(model, stopping)[1][0] == [first]
    waiting = SamplingParams(max_tokens=8, temperature=0, stop_token_ids=(first,), min_tokens=3)
    tokens = drive(model, waiting)[1][0]
    assert first not in tokens[:3]
    assert len(tokens) >= 3


def test_state_goes_with_the_sequence(model):
    drive(model, *[harness.greedy(count) for count in (1, 2, 3, 9)])
    assert not {0, 1, 2} & set(model.runner.seq_ids), "the plans said that they ended"
    # the news of the last ends comes with the next plan
    model.runner.submit(StepPlan(0, 0, (), StepShape(), removed=tuple(model.runner.seq_ids)))
    assert model.runner.collect().tokens == {}
    assert not model.runner.seq_ids


def test_an_error_reaches_who_collects_and_the_runner_goes_on(model):
    item = ScheduledSequence(77, 0, len(PROMPT), [0], samples=True)
    model.runner.submit(StepPlan(0, 0, (item,), StepShape()))
    with pytest.raises(KeyError, match="77"):
        model.runner.collect()
    _, outputs = drive(model, harness.greedy(2))
    assert len(outputs[0]) == 2


def test_a_plan_beyond_what_is_known_is_a_bug(model):
    model.runner.add(78, PROMPT, harness.greedy(2))
    for entry in (
        ScheduledSequence(78, 0, len(PROMPT) + 1, [0, 1], samples=False),
        ScheduledSequence(78, 7, 3, [0, 1], samples=True, drafts=(4, 5)),
    ):
        model.runner.submit(StepPlan(0, 0, (entry,), StepShape()))
        with pytest.raises(AssertionError, match="sequence 78"):
            model.runner.collect()
    model.runner.submit(StepPlan(0, 0, (), StepShape(), removed=(78,)))
    model.runner.collect()


def test_a_table_that_grows_is_read_on_and_another_one_anew(model):
    model.runner.add(2, PROMPT, harness.greedy(30))
    first, second = [3, 9], [3, 5]  # at the same place in memory or not: the second is another list

    def tables(entry):
        model.runner.submit(StepPlan(0, 0, (entry,), StepShape()))
        return model.runner._steps[-1].batch.tables.tolist()

    assert tables(ScheduledSequence(2, 0, 7, first, samples=True)) == [3]
    model.runner.collect()
    first.append(4)
    assert tables(ScheduledSequence(2, 0, 7, first[:], samples=False)) == [3]
    assert tables(ScheduledSequence(2, 0, 40, first, samples=False)) == [3, 9, 4]
    assert tables(ScheduledSequence(2, 0, 30, second, samples=False)) == [3, 5]
    model.runner._steps.clear()
    model.runner.submit(StepPlan(0, 0, (), StepShape(), removed=(2,)))
    model.runner.collect()


def test_results_come_in_order_and_tell_their_time(model):
    model.runner.add(1, PROMPT, harness.greedy(9))
    table = [0, 1]
    model.runner.submit(StepPlan(0, 0, (ScheduledSequence(1, 0, 7, table, samples=True),), StepShape()))
    model.runner.submit(StepPlan(1, 0, (ScheduledSequence(1, 7, 1, table, samples=True),), StepShape(), removed=()))
    first, second = model.runner.collect(), model.runner.collect()
    assert first.duration > 0 and second.duration > 0
    _, outputs = drive(model, harness.greedy(2))
    assert [*first.tokens[1], *second.tokens[1]] == outputs[0]


def test_random_weights_run(tmp_path):
    harness.save_folder(harness.tiny_llama(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    models = [load_model(str(tmp_path), load_format="dummy", seed=seed, num_blocks=8) for seed in (1, 1, 2)]
    outputs = []
    for model in models:
        run = harness.Drive(model, harness.step_knobs(), 8)
        outputs.append(run.run([harness.Arrival(PROMPT, harness.greedy(8))])[0])
        model.runner.close()
    assert outputs[0] == outputs[1] != outputs[2]


# -- memory ---------------------------------------------------------------------------------------------------------

BUDGET = MemoryBudget(
    limit=1000, base=100, weights=300, activations=100, step_tokens=50, token_bytes=2, block_bytes=10, max_blocks=1000
)  # fmt: skip


def test_the_share_of_what_is_left():
    assert BUDGET.free == 500
    assert BUDGET.blocks_for(1.0) == 50
    assert BUDGET.blocks_for(0.5) == 25
    assert BUDGET.blocks_for(0.999) == 49
    assert BUDGET.blocks_for_utilization(0.9) == 40  # vLLM: 0.9 × 1000 - 100 - 300 - 100


def test_the_caps():
    import dataclasses

    assert dataclasses.replace(BUDGET, max_blocks=7).blocks_for(1.0) == 7
    assert dataclasses.replace(BUDGET, max_kv_bytes=120).blocks_for(1.0) == 12


@pytest.mark.parametrize("budget", [BUDGET.blocks_for, BUDGET.blocks_for_utilization])
def test_no_room(budget):
    with pytest.raises(MemoryBudgetError, match=r"no memory for a KV cache under .* 0\.01"):
        budget(0.01)


def test_steps_may_grow_into_what_the_pool_leaves():
    BUDGET.check_step(50, 50)  # what it started with, beside a pool of all that is left
    BUDGET.check_step(1, 60)  # also where somebody gave the pool more
    BUDGET.check_step(100, 40)  # 50 tokens more of 2 bytes, as many as are left
    with pytest.raises(MemoryBudgetError, match=r"maxNumBatchedTokens 101: .* started with.* lower kvMemoryFraction"):
        BUDGET.check_step(101, 40)
    with pytest.raises(MemoryBudgetError, match="0 MiB are left"):
        BUDGET.check_step(51, 60)


def test_describe_names_bytes_and_blocks():
    text = BUDGET.describe(25, 16)
    for part in (
        "25 blocks of 16 tokens",
        "250 bytes",
        "500 free",
        "limit 1000",
        "base 100",
        "weights 300",
        "activations 100",
    ):
        assert part in text


def test_the_limit_is_the_smallest(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(memory, "_SELF_CGROUP", tmp_path / "self")
    monkeypatch.delenv(MEMORY_LIMIT_ENV, raising=False)
    (tmp_path / "self").write_text("0::/pod/container\n4:memory:/old\n3:cpuset:/\n")
    limit, cap = cpu_memory_limit()
    assert cap is not None, "nobody set a limit"
    assert limit > 0
    container = tmp_path / "pod" / "container"
    container.mkdir(parents=True)
    (container / "memory.max").write_text("max\n")
    (tmp_path / "pod" / "memory.max").write_text(f"{700 << 20}\n")
    assert cpu_memory_limit() == (700 << 20, None), "a parent's limit counts"
    (tmp_path / "memory" / "old").mkdir(parents=True)
    (tmp_path / "memory" / "old" / "memory.limit_in_bytes").write_text(str(600 << 20))
    assert cpu_memory_limit() == (600 << 20, None)
    monkeypatch.setenv(MEMORY_LIMIT_ENV, str(500 << 20))
    assert cpu_memory_limit() == (500 << 20, None)
    monkeypatch.setenv(MEMORY_LIMIT_ENV, "512Mi")
    with pytest.raises(FormatError, match="number of bytes"):
        cpu_memory_limit()


def test_a_loaded_model_fits_its_limit(reference_model, tmp_path, monkeypatch):
    uri = harness.save_folder(reference_model, tmp_path)
    monkeypatch.setenv(MEMORY_LIMIT_ENV, str(2 << 30))
    model = load_model(uri, kv_memory_fraction=0.5, max_num_seqs_limit=100_000, kernels="torch")
    parameters = sum(p.nbytes for p in reference_model.parameters())
    assert model.budget.weights == parameters
    assert model.budget.limit == 2 << 30
    assert model.budget.block_bytes == 3 * 16 * 2 * 2 * 16 * 4  # layers × slots × (k, v) × heads × size × bytes
    assert model.num_blocks == model.blocks_for(0.5) == model.budget.free // 2 // model.budget.block_bytes
    assert model.blocks_for(0.25) < model.num_blocks
    model.runner.close()
    monkeypatch.setenv(MEMORY_LIMIT_ENV, str(1 << 20))
    with pytest.raises(MemoryBudgetError, match=r"raise limits.memory"):
        load_model(uri)


def test_zeroed_pool_of_another_size():
    from paceline_runtime.kv_pool import KvPool
    from paceline_runtime.model_config import ModelConfig, RopeConfig

    config = ModelConfig("x", 8, 8, 8, 2, 2, 1, 4, 64, 1e-5, (RopeConfig(1e4),))
    pool = KvPool(config, 5, 16, torch.float32, torch.device("cpu"))
    pool.layers[1].fill_(3)
    pool.resize(9)
    assert pool.num_blocks == 9
    assert [tuple(layer.shape) for layer in pool.layers] == [(9, 16, 2, 1, 4)] * 2
    assert all((layer == 0).all() for layer in pool.layers)


def test_a_touched_pool_has_memory_and_is_still_empty(monkeypatch):
    from paceline_runtime import kv_pool
    from paceline_runtime.model_config import ModelConfig, RopeConfig

    config = ModelConfig("x", 8, 8, 8, 2, 2, 1, 64, 64, 1e-5, (RopeConfig(1e4),))
    monkeypatch.setattr(kv_pool, "_TOUCHED_BYTES", 64 << 20)
    before = psutil.Process().memory_info().rss
    pool = kv_pool.KvPool(config, 4000, 16, torch.float32, torch.device("cpu"))  # 131 MB
    pool.touch(2)
    grown = psutil.Process().memory_info().rss - before
    assert 60 << 20 < grown < 90 << 20, "the first half, in whole pages"
    assert all((layer == 0).all() for layer in pool.layers)
