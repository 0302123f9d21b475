"""A whole decoder in the native CPU kernels: greedy tokens by the rule for `transformers`, logits beside torch's kernels."""

import model_harness as harness
import pytest
import torch
from model_gguf import save_gguf

from paceline_kernels import use_kernels
from paceline_kernels.cpu import native
from paceline_runtime.loader import load_model

pytestmark = pytest.mark.skipif(not native.is_built(), reason="python -m paceline_kernels.cpu comes first")


def test_greedy_tokens_equal_transformers(tmp_path):
    reference = harness.tiny_llama(seed=1)
    uri = harness.save_folder(reference, tmp_path)
    prompts = [[(7 * i + 3 * n) % 199 for i in range(n)] for n in (1, 15, 16, 33, 110)]
    arrivals = [harness.Arrival(prompt, harness.greedy(12), step=i) for i, prompt in enumerate(prompts)]
    model = load_model(uri, max_model_len=256, num_blocks=2, max_num_seqs_limit=64)
    try:
        assert model.part.decoder.native
        outputs = harness.Drive(model, harness.step_knobs(max_num_batched_tokens=32), 64, 2).run(arrivals)
    finally:
        model.runner.close()
    references = {i: harness.reference(reference, prompt, 12) for i, prompt in enumerate(prompts)}
    assert harness.divergences(outputs, references) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_beside_torch(tmp_path, dtype):
    uri = harness.save_folder(harness.tiny_llama(seed=2), tmp_path)
    tokens = [(11 * i) % 199 for i in range(90)]
    chunks = [1, 1, 30, 57, 1]
    with use_kernels("torch"):
        expected = harness.logits_of(uri, tokens, chunks)
    found = harness.logits_of(uri, tokens, chunks, dtype)
    bound = 1e-4 if dtype is torch.float32 else 0.05  # 8 bits of mantissa in weights and cache
    assert (found - expected).norm() / expected.norm() < bound


STORED = ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16"]


@pytest.fixture(params=["auto", "avx2"])
def bound(request):
    """Start the kernels; what their rounding of activations may do to the logits: AMX multiplies prompts in bfloat16."""
    try:
        yield 0.05 if native.start(request.param) == "amx" else 2e-3
    except RuntimeError:
        pytest.skip(f"this CPU has no {request.param}")
    native.start()


@pytest.mark.parametrize("form", STORED)
def test_weights_stay_as_the_file_holds_them(tmp_path, form, bound):
    """The same numbers as if they were widened to float32; what differs is the rounding of activations, keys and values."""
    uri = save_gguf(harness.tiny_llama(seed=3, tie_word_embeddings=True), tmp_path / "model.gguf", form)
    tokens = [(13 * i) % 199 for i in range(120)]
    chunks = [70, 1, 1, 9, 39]
    expected = harness.logits_of(uri, tokens, chunks)
    found = harness.logits_of(uri, tokens, chunks, as_stored=True)
    assert (found - expected).norm() / expected.norm() < bound


def test_what_auto_keeps(tmp_path):
    four = save_gguf(harness.tiny_llama(), tmp_path / "four.gguf", "Q4_1")
    whole = harness.save_folder(harness.tiny_llama(), tmp_path / "whole")
    kept, widened, plain = (
        load_model(uri, dtype=dtype, num_blocks=2) for uri, dtype in [(four, "auto"), (four, "float32"), (whole, "auto")]
    )
    rounded = load_model(whole, dtype="auto", quantization="int8", num_blocks=2)
    assert kept.part.kv.layers[0].dtype == rounded.part.kv.layers[0].dtype == torch.float16
    assert kept.budget.block_bytes == widened.budget.block_bytes / 2
    assert kept.budget.weights < widened.budget.weights / 3
    assert widened.part.kv.layers[0].dtype == plain.part.kv.layers[0].dtype == torch.float32, (
        "what was asked for, and stored"
    )


def test_a_projection_of_different_forms_is_widened(tmp_path, bound):
    """Files mix forms (Q4_K_M keeps some matrices in Q6_K); queries, keys and values are one product here."""
    uri = save_gguf(harness.tiny_llama(seed=4), tmp_path / "mixed.gguf", "Q4_1", {"attn_v": "Q8_0"})
    tokens = [(13 * i) % 199 for i in range(40)]
    expected = harness.logits_of(uri, tokens, [40])
    assert (harness.logits_of(uri, tokens, [40], as_stored=True) - expected).norm() / expected.norm() < bound


def test_a_token_outside_the_vocabulary_is_an_error_and_no_crash(tmp_path):
    uri = harness.save_folder(harness.tiny_llama(tie_word_embeddings=True), tmp_path)
    with pytest.raises(IndexError, match="outside the table"):
        harness.logits_of(uri, [5, 100_000], [2])
