"""Sampling that stays on the device: tokens go from one step to the next there, and to the host when it asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from paceline_kernels import SamplingColumns, sampling_columns
from paceline_kernels.triton_ops.sampling import SamplingBatch, sample
from paceline_runtime.gpu_device import Device
from paceline_runtime.gpu_inputs import PackedViews
from paceline_runtime.sampler import SequenceSampling
from paceline_runtime.step_result import TokenLogprobs

__all__ = ["DeviceLogprobs", "SampledRow", "needs_past", "pack_sampling", "sample_packed", "wanted_logprobs"]

# How a sequence's row is sampled, and the number of tokens that it has generated.
SampledRow = tuple[SequenceSampling, int]


def pack_sampling(rows: Sequence[SampledRow]) -> dict[str, np.ndarray]:
    """Return the columns of `rows` for a packed step, those that any row needs."""
    columns = sampling_columns([sampling.row(index) for sampling, index in rows])
    named = {field.name: getattr(columns, field.name) for field in fields(SamplingColumns)}
    return {name: column for name, column in named.items() if column is not None}


def sample_packed(logits: torch.Tensor, views: PackedViews) -> torch.Tensor:
    """Return one token per row of `logits` [n, V], [n] int64 on the device, sampled as the packed step says."""
    columns = (views.get(name) for name in ("seeds", "top_ks", "top_ps", "min_ps"))
    return sample(logits, SamplingBatch(views["temperatures"], *columns))


def needs_past(rows: Sequence[SampledRow]) -> bool:
    """Whether the logits of a row depend on tokens sampled before: penalties and grammars follow them on the host."""
    return any(sampling.history is not None or sampling.matcher is not None for sampling, _ in rows)


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Log-probabilities on their way to the host: for `rows` of the step, with the `counts` most likely ones."""

    rows: list[int]
    counts: list[int]
    chosen: torch.Tensor  # [m] float32, on the host
    values: torch.Tensor  # [m, most] float32, on the host
    ids: torch.Tensor  # [m, most] int64, on the host

    def read(self) -> dict[int, TokenLogprobs]:
        """Return them by row; the device has come past them."""
        found = zip(self.rows, self.counts, self.chosen.tolist(), self.values.tolist(), self.ids.tolist(), strict=True)
        return {
            row: TokenLogprobs(chosen, tuple(zip(ids[:count], values[:count], strict=True)))
            for row, count, chosen, values, ids in found
        }


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """The rows that want log-probabilities, with their logits as the model left them."""

    rows: list[int]
    counts: list[int]
    logits: torch.Tensor  # [m, V]

    def of(self, tokens: torch.Tensor, device: Device) -> DeviceLogprobs:
        """Queue the log-probabilities of the `tokens` [n] that were sampled, and their copies to the host."""
        logprobs = self.logits.log_softmax(-1)
        chosen = logprobs.gather(1, tokens[self.rows].unsqueeze(1)).squeeze(1)
        values, ids = logprobs.topk(min(max(self.counts), logprobs.shape[1]))
        return DeviceLogprobs(self.rows, self.counts, *(_to_host(part, device) for part in (chosen, values, ids)))


def wanted_logprobs(logits: torch.Tensor, rows: Sequence[SampledRow]) -> WantedLogprobs | None:
    """Return who wants log-probabilities, before the logits are edited; None if nobody does."""
    asked = [(row, s.params.logprobs) for row, (s, _) in enumerate(rows) if s.params.logprobs is not None]
    if not asked:
        return None
    where = [row for row, _ in asked]
    return WantedLogprobs(where, [count for _, count in asked], logits[where])


def _to_host(values: torch.Tensor, device: Device) -> torch.Tensor:
    there = device.pinned(values.numel(), values.dtype).view(values.shape)
    return there.copy_(values, non_blocking=True)
