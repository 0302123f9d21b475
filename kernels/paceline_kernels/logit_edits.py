"""Changes of logits before a token is chosen: biases, penalties, masks. Each touches only the rows that ask for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline_kernels.dispatch import Op

__all__ = ["Penalties", "add_biases", "mask_tokens", "penalise"]

_WORD = 32  # bits of a mask's word


@dataclass(frozen=True, slots=True)
class Penalties:
    """Which logits are penalised how: tensors of one length n, an entry for each (row, token) that the row has seen.

    `rows`, `ids`, `counts` are int64, the rest float32. `counts` says how often the row has generated the token (0: it is in
    the prompt only). `presence` and `frequency` are OpenAI's, of generated tokens; `repetition` is that of CTRL (Keskar et
    al. 2019), of prompt tokens too.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor


@Op
def penalise(logits: torch.Tensor, penalties: Penalties) -> None:
    """Apply `penalties` to `logits` [n, V] (float32) in place. No (row, token) may be there twice."""
    p = penalties
    values = logits[p.rows, p.ids]
    values = torch.where(values > 0, values / p.repetition, values * p.repetition)
    values -= p.frequency * p.counts + p.presence * (p.counts > 0)
    logits[p.rows, p.ids] = values


@Op
def add_biases(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, biases: torch.Tensor) -> None:
    """Add `biases` [m] to the logits of tokens `ids` [m] in `rows` [m], in place; -inf bans a token. May name one twice."""
    logits.index_put_((rows, ids), biases, accumulate=True)


@Op
def mask_tokens(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Ban from `rows` [m] every token whose bit is 0 in `masks` [m, words] (int32, the lowest bit first), in place.

    Tokens beyond the masks' bits are banned too: a model's vocabulary is often padded beyond its tokenizer's.
    """
    vocabulary = logits.shape[1]
    bits = torch.arange(_WORD, dtype=torch.int32, device=logits.device)
    allowed = ((masks.unsqueeze(-1) >> bits) & 1).flatten(1).bool()[:, :vocabulary]  # [m, V or fewer]
    picked = logits[rows]
    picked[:, : allowed.shape[1]].masked_fill_(~allowed, float("-inf"))
    picked[:, allowed.shape[1] :] = float("-inf")
    logits[rows] = picked
