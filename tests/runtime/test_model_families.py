"""Every family against `transformers`: logits and greedy tokens of tiny random models, out of every format."""

import json
import random
from dataclasses import dataclass, field

import gguf
import model_harness as harness
import pytest
import torch
import transformers
from model_gguf import random_blocks, rounded, save_gguf

from paceline_kernels import AttentionPlanner, SequenceSpan
from paceline_runtime.decoder import Decoder
from paceline_runtime.kv_pool import KvPool
from paceline_runtime.loader import load_model
from paceline_runtime.model_errors import ModelFormatError, UnsupportedModel
from paceline_runtime.model_files import locate_model
from paceline_runtime.open_model import open_model

TOLERANCE = 1e-4
TOKENS = random.Random(3).choices(range(199), k=90)
WHOLE, CHUNKS = [90], [16, 1, 1, 40, 32]

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0],
}
LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True)
class Family:
    """A tiny model: transformers' prefix, what differs from its defaults, and whether GGUF can say it."""

    name: str
    options: dict = field(default_factory=dict)
    gguf: bool = True
    limit: int | None = None  # the model's length

    def model(self):
        values = {
            "vocab_size": 199,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.15,
            "pad_token_id": 0,
            "eos_token_id": None,
            "bos_token_id": None,
            "tie_word_embeddings": False,
        }
        torch.manual_seed(0)
        name = f"{self.name}TextConfig" if self.name == "Gemma3" else f"{self.name}Config"
        config = getattr(transformers, name)(**(values | self.options))
        model = getattr(transformers, f"{self.name}ForCausalLM")(config).eval()
        return harness.shaken(model, norm=0.0 if self.name.startswith("Gemma") else 1.0)


def rope(kind, **values):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **values}}


