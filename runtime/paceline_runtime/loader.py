"""From a model URI to something that runs plans (`load_model`)."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from paceline_kernels import use_kernels
from paceline_runtime.decoder import Decoder
from paceline_runtime.gpu_device import device_for
from paceline_runtime.gpu_executor import PagedExecutor
from paceline_runtime.kv_pool import KvPool, block_bytes
from paceline_runtime.memory import MemoryBudget
from paceline_runtime.model_config import ModelConfig
from paceline_runtime.model_errors import ModelFormatError, UnsupportedModel
from paceline_runtime.model_files import ModelFiles, locate_model
from paceline_runtime.model_runner import ModelRunner
from paceline_runtime.open_model import open_model, quantization_at_load
from paceline_runtime.parallel_follower import CpuFollower, Follower, GpuFollower
from paceline_runtime.parallel_group import TensorGroup
from paceline_runtime.parallel_place import ALONE, Place
from paceline_runtime.pool_sizes import PoolSizes, budget_for, chosen_kernels, process_bytes, report_kernels, weights_advice
from paceline_runtime.quantised_linear import check_supported

if TYPE_CHECKING:
    from paceline_runtime.gpu_runner import PagedRunner

__all__ = ["LoadedModel", "ModelPart", "load_model"]

_log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What of a model is in this process: all of it, or one rank's part. `executor` is there on a GPU."""

    decoder: Decoder
    kv: KvPool
    group: TensorGroup
    executor: PagedExecutor | None


@dataclass(frozen=True)
class LoadedModel:
    """A model that can run. `num_blocks` is the pool's size at start, `blocks_for` that under another `kvMemoryFraction`.

    The first rank of a tensor-parallel group uses its `runner`, the others are `follower`s.
    """

    name: str
    config: ModelConfig
    num_blocks: int
    max_model_len: int
    device: str
    budget: MemoryBudget = field(repr=False)
    part: ModelPart = field(repr=False)

    @functools.cached_property
    def runner(self) -> ModelRunner | PagedRunner:
        """What runs the engine's plans."""
        part, eos = self.part, self.config.eos_token_ids
        if part.executor is None:
            return ModelRunner(part.decoder, part.kv, eos, part.group)
        from paceline_runtime.gpu_runner import PagedRunner  # needs Triton

        return PagedRunner(part.decoder, part.executor, eos, part.group)

    def follower(self) -> Follower:
        """Return what computes as the group's first rank says."""
        if self.part.executor is None:
            return CpuFollower(self.part.decoder, self.part.kv)
        return GpuFollower(self.part.decoder, self.part.executor)

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

    def check_step(self, tokens: int, num_blocks: int) -> None:
        """Raise `MemoryBudgetError` if steps of so many tokens have no memory beside a pool of so many blocks."""
        self.budget.check_step(tokens, num_blocks)


def load_model(
    uri: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    quantization: str | None = None,
    device: str = "cpu",
    kernels: str = "auto",
    max_model_len: int | None = None,
    block_size: int = 16,
    kv_memory_fraction: float = 0.9,
    gpu_memory_utilization: float | None = None,
    num_blocks: int | None = None,
    max_num_seqs_limit: int = 256,
    max_num_batched_tokens: int = 8192,
    load_format: str = "auto",
    seed: int = 0,
    place: Place = ALONE,
) -> LoadedModel:
    """Load the model at `uri` and give it a KV pool.

    `dtype` `auto` is bfloat16 on a GPU; on a CPU it computes in float32, and the native kernels keep weights in the form in
    which the files hold them. `quantization` `int8`, `int4` or `fp8` is made while loading
    (see `quantised_linear`), any other says which one the files must hold (`gguf` or a GGUF type such as `Q4_1`). `kernels`
    is one of `paceline_kernels.KERNELS`. `max_model_len` None is what the model was trained for. `gpu_memory_utilization`
    (vLLM's meaning) wins over `kv_memory_fraction`; `num_blocks` over both. `load_format` `dummy` takes random weights drawn
    from `seed` for the configuration at `uri`. `place` is this process's in a tensor-parallel group, whose processes all
    load at once. Raises a `ModelError` of one line.
    """
    files = locate_model(uri, revision)
    target = torch.device(device, place.rank) if device == "cuda" else torch.device(device)
    paged = chosen_kernels(kernels, target.type) == "triton"
    base = process_bytes()
    narrowed = quantization_at_load(quantization)
    check_supported(narrowed, target)
    config, weights = open_model(files, quantization, dummy=load_format == "dummy", seed=seed)
    length = _model_length(config, max_model_len)
    config = config.limited(length)
    part, weights, group = place.cut(config, weights)
    number_type = _dtype(dtype, target)
    with weights_advice(target), use_kernels(kernels):
        decoder = Decoder(
            part,
            weights,
            dtype=number_type,
            device=target,
            quantization=narrowed,
            as_stored=dtype == "auto",
            group=group,
        )
        report_kernels(decoder, kernels)
    sizes = PoolSizes(
        block_size=block_size,
        block_bytes=block_bytes(part, block_size, decoder.kv_dtype),
        max_seqs=max_num_seqs_limit,
        max_tokens=max_num_batched_tokens,
        max_len=length,
    )
    kv = KvPool(part, 1, block_size, decoder.kv_dtype, target)
    executor = _paged_executor(decoder, kv, sizes) if paged else None
    budget = budget_for(decoder, executor, sizes, base, ranks=place.size)
    budget = budget.with_free(group.least(budget.free))
    blocks = group.least(num_blocks or _pool_size(budget, kv_memory_fraction, gpu_memory_utilization))
    kv.resize(blocks)
    _report(files, budget, blocks, block_size, length)
    if executor is not None and target.type == "cuda":
        executor.record_graphs()
    part_here = ModelPart(decoder, kv, group, executor)
    return LoadedModel(files.name, config, blocks, length, target.type, budget, part_here)


def _paged_executor(decoder: Decoder, kv: KvPool, sizes: PoolSizes) -> PagedExecutor:
    device = device_for(decoder.device)
    return PagedExecutor(decoder, kv, device, max_seqs=sizes.max_seqs, max_len=sizes.max_len)


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


def _pool_size(budget: MemoryBudget, fraction: float, utilization: float | None) -> int:
    if utilization is not None:
        return budget.blocks_for_utilization(utilization)
    return budget.blocks_for(fraction)


def _report(files: ModelFiles, budget: MemoryBudget, blocks: int, block_size: int, max_model_len: int) -> None:
    _log.info("%s: %s", files.name, budget.describe(blocks, block_size))
    if blocks * block_size < max_model_len:
        _log.warning(
            "the KV pool holds %d tokens, less than one sequence of max_model_len %d", blocks * block_size, max_model_len
        )
