"""Copies of whole KV blocks within a pool, as a fork with shared prefixes or a move of a block needs them."""

import torch
import triton
import triton.language as tl

from paceline_kernels.triton_ops.launch import ceil_div, launch

__all__ = ["copy_blocks"]

# 16 KiB a program: 4 warps with eight 16-byte loads a lane in flight.
_WORDS = 4096


def copy_blocks(kv_cache: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy block `pairs[i, 0]` onto block `pairs[i, 1]` for every row of `pairs` [n, 2] int32 or int64.

    `kv_cache` [B, …] is contiguous, of any dtype, and a block's size is a multiple of 4 bytes. All pairs run at once, so no
    block may be both a source and a target, or a target twice.
    """
    assert kv_cache.is_contiguous() and pairs.is_contiguous() and pairs.shape[1:] == (2,)
    words = kv_cache.view(kv_cache.shape[0], -1).view(torch.int32)
    arguments = {"words": words, "pairs": pairs, "count": words.shape[1], "BLOCK": _WORDS}
    launch(_copy, (len(pairs), ceil_div(words.shape[1], _WORDS)), arguments)


@triton.jit
def _copy(
    words,  # [B, count] int32: the pool's bits
    pairs,  # [n, 2]
    count,
    BLOCK: tl.constexpr,
):
    """Program (i, p): words [p · BLOCK, (p + 1) · BLOCK) of pair i."""
    pair = pairs + tl.program_id(0) * 2
    source, target = tl.load(pair).to(tl.int64), tl.load(pair + 1).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words + target * count + word, tl.load(words + source * count + word, mask=word < count), mask=word < count)
