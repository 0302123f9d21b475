"""Tensor parallelism on CPUs: two ranks give the tokens of one, also behind the server; errors name the rank or size."""

import dataclasses
import os
import random
import re
import signal
from pathlib import Path

import model_harness as harness
import pytest
import torch
from serving_process import RuntimeProcess, alive, eventually
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline_core.knobs import Knobs, knobs_to_wire
from paceline_core.plan import ScheduledSequence, StepPlan, StepShape
from paceline_runtime.backend import load_backend
from paceline_runtime.decoder import Decoder
from paceline_runtime.model_errors import UnsupportedModel
from paceline_runtime.model_files import locate_model
from paceline_runtime.open_model import open_model
from paceline_runtime.parallel_group import RankDied
from paceline_runtime.parallel_weights import Shard, ShardedWeights, shard_config
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.settings import EngineSettings

# 257 tokens don't divide by 2, and biases of what is cut by input are added once
VOCABULARY = 257
SHAPE = {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2, "vocab_size": VOCABULARY}


@pytest.fixture(scope="module")
def reference_model():
    return harness.tiny_llama(seed=4, **SHAPE)


@pytest.fixture(scope="module")
def uri(reference_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return harness.save_folder(reference_model, folder)


def settings(uri, size=2, **changes):
    knobs = Knobs(max_num_seqs=4, max_num_seqs_limit=8, max_num_batched_tokens=64)
    values = {"max_model_len": 128, "num_blocks": 64, "device": "cpu", "tensor_parallel_size": size}
    return EngineSettings(model=uri, knobs=knobs_to_wire(knobs), **(values | changes)), knobs


@pytest.fixture(scope="module")
def pair(uri):
    """Two ranks; the last test that uses them ends one."""
    return load_backend(*settings(uri))


def arrivals(count):
    numbers = random.Random(9)
    lengths = [3, 40, 17, 1, 70][:count]
    return [
        harness.Arrival([numbers.randrange(VOCABULARY) for _ in range(length)], harness.greedy(6), step=index)
        for index, length in enumerate(lengths)
    ]


def test_two_ranks_give_the_tokens_of_one(pair, reference_model):
    asked = arrivals(5)
    references = {i: harness.reference(reference_model, a.prompt, a.params.max_tokens) for i, a in enumerate(asked)}
    actions = {6: lambda scheduler: scheduler.resize_pool(20)}
    run = harness.Drive(pair, harness.step_knobs(max_num_batched_tokens=32), 64, 2, actions)
    assert harness.divergences(run.run(asked), references) <= 1
    assert run.preemptions > 0, "the other rank rebuilt its pool too"


def test_log_probabilities_of_a_prompt_need_the_other_rank_out_of_turn(pair, reference_model):
    prompt = arrivals(2)[1].prompt
    pair.runner.add(7, prompt, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    item = ScheduledSequence(7, 0, len(prompt), [0, 1, 2], samples=True)
    pair.runner.submit(StepPlan(0, 0, (item,), StepShape()))
    result = pair.runner.collect()
    expected = harness.reference_logits(reference_model, prompt).log_softmax(-1)
    found = [entry.chosen for entry in result.prompts[7].logprobs]
    assert found == pytest.approx([float(expected[i, token]) for i, token in enumerate(prompt[1:])], abs=1e-4)
    assert result.tokens[7] == (int(expected[-1].argmax()),)


def test_the_group_is_refused_where_heads_do_not_divide(uri):
    with pytest.raises(UnsupportedModel, match=r"--tensor-parallel-size 4 doesn't divide .* 2 key/value heads: use 1 or 2"):
        shard_config(open_model(locate_model(uri))[0], 4)


def test_shards_join_to_the_whole(uri):
    config, weights = open_model(locate_model(uri))
    parts = [ShardedWeights(weights, config, Shard(rank, 2)) for rank in range(2)]
    local = shard_config(config, 2)
    hidden, wide = config.hidden_size, local.intermediate_size

    def both(name, *shape):
        return [part.tensor(name, shape) for part in parts]

    mlp = "model.layers.0.mlp."
    up, down = weights.tensor(mlp + "up_proj.weight", (96, hidden)), weights.tensor(mlp + "down_proj.weight", (hidden, 96))
    assert torch.equal(torch.cat(both(mlp + "up_proj.weight", wide, hidden)), up)
    assert torch.equal(torch.cat(both(mlp + "down_proj.weight", hidden, wide), 1), down)
    assert torch.equal(sum(both(mlp + "down_proj.bias", hidden)), weights.tensor(mlp + "down_proj.bias", (hidden,)))
    table = torch.cat(both("lm_head.weight", 129, hidden))
    assert torch.equal(table[:VOCABULARY], weights.tensor("lm_head.weight", (VOCABULARY, hidden)))
    assert not table[VOCABULARY].any()
    cut = [Decoder(local, part, dtype=torch.float32, device=torch.device("cpu")).weight_bytes for part in parts]
    assert max(cut) < 0.6 * sum(p.nbytes for p in harness.tiny_llama(seed=4, **SHAPE).parameters())


def test_a_rank_that_dies_ends_the_step_with_its_name(pair):
    link = pair.part.group._link
    os.kill(link._followers[0].pid, signal.SIGKILL)
    run = harness.Drive(pair, harness.step_knobs(), 64, 1)
    with pytest.raises(RankDied, match="rank 1 of the tensor-parallel group ended with signal 9"):
        run.run(arrivals(1))
    pair.runner.close()
    assert not link.store.parent.exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_of_the_gpu_path_give_the_tokens_of_one(uri, reference_model):
    """Under the interpreter: packed steps go to the other rank, it records the same graphs and gets the sampled tokens."""
    model = load_backend(*settings(uri, kernels="triton"))
    asked = [dataclasses.replace(each, params=harness.greedy(3)) for each in (arrivals(1)[0], arrivals(3)[2])]
    references = {i: harness.reference(reference_model, a.prompt, 3) for i, a in enumerate(asked)}
    run = harness.Drive(model, harness.step_knobs(), 16, 2)
    try:
        assert harness.divergences(run.run(asked), references) <= 1
    finally:
        model.runner.close()


# -- behind the server ----------------------------------------------------------------------------------------------


def ranks_of(runtime):
    """Return the engine's child processes."""
    children = f"/proc/{runtime.engine_pid}/task/{runtime.engine_pid}/children"
    return [int(pid) for pid in Path(children).read_text().split()]


@pytest.fixture
def serve(uri, tmp_path):
    """Start servers of so many ranks; a folder for each."""
    started = []

    def start(size):
        folder = tmp_path / str(size)
        folder.mkdir()
        small = ("--max-model-len", "128", "--num-gpu-blocks-override", "64", "--max-num-seqs", "4", "--threads", "1")
        arguments = ["--model", uri, "--tensor-parallel-size", str(size), "--device", "cpu", *small]
        started.append(RuntimeProcess(folder, arguments))
        return started[-1].wait_ready()

    yield start
    for runtime in started:
        runtime.close()


def answer(runtime):
    reply = runtime.complete(prompt="Hello, ranks", max_tokens=6, temperature=0, ignore_eos=True)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


@pytest.mark.slow
def test_a_server_of_two_ranks_comes_back_when_one_dies(serve):
    expected = answer(serve(1))
    runtime = serve(2)
    assert answer(runtime) == expected
    engine, (rank,) = runtime.engine_pid, ranks_of(runtime)
    os.kill(rank, signal.SIGKILL)
    runtime.complete(prompt="x", max_tokens=2)
    eventually(lambda: runtime.engine_pid != engine, "the engine is started again")
    assert re.search("rank 1 of the tensor-parallel group ended with signal 9", runtime.log)
    runtime.wait_ready()
    assert answer(runtime) == expected
    (last,) = ranks_of(runtime)
    runtime.close()
    eventually(lambda: not alive(last), "the other rank ends with the server")