FAMILIES = {
    "mistral": Family("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral with a window": Family("Mistral", {"sliding_window": 20}, gguf=False),
    "smollm3": Family("SmolLM3", {"tie_word_embeddings": True}),
    "smollm3 with windows": Family(
        "SmolLM3", {"no_rope_layers": [1, 0, 0, 1], "use_sliding_window": True, "sliding_window": 11}, gguf=False
    ),
    "qwen2": Family("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows": Family(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}, gguf=False
    ),
    "qwen2 with yarn": Family("Qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "qwen3": Family("Qwen3", {"head_dim": 32}),
    "qwen3 with biases": Family("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "gemma": Family("Gemma", {"head_dim": 32, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    "gemma2": Family(
        "Gemma2",
        {
            "head_dim": 32,
            "tie_word_embeddings": True,
            "sliding_window": 24,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma2 of 27B": Family(  # scaled by hidden_size / heads, which GGUF implies by the number of layers
        "Gemma2",
        {"num_hidden_layers": 46, "head_dim": 32, "query_pre_attn_scalar": 16, "tie_word_embeddings": True,
         "hidden_size": 64, "intermediate_size": 16, "initializer_range": 0.1},
    ),
    "gemma3": Family(
        "Gemma3",
        {
            "num_hidden_layers": 7,  # the sixth sees everything
            "head_dim": 32,
            "tie_word_embeddings": True,
            "sliding_window": 16,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3 with layers of its own": Family(
        "Gemma3",
        {"head_dim": 16, "tie_word_embeddings": True, "sliding_window": 9, "layer_types": LAYERS,
         "query_pre_attn_scalar": 50, "final_logit_softcapping": 5.0},
        gguf=False,
    ),
    "phi3": Family("Phi3", {}),
    "phi3 with a window": Family("Phi3", {"sliding_window": 20}),
    "phi3 with partly rotated heads": Family("Phi3", rope("default", partial_rotary_factor=0.75)),
    "phi3 with longrope, short": Family(
        "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 96}, limit=96
    ),
    "phi3 with longrope, long": Family("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "phi4-mini": Family(
        "Phi3",
        {
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                **LONGROPE,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0] * 4,
                "long_factor": [1.0, 2.0, 4.0, 16.0],
            },
        },
    ),
}  # fmt: skip


def assert_agree(uri, model, chunks, limit=None):
    ours, theirs = harness.logits_of(uri, TOKENS, chunks, limit=limit), harness.reference_logits(model, TOKENS)
    assert theirs.std() > 0.5, "logits near zero agree with anything"
    assert (ours - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_out_of_safetensors(name, tmp_path):
    family = FAMILIES[name]
    model = family.model()
    uri = harness.save_folder(model, tmp_path, shard="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_agree(uri, model, CHUNKS, family.limit)
    assert_agree(uri, model, WHOLE, family.limit)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.gguf])
def test_logits_out_of_gguf(name, tmp_path):
    family = FAMILIES[name]
    model = family.model()
    assert_agree(save_gguf(model, tmp_path / "model.gguf"), model, CHUNKS, family.limit)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", ["smollm3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3"])
def test_logits_out_of_quantised_gguf(name, kind, tmp_path):
    model = FAMILIES[name].model()
    uri = save_gguf(model, tmp_path / "model.gguf", kind)
    assert_agree(uri, rounded(model, kind), WHOLE)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_logits_out_of_k_quants(kind, tmp_path, monkeypatch):
    # the library reads these types but doesn't write them: the model is what random blocks mean. Rows are whole blocks.
    model = Family("Qwen2", {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}).model()
    blocks = {}
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.ndim > 1:
                blocks[name] = random_blocks(kind, tuple(parameter.shape), seed, deviation=0.06)
                values = gguf.quants.dequantize(blocks[name], gguf.GGMLQuantizationType[kind])
                parameter.copy_(torch.from_numpy(values))
    state = {name: _Stored(blocks[name]) if name in blocks else tensor for name, tensor in model.state_dict().items()}
    reference = harness.reference_logits(model, TOKENS)
    monkeypatch.setattr(model, "state_dict", lambda: state)
    ours = harness.logits_of(save_gguf(model, tmp_path / "model.gguf", kind), TOKENS, WHOLE)
    assert reference.std() > 0.5
    assert (ours - reference).abs().max() < TOLERANCE


@dataclass
class _Stored:
    """Looks like a tensor to the writer."""

    values: object

    def numpy(self):
        return self.values


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens(name, tmp_path):
    family = FAMILIES[name]
    model = family.model()
    uri = harness.save_folder(model, tmp_path)
    # one long prompt (chunked, beyond every window), a short one beside it, both decoding together
    prompts = [TOKENS[:70], TOKENS[70:75]]
    arrivals = [harness.Arrival(prompt, harness.greedy(10), step=index) for index, prompt in enumerate(prompts)]
    # longrope in transformers goes by each text's length, here by the model's: the short prompt is left out
    arrivals = arrivals[:1] if "longrope" in name or "phi4" in name else arrivals
    references = {index: harness.reference(model, a.prompt, 10) for index, a in enumerate(arrivals)}
    loaded = load_model(uri, max_model_len=family.limit, num_blocks=32)
    try:
        run = harness.Drive(loaded, harness.step_knobs(max_num_batched_tokens=32, long_prefill_threshold=32), 32)
        assert harness.divergences(run.run(arrivals), references) <= 1
    finally:
        loaded.runner.close()


def test_gemma3_as_older_files_say_it(tmp_path):
    model = FAMILIES["gemma3"].model()
    uri = harness.save_folder(model, tmp_path)
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    for name in ("rope_parameters", "layer_types"):
        del document[name]
    document |= {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 6,
    }
    path.write_text(json.dumps(document))
    assert_agree(uri, model, CHUNKS)


def test_phi3_as_older_files_say_it(tmp_path):
    model = FAMILIES["phi3 with longrope, long"].model()
    uri = harness.save_folder(model, tmp_path)
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    rope = document.pop("rope_parameters")
    document["rope_theta"] = rope["rope_theta"]
    document["rope_scaling"] = {"type": "su", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    path.write_text(json.dumps(document))
    assert_agree(uri, model, CHUNKS)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return locate_model(str(folder))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types must name one of .* for each of 4 layers"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 4}, "layer_types must name one of"),
        ("gemma2", {"sliding_window": "4096"}, "sliding_window must be int"),
        ("gemma2", {"sliding_window": -1}, "sliding window = -1"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "scales and soft caps must be above 0"),
        ("gemma2", {"attn_logit_softcapping": 0}, "soft caps must be above 0"),
        ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern must be at least 1"),
        ("gemma3", {"rope_parameters": {"full_attention": 3}}, "must hold JSON objects"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 items for 4 layers"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval must be at least 1"),
        ("qwen2", {"hidden_act": "relu"}, "activation 'relu'"),
        ("qwen2", {"num_hidden_layers": 10**9}, "layers = 1000000000"),
        ("phi3 with longrope, long", {"rope_parameters": {**LONGROPE, "long_factor": [1.0]}}, "longrope has 1 factors"),
        ("phi3 with longrope, long", {"rope_parameters": {**LONGROPE, "long_factor": ["a"] * 8}}, "list of numbers"),
        ("phi3 with longrope, long", {"original_max_position_embeddings": 1}, "must be above 1"),
    ],
)
def test_what_is_wrong_is_named(name, changes, message, tmp_path):
    harness.save_folder(FAMILIES[name].model(), tmp_path)
    with pytest.raises((UnsupportedModel, ModelFormatError), match=message) as error:
        open_model(change_config(tmp_path, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_last_hidden_states_are_what_embeddings_are_made_of(name, tmp_path):
    model = FAMILIES[name].model()
    config, weights = open_model(locate_model(harness.save_folder(model, tmp_path)))
    decoder = Decoder(config, weights, dtype=torch.float32, device=torch.device("cpu"))
    pool = KvPool(config, 8, 16, torch.float32, decoder.device)
    batch = AttentionPlanner(16, torch.float32, window=config.window).plan([SequenceSpan(0, 90, range(8))])
    ours = decoder.normed(decoder.hidden(torch.tensor(TOKENS), batch, pool.layers))
    with torch.no_grad():
        theirs = model.model(torch.tensor([TOKENS])).last_hidden_state[0]
    assert (ours - theirs).abs().max() < TOLERANCE
