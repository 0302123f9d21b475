"""From a model URI to something that runs plans (`load_model`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import psutil
import torch

from paceline_kernels import MASK_ROWS, MAX_GROUP_SLOTS
from paceline_runtime.config_gguf import config_from_gguf
from paceline_runtime.config_hugging_face import config_from_hugging_face
from paceline_runtime.decoder import Decoder
from paceline_runtime.gguf_file import read_gguf
from paceline_runtime.kv_pool import KvPool, block_bytes
from paceline_runtime.memory import MemoryBudget, cpu_memory_limit
from paceline_runtime.model_config import ModelConfig
from paceline_runtime.model_errors import ModelFormatError, UnsupportedModel
from paceline_runtime.model_files import ModelFiles, ModelKind, locate_model, read_json
from paceline_runtime.model_runner import ModelRunner
from paceline_runtime.weights import RandomWeights, SafetensorsWeights, SplitWeights, WeightSource
from paceline_runtime.weights_gguf import GgufWeights, check_quantization

__all__ = ["LoadedModel", "load_model", "open_model"]

_log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The API process beside the engine lives in the same container: tokenizer, web server, templates.
_API_PROCESS_BYTES = 192 * 1024**2


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that runs. `num_blocks` is the pool's size now, `blocks_for` the size under another `kvMemoryFraction`."""

    name: str
    runner: ModelRunner
    config: ModelConfig
    num_blocks: int
    max_model_len: int
    device: str
    budget: MemoryBudget = field(repr=False)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.config.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation."""
        return self.config.eos_token_ids

    def blocks_for(self, kv_memory_fraction: float) -> int:
        """Return the KV blocks that this share of the free memory holds. Raises `MemoryBudgetError` if it holds none."""
        return self.budget.blocks_for(kv_memory_fraction)


def load_model(
    uri: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    quantization: str | None = None,
    device: str = "cpu",
    max_model_len: int | None = None,
    block_size: int = 16,
    kv_memory_fraction: float = 0.9,
    gpu_memory_utilization: float | None = None,
    num_blocks: int | None = None,
    max_num_seqs_limit: int = 256,
    max_num_batched_tokens: int = 8192,
    load_format: str = "auto",
    seed: int = 0,
) -> LoadedModel:
    """Load the model at `uri` and give it a KV pool.

    `dtype` `auto` is float32 on a CPU and bfloat16 elsewhere. `quantization` says which one the weights must have (`gguf` or
    a GGUF type such as `Q4_1`; None takes them as they are). `max_model_len` None is what the model was trained for.
    `gpu_memory_utilization` (vLLM's meaning) wins over `kv_memory_fraction`; `num_blocks` over both. `load_format` `dummy`
    takes random weights drawn from `seed` for the configuration at `uri`. Raises a `ModelError` of one line.
    """
    files = locate_model(uri, revision)
    target = torch.device(device)
    base = psutil.Process().memory_info().rss + _API_PROCESS_BYTES
    config, weights = open_model(files, quantization, dummy=load_format == "dummy", seed=seed)
    length = _model_length(config, max_model_len)
    config = config.limited(length)
    number_type = _dtype(dtype, target)
    decoder = Decoder(config, weights, dtype=number_type, device=target)
    limit, base, max_kv_bytes = _device_memory(target, base)
    budget = MemoryBudget(
        limit=limit,
        base=base,
        weights=decoder.weight_bytes,
        activations=_activation_bytes(config, number_type, max_num_batched_tokens, max_num_seqs_limit, length),
        block_bytes=block_bytes(config, block_size, number_type),
        max_blocks=max_num_seqs_limit * -(-length // block_size),
        max_kv_bytes=max_kv_bytes,
    )
    blocks = num_blocks or _pool_size(budget, kv_memory_fraction, gpu_memory_utilization)
    _report(files, budget, blocks, block_size, length)
    runner = ModelRunner(decoder, KvPool(config, blocks, block_size, number_type, target), config.eos_token_ids)
    return LoadedModel(files.name, runner, config, blocks, length, target.type, budget)


def open_model(
    files: ModelFiles, quantization: str | None = None, *, dummy: bool = False, seed: int = 0
) -> tuple[ModelConfig, WeightSource]:
    """Return what the model at `files` looks like and where its weights are (not read yet). See `load_model`."""
    if files.kind is ModelKind.GGUF:
        file = read_gguf(files.path)
        config = config_from_gguf(file)
        check_quantization(file, quantization)
        return config, RandomWeights(seed) if dummy else _whole(config, GgufWeights(file, config))
    if quantization is not None:
        raise UnsupportedModel(f"quantization {quantization!r} isn't supported for safetensors, only for GGUF files")
    config = config_from_hugging_face(read_json(files.path / "config.json"))
    return config, RandomWeights(seed) if dummy else _whole(config, SafetensorsWeights(files.path))


def _whole(config: ModelConfig, weights: WeightSource) -> WeightSource:
    return SplitWeights(weights, config) if config.fused_weights else weights


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise UnsupportedModel(f"dtype {name!r} isn't supported: use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _model_length(config: ModelConfig, wanted: int | None) -> int:
    if wanted is None:
        return config.max_positions
    if not 1 <= wanted <= config.max_positions:
        raise ModelFormatError(
            f"max_model_len {wanted} is outside 1 to {config.max_positions}, what the model was trained for"
        )
    return wanted


def _device_memory(device: torch.device, base: int) -> tuple[int, int, int | None]:
    """Return the limit, what was taken before us, and the cap on the KV cache of `MemoryBudget`, in bytes."""
    if device.type == "cpu":
        limit, max_kv_bytes = cpu_memory_limit()
        return limit, base, max_kv_bytes
    free, total = torch.cuda.mem_get_info(device)
    return total, total - free - torch.cuda.memory_allocated(device), None


def _pool_size(budget: MemoryBudget, fraction: float, utilization: float | None) -> int:
    if utilization is not None:
        return budget.blocks_for_utilization(utilization)
    return budget.blocks_for(fraction)


def _activation_bytes(config: ModelConfig, dtype: torch.dtype, max_tokens: int, max_seqs: int, max_length: int) -> int:
    """Return the peak bytes of one step: what lives at once in the widest layer, and the logits of every sequence."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_token = 4 * config.hidden_size + 2 * heads + 3 * config.intermediate_size
    gather: int = max(MAX_GROUP_SLOTS, max_length) * 2 * config.num_kv_heads * config.head_dim
    masks = (MASK_ROWS + 2) * max_length
    logits = 2 * max_seqs * config.vocab_size * torch.float32.itemsize
    return (max_tokens * per_token + gather + masks) * dtype.itemsize + logits


def _report(files: ModelFiles, budget: MemoryBudget, blocks: int, block_size: int, max_model_len: int) -> None:
    _log.info("%s: %s", files.name, budget.describe(blocks, block_size))
    if blocks * block_size < max_model_len:
        _log.warning(
            "the KV pool holds %d tokens, less than one sequence of max_model_len %d", blocks * block_size, max_model_len
        )
