"""How much of a GPU the KV cache may take: measured, by running the largest step before there is a cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from paceline_kernels.triton_ops.attention_plan import plan_tiles
from paceline_runtime.gpu_device import Device
from paceline_runtime.gpu_executor import PagedExecutor
from paceline_runtime.gpu_inputs import StepArrays
from paceline_runtime.memory import MemoryBudget
from paceline_runtime.model_errors import MemoryBudgetError

__all__ = ["largest_step", "measure_gpu", "memory_advice"]

_MIB = 1024**2


def measure_gpu(
    executor: PagedExecutor,
    device: Device,
    *,
    weights: int,
    max_tokens: int,
    max_len: int,
    block_bytes: int,
    max_blocks: int,
) -> MemoryBudget:
    """Return the budget of a device that holds the weights, and no KV cache to speak of, in bytes.

    `activations` is the peak of a step of `max_tokens` tokens that samples for as many sequences as there may be, plus what
    the graphs of decode steps keep; a step of half as many tells what each token more needs. `base` is what is taken
    otherwise: the driver, libraries, other processes.
    """
    with memory_advice(device, "the largest step"):
        peak = _peak(executor, device, max_tokens, max_len)
        half = max_tokens // 2
        rise = peak - _peak(executor, device, half, max_len) if half else peak
        before, _ = device.free_memory()
        executor.record_graphs()
        after, total = device.free_memory()
        executor.graphs.forget()
    free, _ = device.free_memory()
    graphs = max(0, before - after)
    return MemoryBudget(
        limit=total,
        base=total - free - weights,
        weights=weights,
        activations=peak + graphs,
        step_tokens=max_tokens,
        token_bytes=-(-max(0, rise) // (max_tokens - half)),
        block_bytes=block_bytes,
        max_blocks=max_blocks,
        remedy="lower maxNumBatchedTokens, maxNumSeqsLimit or maxModelLen, quantise the weights, or use more GPUs "
        "(--tensor-parallel-size)",
    )


def largest_step(executor: PagedExecutor, tokens: int, max_len: int) -> StepArrays:
    """Return a step of `tokens` prompt tokens in as few sequences as hold them. All their blocks are block 0, unwritten."""
    shape = executor.shape
    lens = np.full(-(-tokens // max_len), max_len, dtype=np.int64)
    lens[-1] = tokens - max_len * (len(lens) - 1)
    starts = np.concatenate([[0], lens.cumsum()])
    zeros = np.zeros(tokens, dtype=np.int32)
    none = np.zeros(0, dtype=np.int32)
    return StepArrays(
        ids=zeros,
        positions=(np.arange(tokens) - np.repeat(starts[:-1], lens)).astype(np.int32),
        slots=zeros - 1,
        query_starts=starts.astype(np.int32),
        contexts=lens.astype(np.int32),
        table_rows=np.zeros(len(lens), dtype=np.int32),
        tiles=plan_tiles(lens, lens, group=shape.group, policy=shape.policy),
        extra={"changed_rows": none, "changed_columns": none, "changed_blocks": none},
    )


def _peak(executor: PagedExecutor, device: Device, tokens: int, max_len: int) -> int:
    arrays = largest_step(executor, tokens, max_len)
    rows = [row % tokens for row in range(executor.max_seqs)]
    return device.peak(lambda: _logits(executor, arrays, rows))


def _logits(executor: PagedExecutor, arrays: StepArrays, rows: list[int]) -> torch.Tensor:
    computed = executor.run(executor.stage(arrays, rows, {}, decodes=False))
    assert computed.logits is not None
    return computed.logits


@contextlib.contextmanager
def memory_advice(device: Device, what: str) -> Iterator[None]:
    """Turn the device's out-of-memory error into one that says what didn't fit and what may be done."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = device.free_memory()
        raise MemoryBudgetError(
            f"the GPU has no memory for {what}: {free // _MIB} of {total // _MIB} MiB are free; quantise the weights "
            "(--quantization int8 or int4), use more GPUs (--tensor-parallel-size), or lower maxNumBatchedTokens and "
            "maxNumSeqsLimit"
        ) from error
