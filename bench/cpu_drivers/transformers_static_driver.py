"""transformers' `generate` in groups of SLOTS, first come first served, padded on the left: MODEL SLOTS DTYPE."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from driver import Jobs, serve


class Moments:
    """When `generate` made each token of a request that is alone; its first word is the prompt."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.of: list[float] = []

    def put(self, value: object) -> None:
        self.of.append(self._clock())

    def end(self) -> None:
        del self.of[0]


class Groups:
    def __init__(self, model: str, slots: int, dtype: str) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self._model.generation_config.eos_token_id = None  # lengths are given
        self._slots = slots

    def run(self, jobs: Jobs, clock: Callable[[], float]) -> list[dict[str, Any]]:
        replies = []
        for start in range(0, len(jobs), self._slots):
            group = jobs[start : start + self._slots]
            moments = Moments(clock) if len(group) == 1 else None
            tokens = self._generate(group, moments)
            ended = clock()
            first = moments.of[0] if moments else ended  # of a group nobody sees anything before it ends
            replies += [
                {"tokens": row[: job["output"]], "first": first, "last": ended}
                for row, job in zip(tokens, group, strict=True)
            ]
        return replies

    def _generate(self, group: Jobs, moments: Moments | None) -> list[list[int]]:
        width = max(len(job["prompt"]) for job in group)
        ids = torch.tensor([[0] * (width - len(job["prompt"])) + job["prompt"] for job in group])
        mask = torch.tensor([[0] * (width - len(job["prompt"])) + [1] * len(job["prompt"]) for job in group])
        output = max(job["output"] for job in group)
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=output, do_sample=False, pad_token_id=0, streamer=moments
            )
        return out[:, width:].tolist()


if __name__ == "__main__":
    serve(f"transformers {transformers.__version__}", Groups(sys.argv[1], int(sys.argv[2]), sys.argv[3]).run)
