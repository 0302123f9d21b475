"""Who may come in: what can never run is refused, what may thrash waits.

The anti-thrash guard: admit a sequence only if its predicted peak of KV fits beside those that already run.

Without it a pool fills with half-done sequences that preempt each other, and every preemption pays its prefill again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

from paceline_core.errors import RequestRefused
from paceline_core.request import Request

__all__ = ["AdmissionGuard", "OutputHistory", "output_limit"]

_HISTORY = 512  # lengths remembered: enough for a stable quantile, short enough to follow a change of traffic
_REFRESH = 32  # finished requests between two sorts of the history
_QUANTILE = 0.75  # of those that got at least as far: most sequences end inside their reservation
_UNSEEN = 256  # tokens assumed while nothing has finished yet (chat answers are mostly shorter)


def output_limit(request: Request, max_model_len: int, num_blocks: int, block_size: int) -> int:
    """Return how many tokens the request may generate here.

    Raises `RequestRefused`: `invalid` (empty prompt, no output), `too_long` (the prompt fills the model's length),
    `kv_capacity` (it could outgrow the whole pool, so it might never end).
    """
    if request.prompt_len < 1 or request.max_tokens < 1:
        lengths = f"a prompt of {request.prompt_len} tokens and max_tokens {request.max_tokens}"
        raise RequestRefused("invalid", f"a request needs at least 1 prompt token and 1 new token, got {lengths}")
    if request.prompt_len >= max_model_len:
        message = f"the prompt has {request.prompt_len} tokens, but with one new token {max_model_len - 1} is the most"
        raise RequestRefused("too_long", f"{message} (the model's length is {max_model_len})")
    limit = min(request.max_tokens, max_model_len - request.prompt_len)
    positions = request.prompt_len + limit - 1  # the last token is never read, so it needs no KV
    if positions > num_blocks * block_size:
        raise RequestRefused(
            "kv_capacity",
            f"the request may grow to {positions + 1} tokens, but the KV pool holds {num_blocks * block_size} "
            f"({num_blocks} blocks of {block_size}): lower max_tokens, shorten the prompt or raise kvMemoryFraction",
        )
    return limit


class OutputHistory:
    """How long answers turned out to be, and so how long one that has come this far will get."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_HISTORY)
        self._sorted: list[int] = []
        self._stale = 0

    def observe(self, output_len: int) -> None:
        """Remember a finished request's output length."""
        self._recent.append(output_len)
        self._stale += 1
        if self._stale >= _REFRESH or len(self._recent) <= _REFRESH:
            self._sorted, self._stale = sorted(self._recent), 0

    def predict(self, output_len: int, limit: int) -> int:
        """Return the likely final output length of a sequence that has `output_len` tokens and may make `limit`."""
        longer = len(self._sorted) - bisect_right(self._sorted, output_len)
        if not longer:  # longer than all before: it may well go on as long again
            return min(limit, max(_UNSEEN, 2 * output_len))
        return min(limit, self._sorted[-longer + int(longer * _QUANTILE)])


class AdmissionGuard:
    """Backs off after preemptions until they stop.

    `share` is the part of the pool that predicted peaks may fill. A step that preempts cuts it, steps without preemption
    raise it again: additive increase, multiplicative decrease, as congestion control does for the same reason.
    """

    CUT = 0.8
    RAISE = 0.002  # per step: from one cut back to full in about a hundred steps
    FLOOR = 0.25

    def __init__(self) -> None:
        self.share = 1.0
        self.history = OutputHistory()

    def after_step(self, preemptions: int) -> None:
        """Adapt to how many sequences the step had to preempt."""
        if preemptions:
            self.share = max(self.FLOOR, self.share * self.CUT)
        elif self.share < 1.0:
            self.share = min(1.0, self.share + self.RAISE)

    def after_quiet_steps(self, steps: int) -> None:
        """Adapt to this many steps without preemption."""
        while steps and self.share < 1.0:
            self.after_step(0)
            steps -= 1
