"""Masks of allowed tokens for grammars, 32 tokens to a word, as grammar libraries write them (XGrammar, llguidance)."""

import torch
import triton
import triton.language as tl

from paceline_kernels.triton_ops.launch import ceil_div, launch

__all__ = ["apply_bitmask"]

# 8 warps with 8 logits a lane; a multiple of 32, so that programs don't share words.
_BLOCK = 2048


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """Set logits of tokens whose bit is 0 to -inf, **in place**.

    `logits` [n, V], any float dtype; `bitmask` [m, words] int32, token t's bit is bit t % 32 of word t // 32; tokens beyond
    its words are refused (a model's vocabulary is often padded beyond its tokenizer's). `rows` [m] int32 or int64 names the
    row of logits that each mask is for (None: row i).
    """
    assert logits.stride(1) == 1 and bitmask.stride(1) == 1
    arguments = {
        "logits": logits, "bitmask": bitmask, "rows": rows, "vocabulary": logits.shape[1],
        "row_stride": logits.stride(0), "mask_stride": bitmask.stride(0), "words": bitmask.shape[1],
        "BLOCK": _BLOCK,
    }  # fmt: skip
    launch(_mask, (len(bitmask), ceil_div(logits.shape[1], _BLOCK)), arguments, num_warps=8)


@triton.jit
def _mask(
    logits,  # [n, V]
    bitmask,  # [m, words] int32
    rows,  # [m], or None
    vocabulary,
    row_stride,
    mask_stride,
    words,
    BLOCK: tl.constexpr,
):
    """Program (i, p): tokens [p · BLOCK, (p + 1) · BLOCK) under mask i. Only refused tokens are written, none is read."""
    index = tl.program_id(0).to(tl.int64)
    row = index if rows is None else tl.load(rows + index).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    word = tl.load(bitmask + index * mask_stride + token // 32, mask=inside & (token // 32 < words), other=0)
    refused = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * row_stride + token, float("-inf"), mask=inside & refused)
