"""What a client asks for (`Request`) and how it ended (`Ended`), in ints and times only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["BATCH_PRIORITY", "Ended", "FinishReason", "Request", "WaitReason"]


# From this priority number on a request is batch work: no time objective is kept for it, it fills what the others leave.
BATCH_PRIORITY = 100


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # a stop token, or the caller saw a stop text
    LENGTH = "length"  # max_tokens or the model's length
    ABORT = "abort"  # the client left
    REFUSED = "refused"  # its deadline can't be met any more, so it was never (or no longer) worth a step


class WaitReason(StrEnum):
    """What the first of the queue, and so all behind it, wait for."""

    BATCH = "batch"  # static and dynamic: for the batch that runs to end, or the next one to fill
    SLOT = "slot"  # maxNumSeqs run already
    KV = "kv"  # blocks are lacking, or reserved for what runs
    BUDGET = "budget"  # the step's tokens are given out
    OBJECTIVE = "objective"  # one more would break the TPOT objective of those that run


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate.

    `seq_id` is unique within a scheduler and grows with arrival. `prompt_len` and `max_tokens` count tokens. `arrival` and
    `deadline` are on the clock that `now` is on; `deadline` is when the first token stops being useful. A lower `priority`
    goes first (as in vLLM). `tokens` are the prompt's ids, from which block hashes are made; where the ids are unknown (the
    twin), `prefix_hashes` gives the hashes of the prompt's full blocks, or nothing is shared. `salt` keeps tenants' cached
    blocks apart. `read_cache` false computes every prompt token anew, for who needs what comes of each (log-probabilities of
    the prompt); its blocks are shared all the same. Generation ends on one of `stop_token_ids` after `min_tokens`, or
    at `max_tokens`. `draftable` false: no tokens are guessed for it.
    """

    seq_id: int
    prompt_len: int
    max_tokens: int
    arrival: float
    priority: int = 0
    deadline: float | None = None
    tokens: Sequence[int] | None = None
    prefix_hashes: tuple[int, ...] = ()
    salt: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    read_cache: bool = True
    draftable: bool = True


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a request: exactly one for each that `Scheduler.add` took. Times are on the scheduler's clock.

    `last_token` is when its last token was made, `released` when its slot and result were given back: static and dynamic
    batching hold both until the whole batch has ended. `cached_len` counts prompt tokens taken from the prefix cache.
    `epoch` and `end_epoch` are the knob epochs at arrival and at the end.
    """

    request: Request
    reason: FinishReason
    output_len: int
    released: float
    first_scheduled: float | None
    first_token: float | None
    last_token: float | None
    cached_len: int
    preemptions: int
    epoch: int
    end_epoch: int
