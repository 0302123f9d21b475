"""From the messages of the API process to what the engine takes, and from what the engine says to messages."""

from __future__ import annotations

import time

from paceline_core.causes import Story, largest
from paceline_core.request import Ended, Request
from paceline_runtime.engine import Turn
from paceline_runtime.messages import AddSequence, SequenceEnded, StepStatistics

__all__ = ["ended_of", "members_of", "request_of", "statistics_of"]

CULPRITS = 3  # of a request that are told: who is behind those is noise


def request_of(message: AddSequence, eos: frozenset[int]) -> Request:
    """Return what the scheduler takes; `eos` ends it unless the client wants to see what comes after."""
    params = message.params
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
    return Request(
        seq_id=message.seq_id,
        prompt_len=len(message.tokens),
        max_tokens=params.max_tokens,
        arrival=message.arrival,
        priority=message.priority,
        deadline=message.deadline,
        tokens=message.tokens,
        salt=message.salt,
        stop_token_ids=stop_ids,
        min_tokens=params.min_tokens,
        read_cache=params.reads_cache,
        draftable=params.draftable,
    )


def ended_of(ended: Ended, story: Story) -> SequenceEnded:
    """Return the end of a request and where its time went."""
    return SequenceEnded(
        seq_id=ended.request.seq_id,
        reason=ended.reason,
        output_len=ended.output_len,
        released=ended.released,
        first_scheduled=ended.first_scheduled,
        first_token=ended.first_token,
        last_token=ended.last_token,
        cached_len=ended.cached_len,
        preemptions=ended.preemptions,
        epoch=ended.epoch,
        end_epoch=ended.end_epoch,
        parts=tuple(story.parts.by_cause().values()),
        delayed_by=largest(story.delayed_by, CULPRITS),
        preempted_by=largest(story.preempted_by, CULPRITS),
    )


def members_of(turn: Turn) -> list[tuple[int, int, bool]]:
    """Return who was in the step: sequence, tokens, whether they are a prompt's (those come last)."""
    entries = () if turn.plan is None else turn.plan.scheduled
    decodes = 0 if turn.plan is None else turn.plan.shape.decode_tokens
    members = []
    for entry in entries:
        members.append((entry.seq_id, entry.num_tokens, decodes <= 0))
        decodes -= entry.num_tokens
    return members


def statistics_of(turn: Turn) -> StepStatistics | None:
    """Return the size and the time of the step, if the turn had one."""
    if turn.plan is None or not turn.plan.scheduled:
        return None
    s = turn.plan.shape
    work = (s.decode_tokens, s.prefill_tokens, s.context_tokens, s.prefill_attention)
    return StepStatistics(time.monotonic(), turn.duration, turn.plan.epoch, *work)
