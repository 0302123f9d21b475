"""Writes a GGUF model as a Hugging Face folder in float32, by our own loader: the same weights for everybody."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from paceline_runtime.gguf_file import read_gguf
from paceline_runtime.model_config import ModelConfig
from paceline_runtime.model_files import locate_model
from paceline_runtime.open_model import open_model
from paceline_runtime.tokenizer_gguf import build_tokenizer


def llama_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each tensor of a Llama with tied embeddings."""
    hidden, wide, queries = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,),
    }  # fmt: skip
    for i in range(config.num_layers):
        at = f"model.layers.{i}"
        shapes |= {
            f"{at}.input_layernorm.weight": (hidden,), f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.self_attn.q_proj.weight": (queries, hidden), f"{at}.self_attn.k_proj.weight": (keys, hidden),
            f"{at}.self_attn.v_proj.weight": (keys, hidden), f"{at}.self_attn.o_proj.weight": (hidden, queries),
            f"{at}.mlp.gate_proj.weight": (wide, hidden), f"{at}.mlp.up_proj.weight": (wide, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, wide),
        }  # fmt: skip
    return shapes


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
    """Return `config.json`, with the rope's base where transformers 4 and where transformers 5 looks for it."""
    theta = config.ropes[0].theta
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "hidden_act": "silu",
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions, "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta}, "eos_token_id": config.eos_token_ids[0],
    }  # fmt: skip


def export(uri: str, folder: Path) -> None:
    """Write the model at `uri`, a GGUF of a Llama with tied embeddings, to `folder`."""
    files = locate_model(uri)
    config, weights = open_model(files)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: weights.tensor(name, shape).contiguous() for name, shape in llama_tensors(config).items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hugging_face_config(config), indent=1))
    tokenizer = build_tokenizer(read_gguf(files.path))
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.id_to_token(config.eos_token_ids[0])
    # the plain class: every version of transformers reads it
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "model_max_length": config.max_positions}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config.eos_token_ids[0]}))


if __name__ == "__main__":
    export(sys.argv[1], Path(sys.argv[2]))
