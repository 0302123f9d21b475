"""A whole decoder in the native CPU kernels: greedy tokens by the rule for `transformers`, logits beside torch's kernels."""

import model_harness as harness
import pytest
import torch

from paceline_kernels import use_kernels
from paceline_kernels.cpu import native
from paceline_runtime.loader import load_model

pytestmark = pytest.mark.skipif(not native.is_built(), reason="python -m paceline_kernels.cpu.build comes first")


def test_greedy_tokens_equal_transformers(tmp_path):
    reference = harness.tiny_llama(seed=1)
    uri = harness.save_folder(reference, tmp_path)
    prompts = [[(7 * i + 3 * n) % 199 for i in range(n)] for n in (1, 15, 16, 33, 110)]
    arrivals = [harness.Arrival(prompt, harness.greedy(12), step=i) for i, prompt in enumerate(prompts)]
    model = load_model(uri, kernels="native", max_model_len=256, num_blocks=2, max_num_seqs_limit=64)
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
    expected = harness.logits_of(uri, tokens, chunks)
    with use_kernels("native"):
        found = harness.logits_of(uri, tokens, chunks, dtype)
    bound = 1e-4 if dtype is torch.float32 else 0.05  # 8 bits of mantissa in weights and cache
    assert (found - expected).norm() / expected.norm() < bound
