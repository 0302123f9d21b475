"""What one sequence wants to know of its prompt, gathered chunk by chunk: log-probabilities, or pooled hidden states."""

from __future__ import annotations

import torch

from paceline_runtime.parallel_group import Head
from paceline_runtime.sampler import report_logprobs
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.step_result import PromptReport, TokenLogprobs

__all__ = ["PromptReader"]

_ROWS = 64  # logits at once: 64 rows of a vocabulary of 150,000 are 38 MB, of a whole chunk they could be gigabytes


class PromptReader:
    """Sees the hidden states of a prompt's chunks. After a preemption it sees them again, and keeps what it has."""

    def __init__(self, decoder: Head, prompt: tuple[int, ...], params: SamplingParams) -> None:
        self._decoder = decoder
        self._prompt = prompt
        self._count = params.prompt_logprobs
        self._pooling = params.pooling
        self._logprobs: list[TokenLogprobs] = []  # of tokens 1, 2, …
        self._sum = torch.zeros(0)
        self._summed = 0  # positions in the sum
        self._last = torch.zeros(0)

    def read(self, hidden: torch.Tensor, start: int) -> None:
        """Take the hidden states [n, hidden] of positions `start`, `start + 1`, …"""
        hidden = hidden[: len(self._prompt) - start]  # a recomputation may go beyond the prompt
        if self._count is not None:
            done = len(self._logprobs) - start
            for rows in torch.split(hidden[max(0, done) :], _ROWS):
                self._read_logprobs(rows, self._count)
        if self._pooling == "mean":
            self._add(hidden[max(0, self._summed - start) :])
        elif self._pooling == "last":
            self._last = self._decoder.normed(hidden[-1:])[0].float()

    def report(self) -> PromptReport:
        """Return what was found; the whole prompt was read."""
        if self._pooling is None:
            return PromptReport(tuple(self._logprobs))
        vector = self._last if self._pooling == "last" else self._sum / self._summed
        return PromptReport(tuple(self._logprobs), (vector / vector.norm()).cpu().numpy().tobytes())

    def _read_logprobs(self, rows: torch.Tensor, count: int) -> None:
        """Each row predicts the token after it; the last one of the prompt predicts the first that is generated."""
        following = self._prompt[len(self._logprobs) + 1 :][: len(rows)]
        if following:
            logits = self._decoder.logits(rows[: len(following)])
            self._logprobs += report_logprobs(logits, following, [count] * len(following))

    def _add(self, hidden: torch.Tensor) -> None:
        if len(hidden):
            total = self._decoder.normed(hidden).float().sum(0)
            self._sum = total if not self._summed else self._sum + total
            self._summed += len(hidden)
