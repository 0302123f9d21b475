"""Runs the scheduler's plans on a model, in order."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from paceline_core.plan import ScheduledSequence, StepPlan
from paceline_kernels import AttentionBatch, AttentionPlanner, SequenceSpan
from paceline_kernels.ints import int64s
from paceline_runtime.decoder import Decoder
from paceline_runtime.draft_check import draft_rows, num_standing
from paceline_runtime.kv_pool import KvPool
from paceline_runtime.parallel_group import SOLO, TensorGroup, group_head
from paceline_runtime.prompt_reader import PromptReader
from paceline_runtime.sampler import SequenceSampling, sample_tokens
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.step_result import ModelStepResult, PromptReport, TokenLogprobs

if TYPE_CHECKING:
    from paceline_runtime.grammar_matcher import GrammarMatcher

__all__ = ["ModelRunner", "ModelStepResult"]


@dataclass(slots=True)
class _Sequence:
    """A live sequence: its prompt and what was generated so far, and its `table` of blocks as C ints."""

    tokens: list[int]
    prompt_len: int
    sampling: SequenceSampling
    table: Sequence[int] = ()
    blocks: array[int] = field(default_factory=lambda: array("i"))

    def blocks_of(self, table: Sequence[int]) -> array[int]:
        """Return the blocks of `table`, which only grows while it is the same list. Only what is new is read: each of a
        list's ints lies somewhere else in memory, and a step has long forgotten it by the next.
        """
        if table is not self.table:
            self.table, self.blocks = table, array("i", table)
        elif len(table) > len(self.blocks):
            self.blocks.extend(table[len(self.blocks) :])
        return self.blocks


@dataclass(frozen=True, slots=True)
class _Step:
    """A plan laid out for the model. `rows` [n] are those to sample from: each of `sampling` has one, and one per draft."""

    plan: StepPlan
    scheduled: tuple[ScheduledSequence, ...] = ()
    batch: AttentionBatch | None = None
    rows: torch.Tensor | None = None
    sampling: tuple[ScheduledSequence, ...] = ()
    spans: tuple[SequenceSpan, ...] = ()  # for the other ranks of a tensor-parallel group


class ModelRunner:
    """The engine's `Runner`: `submit` lays a plan out, `collect` computes it, in the thread that calls. The kernels have
    threads of their own, so one more would only take turns with them: handing a step over and back cost half a millisecond.

    A sampled token is appended to its sequence here, so the next plan finds it, and a preempted sequence is computed again
    from its own tokens. An error of a step is raised by the `collect` that waits for it.
    """

    def __init__(self, decoder: Decoder, kv: KvPool, eos_token_ids: tuple[int, ...] = (), group: TensorGroup = SOLO) -> None:
        self._decoder = decoder
        self._kv = kv
        self._group = group
        self._eos_token_ids = eos_token_ids
        self._planner = AttentionPlanner(
            kv.block_size, decoder.dtype, decoder.device, window=decoder.config.window, native=decoder.native
        )
        self._sequences: dict[int, _Sequence] = {}
        self._readers: dict[int, PromptReader] = {}  # of the sequences that want to know something of their prompt
        self._steps: deque[_Step] = deque()

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Sequences whose state is kept."""
        return tuple(self._sequences)

    def add(
        self, seq_id: int, prompt_tokens: list[int], params: SamplingParams, matcher: GrammarMatcher | None = None
    ) -> None:
        """Keep a new sequence's prompt and how to sample it, before the first plan that names it."""
        assert prompt_tokens, "a prompt has at least one token"
        sampling = SequenceSampling.of(params, self._eos_token_ids, prompt_tokens, matcher)
        if params.prompt_logprobs is not None or params.pooling is not None:
            self._readers[seq_id] = PromptReader(group_head(self._decoder, self._group), tuple(prompt_tokens), params)
        self._sequences[seq_id] = _Sequence(list(prompt_tokens), len(prompt_tokens), sampling)

    def submit(self, plan: StepPlan) -> None:
        """Take the next plan; return before it is computed."""
        self._steps.append(self._lay_out(plan))

    def collect(self) -> ModelStepResult:
        """Compute the oldest submitted plan and return its result, or raise what it fails with."""
        return self._run(self._steps.popleft())

    def close(self) -> None:
        """End the other ranks; no plan is in flight."""
        self._group.close()

    def _lay_out(self, plan: StepPlan) -> _Step:
        """Fix everything but the token ids, which the step before may still have to choose."""
        if not plan.scheduled:
            return _Step(plan)
        scheduled = plan.scheduled if self._decoder.native else _ones_first(plan.scheduled)
        # the scheduler goes on changing its tables: the planner copies what it needs of them
        spans = [SequenceSpan(item.start, item.num_tokens, self._blocks(item)) for item in scheduled]
        batch = self._planner.plan(spans)
        rows: list[int] = []
        sampling, row = [], 0
        for item in scheduled:
            row += item.num_tokens
            if item.samples:
                rows += range(row - 1 - len(item.drafts), row)
                sampling.append(item)
        where = int64s(rows).to(self._decoder.device)
        kept = tuple(span._replace(blocks=list(span.blocks)) for span in spans) if self._group.size > 1 else ()
        return _Step(plan, scheduled, batch, where, tuple(sampling), kept)

    def _blocks(self, item: ScheduledSequence) -> Sequence[int]:
        sequence = self._sequences.get(item.seq_id)
        return item.block_table if sequence is None else sequence.blocks_of(item.block_table)

    @torch.inference_mode()
    def _run(self, step: _Step) -> ModelStepResult:
        started = time.perf_counter()
        plan = step.plan
        for seq_id in plan.removed:
            self._sequences.pop(seq_id, None)
            self._readers.pop(seq_id, None)
        if plan.resize_blocks is not None:
            self._group.send_resize(plan.resize_blocks)
            self._kv.resize(plan.resize_blocks)
        if step.batch is None:
            return ModelStepResult({}, time.perf_counter() - started)
        assert step.rows is not None, "a step with a batch has rows"
        ids = self._token_ids(step)
        self._group.send_spans(step.spans, ids, step.rows)
        hidden = self._decoder.hidden(ids, step.batch, self._kv.layers)
        tokens, logprobs = self._sample(step, hidden)
        prompts = self._read_prompts(step, hidden) if self._readers else {}
        return ModelStepResult(tokens, time.perf_counter() - started, logprobs, prompts)

    def _read_prompts(self, step: _Step, hidden: torch.Tensor) -> dict[int, PromptReport]:
        """Show the readers their chunks; return the reports of those whose prompt is complete."""
        reports, row = {}, 0
        for item in step.scheduled:
            if (reader := self._readers.get(item.seq_id)) is not None:
                reader.read(hidden[row : row + item.num_tokens], item.start)
                if item.samples:
                    reports[item.seq_id] = self._readers.pop(item.seq_id).report()
            row += item.num_tokens
        return reports

    def _token_ids(self, step: _Step) -> torch.Tensor:
        ids: list[int] = []
        for item in step.scheduled:
            tokens, end = self._sequences[item.seq_id].tokens, _known_end(item)
            assert end <= len(tokens), f"sequence {item.seq_id} has {len(tokens)} tokens, the plan wants {end}"
            ids.extend(tokens[item.start : end])
            ids.extend(item.drafts)
        return int64s(ids).to(self._decoder.device)

    def _sample(
        self, step: _Step, hidden: torch.Tensor
    ) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[TokenLogprobs, ...]]]:
        if not step.sampling:
            return {}, {}
        assert step.rows is not None, "a step that samples has rows to sample from"
        tokens, logprobs = self._choose(step.sampling, hidden, step.rows)
        chosen: dict[int, tuple[int, ...]] = {}
        reported: dict[int, tuple[TokenLogprobs, ...]] = {}
        row = 0
        for item in step.sampling:
            first, row = row, row + 1 + len(item.drafts)
            if (made := self._take(item, tokens[first:row])) is not None:
                chosen[item.seq_id] = made
                if found := [entry for entry in logprobs[first : first + len(made)] if entry is not None]:
                    reported[item.seq_id] = tuple(found)
        return chosen, reported

    def _choose(
        self, items: Sequence[ScheduledSequence], hidden: torch.Tensor, rows: torch.Tensor
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Return a token and its log-probabilities (None where not asked for) for each of `rows` of the hidden states."""
        if all(self._sequences[item.seq_id].sampling.plain for item in items):
            return self._decoder.greedy(hidden, rows), []
        logits = self._decoder.logits(hidden, rows)
        return sample_tokens(logits, [row for item in items for row in self._rows(item)])

    def _rows(self, item: ScheduledSequence) -> list[tuple[SequenceSampling, int]]:
        sequence = self._sequences[item.seq_id]
        return draft_rows(sequence.sampling, len(sequence.tokens) - sequence.prompt_len, item.drafts)

    def _take(self, item: ScheduledSequence, sampled: list[int]) -> tuple[int, ...] | None:
        """Append what stands of an entry's samples; None if a step before gave several tokens, so that these are void."""
        sequence = self._sequences[item.seq_id]
        if _known_end(item) != len(sequence.tokens):
            return None
        made = tuple(sampled[: num_standing(sampled, item.drafts)])
        sequence.tokens.extend(made)
        for token in made:
            sequence.sampling.accept(token)
        return made


def _known_end(item: ScheduledSequence) -> int:
    """Return up to where an entry computes tokens that are no drafts."""
    return item.start + item.num_tokens - len(item.drafts)


def _ones_first(scheduled: Sequence[ScheduledSequence]) -> tuple[ScheduledSequence, ...]:
    """Return entries of one token by falling context, then the others: as the planner pads the least."""
    decodes = [item for item in scheduled if item.num_tokens == 1]
    decodes.sort(key=lambda item: -item.start)
    return (*decodes, *(item for item in scheduled if item.num_tokens > 1))
