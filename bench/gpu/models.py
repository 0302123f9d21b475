"""A model of given shape with random weights, made on the device, behind the engine that a server has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from bench.gpu.sizes import Sizes

from paceline_core.knobs import Knobs
from paceline_core.plan import StepPlan, StepShape
from paceline_kernels import use_kernels
from paceline_runtime.decoder import Decoder
from paceline_runtime.engine import Engine
from paceline_runtime.gpu_device import device_for
from paceline_runtime.gpu_executor import PagedExecutor
from paceline_runtime.gpu_memory import measure_gpu
from paceline_runtime.gpu_runner import PagedRunner
from paceline_runtime.kv_pool import KvPool, block_bytes
from paceline_runtime.memory import MemoryBudget
from paceline_runtime.model_config import ModelConfig
from paceline_runtime.weights import WeightSource

BLOCK_SIZE = 16


class DeviceWeights:
    """Random weights made where they stay: drawing billions of numbers on a CPU would take minutes."""

    def __init__(self, sizes: Sizes) -> None:
        self._device, self._dtype = sizes.device, sizes.dtype

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return ones for norms, and normal numbers of the scale that decoders are initialised with."""
        empty = torch.empty(shape, dtype=self._dtype, device=self._device)
        return empty.fill_(1) if "norm" in name else empty.normal_(0, 0.02)


@dataclass(frozen=True)
class BenchModel:
    """What the engine asks of a model, and what the figures are made of."""

    config: ModelConfig
    decoder: Decoder
    runner: PagedRunner
    budget: MemoryBudget | None
    num_blocks: int
    max_model_len: int
    vocab_size: int
    device: str
    eos_token_ids: tuple[int, ...] = ()

    def blocks_for(self, kv_memory_fraction: float) -> int:
        """Return the pool's size: it stays as it is here."""
        return self.num_blocks

    def check_step(self, tokens: int, num_blocks: int) -> None:
        """The knobs stay as they are here."""

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a decode step reads: all but an embedding table that isn't the head too."""
        table = self.config.vocab_size * self.config.hidden_size * self.decoder.dtype.itemsize
        return self.decoder.weight_bytes - (0 if self.config.tie_embeddings else table)

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return self.config.kv_values_per_token * self.decoder.dtype.itemsize

    def engine(self, knobs: Knobs) -> Engine:
        """Return an engine that prepares a step while another runs."""
        return Engine(self, knobs, pipeline_depth=2)

    def forget(self) -> None:
        """Drop the sequences that an engine left behind."""
        self.runner.submit(StepPlan(-1, 0, (), StepShape(), removed=self.runner.seq_ids))
        self.runner.collect()


def build(sizes: Sizes, config: ModelConfig, *, max_seqs: int, weights: WeightSource | None = None) -> BenchModel:
    """Load a model as the server's loader does: weights, the largest step, the pool in what is left, graphs."""
    device = device_for(sizes.device)
    with use_kernels("triton"):  # a dry run is on a CPU, whose own kernels would want another layout
        decoder = Decoder(config, weights or DeviceWeights(sizes), dtype=sizes.dtype, device=sizes.device)
    kv = KvPool(config, 1, BLOCK_SIZE, sizes.dtype, sizes.device)
    executor = PagedExecutor(decoder, kv, device, max_seqs=max_seqs, max_len=sizes.max_len)
    size, useful = block_bytes(config, BLOCK_SIZE, sizes.dtype), max_seqs * -(-sizes.max_len // BLOCK_SIZE)
    budget, blocks = None, useful
    if sizes.device.type == "cuda":
        budget = measure_gpu(
            executor, device, weights=decoder.weight_bytes, max_tokens=sizes.prefill_tokens, max_len=sizes.max_len,
            block_bytes=size, max_blocks=useful,
        )  # fmt: skip
        blocks = budget.blocks_for(0.9)
    kv.resize(blocks)
    if sizes.device.type == "cuda":
        executor.record_graphs()
    runner = PagedRunner(decoder, executor)
    return BenchModel(config, decoder, runner, budget, blocks, sizes.max_len, config.vocab_size, sizes.device.type)
