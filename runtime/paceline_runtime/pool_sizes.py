"""How large the KV pool may be: estimated for a CPU, measured on a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline_kernels import KERNELS, MASK_ROWS, MAX_GROUP_SLOTS
from paceline_kernels.cpu import native
from paceline_runtime.decoder import Decoder
from paceline_runtime.gpu_device import device_for
from paceline_runtime.gpu_memory import measure_gpu, memory_advice
from paceline_runtime.memory import MemoryBudget, cpu_memory_limit
from paceline_runtime.model_config import ModelConfig
from paceline_runtime.model_errors import UnsupportedModel

if TYPE_CHECKING:
    from paceline_runtime.gpu_executor import PagedExecutor

__all__ = ["PoolSizes", "budget_for", "chosen_kernels", "process_bytes", "report_kernels", "weights_advice"]

_log = logging.getLogger(__name__)
# The API process beside the engine lives in the same container: tokenizer, web server, templates.
_API_PROCESS_BYTES = 192 * 1024**2


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """What bounds the pool and a step: bytes of a block over all layers, sequences, tokens of a step and of a text."""

    block_size: int
    block_bytes: int
    max_seqs: int
    max_tokens: int
    max_len: int

    @property
    def max_blocks(self) -> int:
        """Blocks that the most sequences of the greatest length fill."""
        return self.max_seqs * -(-self.max_len // self.block_size)


def process_bytes() -> int:
    """Return what this process and the API process beside it hold, before the weights."""
    import psutil  # what runs on a GPU alone doesn't need it

    return int(psutil.Process().memory_info().rss) + _API_PROCESS_BYTES


def chosen_kernels(asked: str, device_type: str) -> str:
    """Return `triton` or `torch`. Raises `UnsupportedModel` where the asked ones can't run."""
    if asked not in KERNELS:
        raise UnsupportedModel(f"kernels {asked!r} aren't known: use {', '.join(KERNELS)}")
    there = importlib.util.find_spec("triton") is not None
    if asked == "triton" and not there:
        raise UnsupportedModel("--kernels triton needs the package triton")
    if asked == "native" and (device_type != "cpu" or not native.is_built()):
        raise UnsupportedModel("--kernels native needs a CPU and `python -m paceline_kernels.cpu`, run once")
    if asked == "triton" and device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedModel("--kernels triton on a CPU needs Triton's interpreter (TRITON_INTERPRET=1), for tests")
    if asked == "auto" and device_type == "cuda" and not there:
        _log.warning("the package triton is missing: torch's kernels are used, which are many times slower")
    return "triton" if asked == "triton" or (asked == "auto" and device_type == "cuda" and there) else "torch"


def report_kernels(decoder: Decoder, asked: str) -> None:
    """Log which kernels a CPU's steps run in, and why; where they are torch's without need, what that costs."""
    if decoder.device.type != "cpu" or asked == "triton":
        return
    if decoder.native:
        kernels, threads = native.running()
        _log.info("kernels: native C++ (%s, the best that this CPU has), %d threads", kernels, threads)
    elif asked == "torch":
        _log.info("kernels: torch's, as asked for")
    elif not native.is_built():
        _log.warning(
            "kernels: torch's, since the native ones aren't built: steps take 1.5 to 6 times as long, and weights get wider "
            "than in the file; with a C++ compiler, `python -m paceline_kernels.cpu` builds them once"
        )
    else:
        _log.warning("kernels: torch's, since the native ones can't do this model (tensor parallelism, or float64)")


def weights_advice(device: torch.device) -> AbstractContextManager[None]:
    """Explain an out-of-memory error of the device while the weights are loaded."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return memory_advice(device_for(device), "the weights")


def budget_for(decoder: Decoder, executor: PagedExecutor | None, sizes: PoolSizes, base: int, *, ranks: int) -> MemoryBudget:
    """Return the budget of the decoder's device; `ranks` processes share a CPU's memory."""
    if decoder.device.type == "cuda" and executor is not None:
        return measure_gpu(
            executor,
            executor.device,
            weights=decoder.weight_bytes,
            max_tokens=sizes.max_tokens,
            max_len=sizes.max_len,
            block_bytes=sizes.block_bytes,
            max_blocks=sizes.max_blocks,
        )
    limit, base, cap = _estimated_limits(decoder.device, base, ranks)
    return MemoryBudget(
        limit=limit,
        base=base,
        weights=decoder.weight_bytes,
        activations=_activation_bytes(decoder.config, decoder.dtype, sizes),
        step_tokens=sizes.max_tokens,
        token_bytes=_token_bytes(decoder.config, decoder.dtype),
        block_bytes=sizes.block_bytes,
        max_blocks=sizes.max_blocks,
        max_kv_bytes=cap,
    )


def _estimated_limits(device: torch.device, base: int, ranks: int) -> tuple[int, int, int | None]:
    """Return the limit, what was taken before us, and the cap on the KV cache of `MemoryBudget`, in bytes."""
    if device.type == "cpu":
        limit, cap = cpu_memory_limit()
        return limit // ranks, base, None if cap is None else cap // ranks
    free, total = torch.cuda.mem_get_info(device)
    return total, total - free - torch.cuda.memory_allocated(device), None


def _activation_bytes(config: ModelConfig, dtype: torch.dtype, sizes: PoolSizes) -> int:
    """Return the peak bytes of one step: what lives at once in the widest layer, and the logits of every sequence."""
    gather: int = max(MAX_GROUP_SLOTS, sizes.max_len) * 2 * config.num_kv_heads * config.head_dim
    masks = (MASK_ROWS + 2) * sizes.max_len
    logits = 2 * sizes.max_seqs * config.vocab_size * torch.float32.itemsize
    return sizes.max_tokens * _token_bytes(config, dtype) + (gather + masks) * dtype.itemsize + logits


def _token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    heads: int = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return (4 * config.hidden_size + 2 * heads + 3 * config.intermediate_size) * dtype.itemsize
