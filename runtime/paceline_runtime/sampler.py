"""Logits become tokens, each sequence by its own parameters, its own past and its own random numbers."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline_kernels import RowSampling, sample
from paceline_kernels.logit_edits import add_biases, mask_tokens, penalise
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.step_result import TokenLogprobs
from paceline_runtime.token_history import TokenHistory, gather_penalties

if TYPE_CHECKING:
    from paceline_runtime.grammar_matcher import GrammarMatcher  # loads the grammar library

__all__ = ["SequenceSampling", "edit_logits", "report_logprobs", "sample_tokens"]

_MASK = 2**64 - 1
_BAN = float("-inf")


@dataclass(frozen=True, slots=True)
class SequenceSampling:
    """What one sequence's next token depends on beside the logits: its parameters, its seed, its past, its grammar.

    The random number of token i is a hash of (seed, i): it doesn't depend on the batch, and a preempted sequence that is
    recomputed goes on with the same numbers.
    """

    params: SamplingParams
    stop_token_ids: tuple[int, ...] = ()  # the model's own and the request's, banned until `min_tokens`
    seed: int = field(default_factory=lambda: secrets.randbits(64))
    history: TokenHistory | None = None
    matcher: GrammarMatcher | None = None

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        prompt: Sequence[int] = (),
        matcher: GrammarMatcher | None = None,
    ) -> SequenceSampling:
        """Return the sampling of a new sequence; without a seed it draws one."""
        own = () if params.ignore_eos else tuple(eos_token_ids)
        seed = secrets.randbits(64) if params.seed is None else params.seed & _MASK
        history = TokenHistory(prompt, params) if params.penalised else None
        return cls(params, (*own, *params.stop_token_ids), seed, history, matcher)

    @property
    def plain(self) -> bool:
        """True if the next token is the logits' largest, and nothing else is asked for."""
        params = self.params
        edited = params.logit_bias or params.min_tokens or self.history is not None or self.matcher is not None
        return params.greedy and params.logprobs is None and not edited

    def row(self, index: int) -> RowSampling:
        """Return the sampling of generated token `index` (0 for the first)."""
        params = self.params
        if params.greedy:
            return RowSampling(0.0)
        return RowSampling(params.temperature, params.top_k, params.top_p, params.min_p, _uniform(self.seed, index))

    def biases(self, index: int, vocabulary: int) -> list[tuple[int, float]]:
        """Return what is added to which logits for generated token `index`."""
        found = [(token, bias) for token, bias in self.params.logit_bias if token < vocabulary]
        # where a grammar allows nothing but the end, banning that would leave no token at all
        if index < self.params.min_tokens and not (self.matcher is not None and self.matcher.ended):
            found += [(token, _BAN) for token in self.stop_token_ids if token < vocabulary]
        return found

    def ahead(self, tokens: Sequence[int]) -> SequenceSampling:
        """Return the sampling of what would come after `tokens`, if they were accepted. A grammar can't be asked that."""
        assert self.matcher is None or not tokens, "a sequence with a grammar has no drafts"
        if self.history is None or not tokens:
            return self
        return replace(self, history=self.history.extended(tokens))

    def accept(self, token: int) -> None:
        """`token` is the sequence's next."""
        if self.history is not None:
            self.history.add(token)
        if self.matcher is not None:
            self.matcher.accept(token)


def sample_tokens(
    logits: torch.Tensor, sequences: Sequence[tuple[SequenceSampling, int]]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Return a token and its log-probabilities (None where not asked for) per row of `logits` [n, V], float32.

    `sequences` gives each row's sampling and the number of tokens that it has generated. The logits are changed; nothing is
    accepted yet.
    """
    asked = [row for row, (sampling, _) in enumerate(sequences) if sampling.params.logprobs is not None]
    own = logits[asked] if asked else None  # a copy, before the edits
    edit_logits(logits, sequences)
    tokens: list[int] = sample(logits, [sampling.row(index) for sampling, index in sequences]).tolist()
    logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
    if own is not None:
        counts = [sequences[row][0].params.logprobs or 0 for row in asked]
        for row, entry in zip(asked, report_logprobs(own, [tokens[row] for row in asked], counts), strict=True):
            logprobs[row] = entry
    return tokens, logprobs


def edit_logits(logits: torch.Tensor, sequences: Sequence[tuple[SequenceSampling, int]]) -> None:
    """Apply grammars, bans, biases and penalties to `logits` [n, V] in place, in this order; see `sample_tokens`."""
    vocabulary, device = logits.shape[1], logits.device
    masks = [(row, s.matcher.mask()) for row, (s, _) in enumerate(sequences) if s.matcher is not None]
    if masks:
        words = torch.from_numpy(np.concatenate([mask for _, mask in masks])).to(device)
        mask_tokens(logits, torch.tensor([row for row, _ in masks], device=device), words)
    biases = [(row, *b) for row, (s, index) in enumerate(sequences) for b in s.biases(index, vocabulary)]
    if biases:
        rows, ids, values = zip(*biases, strict=True)
        values_there = torch.tensor(values, dtype=logits.dtype, device=device)
        add_biases(logits, torch.tensor(rows, device=device), torch.tensor(ids, device=device), values_there)
    if histories := [(row, s.history) for row, (s, _) in enumerate(sequences) if s.history is not None]:
        penalise(logits, gather_penalties(histories, device))


def report_logprobs(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return the log-probabilities of `tokens` and of the `counts` most likely ones per row of `logits` [n, V]."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    most = min(max(counts), logits.shape[1])
    values, ids = logprobs.topk(most)
    rows = zip(chosen, ids.tolist(), values.tolist(), counts, strict=True)
    return [TokenLogprobs(value, tuple(zip(i[:count], v[:count], strict=True))) for value, i, v, count in rows]


def _uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) from a hash of both (SplitMix64, Steele et al. 2014): 53 bits, as a double holds."""
    return (_mix(_mix(seed) + index) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
