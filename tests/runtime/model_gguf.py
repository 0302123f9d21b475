"""Writes `transformers` models as GGUF files, as llama.cpp's converter does (names by the `gguf` library's own tables)."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "SmolLM3ForCausalLM": "smollm3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
}


def save_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: str = "F32",
    others: dict[str, str] | None = None,
    *,
    architecture: str | None = None,
    **tokenizer,
) -> str:
    """Write a model with its matrices as `kind` and its vectors in float32; return its URI.

    `others` are kinds of matrices by a part of their names.

    `tokenizer` holds GGUF's tokenizer keys without their prefix (`model`, `tokens`, …).
    """
    architecture = architecture or ARCHITECTURES[type(model).__name__]
    writer = gguf.GGUFWriter(path, architecture)
    _write_sizes(writer, model.config)
    _write_rope(writer, model)
    if architecture.startswith("gemma"):
        _write_gemma(writer, model.config)
    if architecture == "phi3" and model.config.sliding_window:
        writer.add_sliding_window(model.config.sliding_window)
    for key, value in tokenizer.items():
        _write_value(writer, f"tokenizer.ggml.{key}", value)
    for name, tensor in model.state_dict().items():
        if not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            stored = stored_name(architecture, name)
            its_kind = next((other for part, other in (others or {}).items() if part in stored), kind)
            add_tensor(writer, stored, _stored(model.config, architecture, name, tensor.numpy()), its_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@functools.cache
def _names(architecture: str) -> gguf.TensorNameMap:
    key = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    return gguf.get_tensor_name_map(key, 64)


def stored_name(architecture: str, name: str) -> str:
    """Return the GGUF name of a Hugging Face tensor."""
    stored = _names(architecture).get_name(name, (".weight", ".bias"))
    assert stored, f"{architecture} has no {name}"
    return stored


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    """Add a tensor, quantised where it is a matrix; one that is quantised already (uint8) goes in as it is."""
    quantisation = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else kind]
    if values.dtype != np.uint8:
        values = gguf.quants.quantize(values.astype(np.float32), quantisation)
    writer.add_tensor(name, values, raw_dtype=quantisation)


def rounded(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Round a model's matrices to what a GGUF type can hold, in place: the reference for a quantised file."""
    quantisation = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                stored = gguf.quants.quantize(parameter.numpy(), quantisation)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, quantisation).copy()))
    return model


def _write_sizes(writer: gguf.GGUFWriter, config) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)))


def _write_rope(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(model.model.rotary_emb.attention_scaling)
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], dtype=np.float32))
    if rope["rope_type"] == "llama3":
        inverse = model.model.rotary_emb.inv_freq
        plain = 1 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / inverse).numpy().astype(np.float32))


def _write_gemma(writer: gguf.GGUFWriter, config) -> None:
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)


def _write_value(writer: gguf.GGUFWriter, key: str, value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def _stored(config, architecture: str, name: str, values: np.ndarray) -> np.ndarray:
    if architecture.startswith("gemma") and "norm" in name:
        return values + 1
    if architecture in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    return values


# where the blocks of K-quants hold their float16 scales: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(kind: str, shape: tuple[int, int], seed: int, deviation: float) -> np.ndarray:
    """Return a matrix of random blocks of a type that the library reads but doesn't write.

    `deviation` is the standard deviation of the numbers that they mean.
    """
    quantisation = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantisation]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (math.prod(shape) // block, size), dtype=np.uint8)
    scales = generator.uniform(0.5, 1.0, (len(raw), len(_SCALES[kind])))
    _set_scales(raw, _SCALES[kind], scales)
    unit = gguf.quants.dequantize(raw, quantisation).std()
    _set_scales(raw, _SCALES[kind], scales * deviation / unit)
    return raw.reshape(shape[0], -1)


def _set_scales(raw: np.ndarray, places: tuple[int, ...], scales: np.ndarray) -> None:
    for column, place in enumerate(places):
        raw[:, place : place + 2] = scales[:, column].astype(np.float16)[:, None].view(np.uint8)
