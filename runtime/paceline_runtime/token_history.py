"""Which tokens a sequence has seen how often, for penalties; kept while it lives, so also over preemptions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline_kernels.logit_edits import Penalties
from paceline_runtime.sampling_params import SamplingParams

__all__ = ["TokenHistory", "gather_penalties"]


class TokenHistory:
    """Distinct tokens of one sequence and how often each was generated. The prompt counts only for repetition."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams) -> None:
        seen = dict.fromkeys(prompt) if params.repetition_penalty != 1 else {}
        self.params = params
        self.ids = list(seen)
        self.counts = [0] * len(self.ids)
        self._place = {token: index for index, token in enumerate(self.ids)}

    def extended(self, tokens: Sequence[int]) -> TokenHistory:
        """Return a copy with some more generated tokens."""
        copy = TokenHistory((), self.params)
        copy.ids, copy.counts, copy._place = list(self.ids), list(self.counts), dict(self._place)
        for token in tokens:
            copy.add(token)
        return copy

    def add(self, token: int) -> None:
        """One more token was generated."""
        place = self._place.setdefault(token, len(self.ids))
        if place == len(self.ids):
            self.ids.append(token)
            self.counts.append(0)
        self.counts[place] += 1


def gather_penalties(histories: Sequence[tuple[int, TokenHistory]], device: torch.device) -> Penalties:
    """Return the penalties of a batch; `histories` come with their rows."""
    sizes = torch.tensor([len(history.ids) for _, history in histories])

    def spread(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(sizes).to(device)

    ids = [token for _, history in histories for token in history.ids]
    counts = [count for _, history in histories for count in history.counts]
    params = [history.params for _, history in histories]
    return Penalties(
        rows=spread([row for row, _ in histories], torch.int64),
        ids=torch.tensor(ids, dtype=torch.int64, device=device),
        counts=torch.tensor(counts, dtype=torch.int64, device=device),
        presence=spread([p.presence_penalty for p in params], torch.float32),
        frequency=spread([p.frequency_penalty for p in params], torch.float32),
        repetition=spread([p.repetition_penalty for p in params], torch.float32),
    )
