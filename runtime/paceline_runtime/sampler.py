"""Logits become tokens, each sequence by its own parameters and its own random numbers."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from paceline_kernels import RowSampling, sample
from paceline_runtime.sampling_params import SamplingParams

__all__ = ["SequenceSampling", "TokenLogprobs", "sample_tokens"]

_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities of a chosen token and of the most likely ones, before temperature and filters."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), falling


@dataclass(frozen=True, slots=True)
class SequenceSampling:
    """What one sequence's next token depends on beside the logits: its parameters, its seed and how far it is.

    The random number of token i is a hash of (seed, i): it doesn't depend on the batch, and a preempted sequence that is
    recomputed goes on with the same numbers.
    """

    params: SamplingParams
    stop_token_ids: tuple[int, ...] = ()  # the model's own and the request's, banned until `min_tokens`
    seed: int = field(default_factory=lambda: secrets.randbits(64))

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: Iterable[int]) -> SequenceSampling:
        """Return the sampling of a new sequence; without a seed it draws one."""
        own = () if params.ignore_eos else tuple(eos_token_ids)
        stops = (*own, *params.stop_token_ids)
        return cls(params, stops) if params.seed is None else cls(params, stops, params.seed & _MASK)

    def row(self, index: int) -> RowSampling:
        """Return the sampling of generated token `index` (0 for the first)."""
        params = self.params
        if params.greedy:
            return RowSampling(0.0)
        return RowSampling(params.temperature, params.top_k, params.top_p, params.min_p, _uniform(self.seed, index))


def sample_tokens(
    logits: torch.Tensor, sequences: Sequence[tuple[SequenceSampling, int]]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Return a token and its log-probabilities (None where not asked for) per row of `logits` [n, V], float32.

    `sequences` gives each row's sampling and the number of tokens that it has generated.
    """
    _ban_early_stops(logits, sequences)
    tokens: list[int] = sample(logits, [sampling.row(index) for sampling, index in sequences]).tolist()
    logprobs = [
        _logprobs(row, token, sampling.params.logprobs)
        for row, token, (sampling, _) in zip(logits, tokens, sequences, strict=True)
    ]
    return tokens, logprobs


def _ban_early_stops(logits: torch.Tensor, sequences: Sequence[tuple[SequenceSampling, int]]) -> None:
    vocabulary = logits.shape[1]
    for row, (sampling, index) in enumerate(sequences):
        if index < sampling.params.min_tokens:
            banned = [token for token in sampling.stop_token_ids if token < vocabulary]
            logits[row, banned] = float("-inf")


def _logprobs(logits: torch.Tensor, token: int, count: int | None) -> TokenLogprobs | None:
    if count is None:
        return None
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(count, len(logprobs)))
    return TokenLogprobs(float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) from a hash of both (SplitMix64, Steele et al. 2014): 53 bits, as a double holds."""
    return (_mix(_mix(seed) + index) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
