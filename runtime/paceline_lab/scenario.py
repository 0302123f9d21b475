"""What the Lab plays: a handful of requests, a strategy and its settings, in steps instead of seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from paceline_core.errors import FormatError
from paceline_core.knobs import Knobs, Strategy
from paceline_core.step_time import StepModel
from paceline_sim import Trace, TraceRequest

__all__ = ["BLOCK_SIZE", "Scenario"]

BLOCK_SIZE = 16  # tokens of a KV block
_MOST_REQUESTS = 120
_MOST_TOKENS = 20_000  # of all outputs: what a picture can show, and a fraction of a second to play
_LONGEST_PROMPT = 8_192


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario. Times are steps: a step takes 1, and `prefill_cost` more per 100 prompt tokens that it computes.

    `lengths` and `prompts` are output and prompt tokens per request (a single prompt length is everybody's), one request
    comes every `every` steps. `chunk` is the most prompt tokens of a step (0: a whole prompt at once). `kv_blocks` of 16
    tokens bound what fits into memory (0: enough for all). `max_wait` is strategy dynamic's, `tpot` strategy iteration's
    objective for the time between tokens (0: none). Raises `FormatError` that names the field.
    """

    strategy: Strategy = Strategy.CONTINUOUS
    lengths: tuple[int, ...] = (8, 2, 2, 2, 6, 4, 4, 4)
    prompts: tuple[int, ...] = (1,)
    every: float = 0.0
    slots: int = 4
    chunk: int = 0
    prefill_cost: float = 0.0
    kv_blocks: int = 0
    max_wait: float = 15.0
    tpot: float = 0.0

    def __post_init__(self) -> None:
        _within("lengths", len(self.lengths), 1, _MOST_REQUESTS, "requests")
        for length in self.lengths:
            _within("lengths", length, 1, _MOST_TOKENS, "tokens")
        _within("lengths", sum(self.lengths), 1, _MOST_TOKENS, "tokens together")
        if len(self.prompts) not in (1, len(self.lengths)):
            raise FormatError(f"prompts: {len(self.prompts)} numbers for {len(self.lengths)} requests, give one or as many")
        for length in self.prompts:
            _within("prompts", length, 1, _LONGEST_PROMPT, "tokens")
        _within("every", self.every, 0, 1_000, "steps")
        _within("slots", self.slots, 1, 32, "slots")
        _within("chunk", self.chunk, 0, _LONGEST_PROMPT, "tokens")
        _within("prefillCost", self.prefill_cost, 0, 100, "steps per 100 tokens")
        _within("kvBlocks", self.kv_blocks, 0, 100_000, "blocks")
        _within("maxWait", self.max_wait, 0, 3_600, "steps")
        _within("tpot", self.tpot, 0, 1_000, "steps")

    @classmethod
    def from_document(cls, document: Any) -> Scenario:
        """Return the scenario of a JSON object with camelCase names; what is left out has its default."""
        if not isinstance(document, Mapping):
            raise FormatError("a scenario is a JSON object")
        known = {_wire_name(field.name): field.name for field in fields(cls)}
        unknown = sorted(set(document) - set(known))
        if unknown:
            raise FormatError(f"{unknown[0]}: no such field, the fields are {', '.join(known)}")
        return cls(**{known[name]: _parse(name, value) for name, value in document.items()})

    @property
    def prompt_lens(self) -> tuple[int, ...]:
        """Prompt tokens of each request."""
        return self.prompts * len(self.lengths) if len(self.prompts) == 1 else self.prompts

    @property
    def trace(self) -> Trace:
        """The requests, with their times in steps."""
        pairs = zip(self.prompt_lens, self.lengths, strict=True)
        return Trace(tuple(TraceRequest(i * self.every, prompt, length) for i, (prompt, length) in enumerate(pairs)))

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(map(sum, zip(self.prompt_lens, self.lengths, strict=True)))

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool: as many as asked for, or so many that memory doesn't matter."""
        return self.kv_blocks or self.slots * -(-self.longest // BLOCK_SIZE)

    @property
    def knobs(self) -> Knobs:
        """The production scheduler's settings."""
        whole = max(self.prompt_lens)
        chunk = self.chunk or whole
        return Knobs(
            strategy=self.strategy,
            max_num_seqs=self.slots,
            max_num_seqs_limit=self.slots,
            # decodes come first: a chunk is what the step adds to them
            max_num_batched_tokens=self.slots + chunk,
            long_prefill_threshold=chunk,
            max_queue_delay=self.max_wait,
            static_flush=math.inf,
            block_size=BLOCK_SIZE,
            prefix_caching=False,
            slo_tpot=self.tpot or None,
        )

    @property
    def model(self) -> StepModel:
        """What a step takes, in steps."""
        return StepModel(constant=1.0, prefill_tokens=self.prefill_cost / 100)


def _wire_name(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(map(str.capitalize, rest))


def _within(name: str, value: float, low: float, high: float, unit: str) -> None:
    if not low <= value <= high:  # also false for what is no number
        raise FormatError(f"{name}: {value:g} is out of bounds, expected {low} to {high} {unit}")


def _parse(name: str, value: Any) -> Any:
    if name == "strategy":
        if value not in list(Strategy):
            raise FormatError(f"strategy: {value!r} is unknown, expected {', '.join(Strategy)}")
        return Strategy(value)
    if name in ("lengths", "prompts"):
        return _parse_numbers(name, value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FormatError(f"{name}: {value!r} is no number")
    if name in ("slots", "chunk", "kvBlocks"):
        if value != value or value in (math.inf, -math.inf) or value != int(value):
            raise FormatError(f"{name}: {value!r} is no whole number")
        return int(value)
    return float(value)


def _parse_numbers(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise FormatError(f"{name}: expected a list of whole numbers, as in [8, 2, 2, 4]")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int):
            raise FormatError(f"{name}: {item!r} is no whole number")
    return tuple(value)
