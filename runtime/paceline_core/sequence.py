"""One sequence as the scheduler sees it: how many tokens are known, how many are computed, which blocks hold them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from paceline_core.request import BATCH_PRIORITY, Ended, FinishReason, Request

__all__ = ["SequenceState", "Stage"]


class Stage(Enum):
    """Where a sequence is. A finished sequence whose batch still runs has ENDED, only its result is held."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class SequenceState:
    """The mutable state of one request.

    There are no phases: `computed` (positions whose KV is computed or planned) catches up with `known` (tokens that are
    known, or promised by a plan in flight that samples). `limit` is the most tokens it may generate.
    """

    request: Request
    limit: int
    epoch: int
    stop_at: int = 0  # positions that ever need computing: the last token's own KV is read by nobody
    stage: Stage = Stage.WAITING
    priority: int = 0
    known: int = 0
    computed: int = 0
    output_len: int = 0
    prefill_until: int = 0  # tokens up to here are prefill (or recomputation), what comes after is decode
    generated: list[int] = field(default_factory=list)  # ids, kept only where block hashes need them
    block_table: list[int] = field(default_factory=list)
    capacity: int = 0  # positions that the block table covers
    growth: int = 0  # blocks that it is predicted to need beyond those it holds
    hashes: list[int] = field(default_factory=list)
    next_full: float = math.inf  # computing up to here completes the next block that can be registered
    last_step: int = -1  # the newest plan that names it
    ticket: int = 0  # the valid entry of the waiting queue
    out_of_turn: bool = False  # it goes next because it has waited too long
    batch: int = -1  # the static or dynamic batch that it belongs to
    preemptions: int = 0
    cached_len: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    end_epoch: int = 0
    reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.known = self.request.prompt_len
        self.priority = self.request.priority
        self.cap(self.limit)

    @property
    def num_tokens(self) -> int:
        """Tokens that are known now: the prompt and what was generated and accepted."""
        return self.request.prompt_len + self.output_len

    @property
    def is_batch(self) -> bool:
        """True for work without a time objective of its own."""
        return self.priority >= BATCH_PRIORITY

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: the lower priority number, then the older. The last in this order is preempted first."""
        return self.priority, self.request.seq_id

    @property
    def wanted(self) -> int:
        """Tokens to compute now."""
        return min(self.known, self.stop_at) - self.computed

    @property
    def awaits_sample(self) -> bool:
        """True while a plan in flight will sample a token of it."""
        return self.known > self.num_tokens

    def cap(self, limit: int) -> None:
        """Let it generate at most `limit` tokens."""
        self.limit = limit
        self.stop_at = self.request.prompt_len + limit - 1

    def accept(self, tokens: tuple[int, ...], now: float) -> tuple[int, ...]:
        """Take new tokens up to the first stop token or the limit; return those taken. Sets `reason` if that ends it."""
        room, request = self.limit - self.output_len, self.request
        taken = tokens if len(tokens) <= room else tokens[:room]
        if request.stop_token_ids:
            taken = self._until_stop(taken)
        count = len(taken)
        self.output_len += count
        if count > 1:
            # a plan in flight that promised the token after the first one no longer reaches the end: its sample is void
            self.known = self.num_tokens
        if request.tokens is not None:
            self.generated.extend(taken)
        if self.first_token is None:
            self.first_token = now
        self.last_token = now
        if self.output_len >= self.limit and self.reason is None:
            self.reason = FinishReason.LENGTH
        return taken

    def block_tokens(self, index: int, block_size: int) -> list[int]:
        """Return the token ids of full block `index`."""
        assert self.request.tokens is not None, "block hashes need token ids"
        low, high, prompt_len = index * block_size, (index + 1) * block_size, self.request.prompt_len
        if high <= prompt_len:
            return list(self.request.tokens[low:high])
        return [*self.request.tokens[low:prompt_len], *self.generated[max(0, low - prompt_len) : high - prompt_len]]

    def rewind(self) -> None:
        """Forget what was computed: the blocks are gone, the tokens stay."""
        self.stage = Stage.WAITING
        self.computed = self.capacity = self.growth = 0
        self.block_table = []  # a new list: plans in flight still read the old one
        self.next_full = math.inf

    def ended(self, released: float) -> Ended:
        """Return the record of the end."""
        assert self.reason is not None, "an ended sequence has a reason"
        return Ended(
            request=self.request,
            reason=self.reason,
            output_len=self.output_len,
            released=released,
            first_scheduled=self.first_scheduled,
            first_token=self.first_token,
            last_token=self.last_token,
            cached_len=self.cached_len,
            preemptions=self.preemptions,
            epoch=self.epoch,
            end_epoch=self.end_epoch,
        )

    def _until_stop(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        for index, token in enumerate(tokens):
            if token in self.request.stop_token_ids and self.output_len + index + 1 > self.request.min_tokens:
                self.reason = FinishReason.STOP
                return tokens[: index + 1]
        return tokens
