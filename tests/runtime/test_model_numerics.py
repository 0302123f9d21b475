"""Logits agree with `transformers` in float32, for every shape of Llama and every file format."""

import json
import random

import model_harness as harness
import pytest
import torch
from model_gguf import rounded, save_gguf
from transformers import LlamaForCausalLM

TOLERANCE = 1e-4

CONFIGS = {
    "grouped": {},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "odd groups": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
    "wide heads": {"head_dim": 32},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "large theta and epsilon": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-3},
}
TOKENS = random.Random(3).choices(range(199), k=90)
CHUNKS = {"whole": [90], "token by token": [1] * 90, "chunks": [16, 1, 1, 40, 32]}


def assert_agree(uri, model, chunks):
    ours, theirs = harness.logits_of(uri, TOKENS, chunks), harness.reference_logits(model, TOKENS)
    assert theirs.std() > 0.5, "logits near zero agree with anything"
    assert (ours - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
@pytest.mark.parametrize("name", CONFIGS)
def test_safetensors(name, chunks, tmp_path):
    model = harness.tiny_llama(**CONFIGS[name])
    assert_agree(harness.save_folder(model, tmp_path), model, chunks)


@pytest.mark.parametrize("name", CONFIGS)
def test_gguf(name, tmp_path):
    model = harness.tiny_llama(**CONFIGS[name])
    assert_agree(save_gguf(model, tmp_path / "model.gguf"), model, CHUNKS["chunks"])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_quantised_gguf(kind, tmp_path):
    model = harness.tiny_llama()
    uri = save_gguf(model, tmp_path / "model.gguf", kind)
    exact = harness.reference_logits(model, TOKENS)
    assert_agree(uri, rounded(model, kind), CHUNKS["chunks"])
    assert (harness.reference_logits(model, TOKENS) - exact).abs().max() > TOLERANCE, (
        "rounding must show, or this proves little"
    )


def test_gguf_as_transformers_reads_it(tmp_path):
    uri = save_gguf(harness.tiny_llama(attention_bias=False), tmp_path / "model.gguf", "Q8_0")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    assert_agree(uri, theirs, CHUNKS["whole"])


def test_sharded_safetensors(tmp_path):
    model = harness.tiny_llama()
    uri = harness.save_folder(model, tmp_path, shard="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_agree(uri, model, CHUNKS["whole"])


def test_config_of_older_transformers(tmp_path):
    model = harness.tiny_llama(**CONFIGS["llama3 rope"])
    uri = harness.save_folder(model, tmp_path)
    path = tmp_path / "config.json"
    text = path.read_text()
    document = json.loads(text)
    scaling = document.pop("rope_parameters")
    document["rope_theta"] = scaling.pop("rope_theta")
    document["rope_scaling"] = scaling
    path.write_text(json.dumps(document))
    assert_agree(uri, model, CHUNKS["whole"])


def test_bfloat16_stays_near(tmp_path):
    model = harness.tiny_llama()
    uri = harness.save_folder(model, tmp_path)
    ours = harness.logits_of(uri, TOKENS, CHUNKS["chunks"], torch.bfloat16)
    theirs = harness.reference_logits(model, TOKENS)
    error = (ours - theirs).abs().mean() / theirs.std()
    assert error < 0.05  # eight bits of mantissa through three layers
