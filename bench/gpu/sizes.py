"""What the GPU check measures: the full sizes for one H200, and tiny ones that prove the script on a CPU (`--dry`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from paceline_runtime.model_config import ModelConfig, RopeConfig

LLAMA_8B = ModelConfig(
    architecture="Llama-3.1-8B", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32,
    num_heads=32, num_kv_heads=8, head_dim=128, max_positions=131_072, rms_norm_eps=1e-5,
    ropes=(RopeConfig(500_000.0, "llama3", factor=8.0),),
)  # fmt: skip
QWEN3_06B = ModelConfig(
    architecture="Qwen3-0.6B", vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_layers=28,
    num_heads=16, num_kv_heads=8, head_dim=128, max_positions=40_960, rms_norm_eps=1e-6,
    ropes=(RopeConfig(1_000_000.0),), tie_embeddings=True, qk_norm=True,
)  # fmt: skip
_TINY = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1,
         "head_dim": 16, "max_positions": 512, "layers": ()}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Sizes of one run. Attention shapes are (sequences, context); products (rows, in, out); times are seconds."""

    dry: bool
    device: torch.device
    dtype: torch.dtype
    models: dict[str, ModelConfig]
    copy_bytes: int = 4 << 30
    product: int = 8192  # side of the square product that gives the matrix rate
    heads: tuple[int, int, int] = (32, 8, 128)  # query heads, KV heads, head size
    decodes: tuple[tuple[int, int], ...] = ((1, 8192), (1, 131_072), (8, 32_768), (32, 4096), (256, 1024))
    prefills: tuple[int, ...] = (2048, 8192)
    rows: tuple[int, ...] = (64, 8192)
    products: tuple[tuple[int, int, int], ...] = (
        (1, 4096, 6144), (1, 14_336, 4096), (1, 4096, 28_672), (16, 4096, 28_672), (64, 4096, 28_672),
    )  # fmt: skip
    vocabulary: int = 128_256
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    prompt: int = 128
    decode_steps: int = 48
    prefill_tokens: int = 8192
    max_len: int = 9216
    slots: int = 64
    requests: int = 128
    load_prompt: tuple[int, int] = (32, 512)
    load_output: tuple[int, int] = (16, 384)


def full_sizes() -> Sizes:
    return Sizes(False, torch.device("cuda", 0), torch.bfloat16, {"8b": LLAMA_8B, "0.6b": QWEN3_06B})


def dry_sizes() -> Sizes:
    """Every code path in seconds under Triton's interpreter; what it times means nothing."""
    models = {"8b": replace(LLAMA_8B, **_TINY), "0.6b": replace(QWEN3_06B, **_TINY)}
    return Sizes(
        True, torch.device("cpu"), torch.float32, models,
        copy_bytes=1 << 20, product=64, heads=(2, 1, 16), decodes=((2, 20),), prefills=(20,), rows=(3,),
        products=((1, 64, 32),), vocabulary=97, batches=(1, 2), prompt=4, decode_steps=1, prefill_tokens=24, max_len=64,
        slots=2, requests=3, load_prompt=(2, 8), load_output=(1, 3),
    )  # fmt: skip
