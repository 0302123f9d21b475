"""The engine's runner on a GPU: a step is queued while the one before it runs, and nothing waits but the reading of tokens.

A step that continues sequences whose tokens are still being chosen takes them from the device. So the host lays out step
k + 1 while the GPU runs step k; what it doesn't know yet is which sequences step k ended, and a token too many is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline_core.plan import ScheduledSequence, StepPlan
from paceline_runtime.decoder import Decoder
from paceline_runtime.gpu_device import Mark
from paceline_runtime.gpu_executor import Computed, PagedExecutor, StagedStep
from paceline_runtime.gpu_layout import Span, lay_out
from paceline_runtime.gpu_sampling import (
    DeviceLogprobs,
    SampledRow,
    needs_past,
    pack_sampling,
    sample_packed,
    wanted_logprobs,
)
from paceline_runtime.gpu_tables import SlotTables
from paceline_runtime.parallel_group import SOLO, TensorGroup, group_head
from paceline_runtime.prompt_reader import PromptReader
from paceline_runtime.sampler import SequenceSampling, edit_logits
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.step_result import ModelStepResult, PromptReport

if TYPE_CHECKING:
    from paceline_runtime.grammar_matcher import GrammarMatcher

__all__ = ["PagedRunner"]


@dataclass(slots=True)
class _Sequence:
    """A live sequence. `coming` is the place among the tokens of step `step` of one that isn't in `tokens` yet."""

    tokens: list[int]
    prompt_len: int
    sampling: SequenceSampling
    coming: int | None = None
    step: int = -1

    @property
    def length(self) -> int:
        """Tokens, the one that is coming included."""
        return len(self.tokens) + (self.coming is not None)


@dataclass(slots=True)
class _Pending:
    """A step that was queued. `tokens` [n] int64 on the host are there once the device has passed `end`."""

    number: int
    begin: Mark | None = None
    end: Mark | None = None
    tokens: torch.Tensor | None = None
    seq_ids: tuple[int, ...] = ()
    sequences: tuple[_Sequence, ...] = ()
    logprobs: DeviceLogprobs | None = None
    prompts: dict[int, PromptReport] | None = None
    error: Exception | None = None
    read: tuple[int, ...] | None = None


class PagedRunner:
    """The engine's `Runner` over a `PagedExecutor`. One thread calls everything here; see `ModelRunner` for the contract."""

    def __init__(
        self, decoder: Decoder, executor: PagedExecutor, eos_token_ids: tuple[int, ...] = (), group: TensorGroup = SOLO
    ) -> None:
        self._decoder = decoder
        self._executor = executor
        self._eos_token_ids = eos_token_ids
        self._group = group
        self._tables = SlotTables(executor.max_seqs, executor.table_width)
        self._sequences: dict[int, _Sequence] = {}
        self._readers: dict[int, PromptReader] = {}
        self._pending: deque[_Pending] = deque()
        self._number = 0
        self._last_sampled = 0  # number of the step whose tokens the device holds
        # one for each step that may be in flight
        self._token_buffers = deque(executor.device.pinned(executor.max_seqs, torch.int64) for _ in range(2))

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
        """Queue the next plan; return before it is computed. At most two are in flight."""
        self._number += 1
        pending = _Pending(self._number)
        try:
            self._queue(plan, pending)
        except Exception as error:  # noqa: BLE001 - raised by the collect that waits for this step
            pending.error = error
        self._pending.append(pending)

    def collect(self) -> ModelStepResult:
        """Wait for the oldest submitted plan and return its result, or raise what it failed with."""
        pending = self._pending.popleft()
        if pending.error is not None:
            raise pending.error
        if pending.begin is None or pending.end is None:
            return ModelStepResult({}, 0.0)
        self._read(pending)
        seconds = pending.end.seconds_since(pending.begin)
        assert pending.read is not None
        tokens = {seq_id: (token,) for seq_id, token in zip(pending.seq_ids, pending.read, strict=True)}
        found = {} if pending.logprobs is None else pending.logprobs.read()
        logprobs = {pending.seq_ids[row]: (entry,) for row, entry in found.items()}
        return ModelStepResult(tokens, seconds, logprobs, pending.prompts or {})

    def close(self) -> None:
        """Nothing runs by itself; the group's other ranks end."""
        self._group.close()

    # -- queueing a step --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _queue(self, plan: StepPlan, pending: _Pending) -> None:
        for seq_id in plan.removed:
            self._sequences.pop(seq_id, None)
            self._readers.pop(seq_id, None)
        self._tables.release((*plan.preempted, *plan.removed))
        if plan.resize_blocks is not None:
            self._tables.release_all()
            self._group.send_resize(plan.resize_blocks)
            self._executor.resize(plan.resize_blocks)
        if not plan.scheduled:
            return
        pending.begin = self._executor.device.mark()
        samplers = [item for item in plan.scheduled if item.samples]
        rows = [(self._sequences[item.seq_id].sampling, self._generated(item)) for item in samplers]
        step = self._stage(plan.scheduled, rows)
        self._group.send_step(step)
        computed = self._executor.run(step)
        self._sample(samplers, rows, computed, pending)
        if computed.hidden is not None and self._readers:
            pending.prompts = self._read_prompts(plan.scheduled, computed.hidden)
        pending.end = self._executor.device.mark()

    def _generated(self, item: ScheduledSequence) -> int:
        return self._sequences[item.seq_id].length - self._sequences[item.seq_id].prompt_len

    def _stage(self, scheduled: Sequence[ScheduledSequence], rows: Sequence[SampledRow]) -> StagedStep:
        spans = [Span(item.seq_id, item.start, self._ids(item), item.block_table) for item in scheduled]
        arrays = lay_out(spans, self._tables, self._executor.shape)
        ends = (int(end) - 1 for end in arrays.query_starts[1:])
        sampled = [end for end, item in zip(ends, scheduled, strict=True) if item.samples]
        reading = any(item.seq_id in self._readers for item in scheduled)
        decodes = len(sampled) == len(arrays.ids) and not reading
        return self._executor.stage(arrays, sampled, pack_sampling(rows), decodes=decodes)

    def _ids(self, item: ScheduledSequence) -> list[int]:
        """Return the token ids of a sequence's part, one that is still coming as its place among the last step's tokens."""
        sequence = self._sequences[item.seq_id]
        end = item.start + item.num_tokens
        assert end <= sequence.length, f"sequence {item.seq_id} has {sequence.length} tokens, the plan wants {end}"
        assert not item.samples or end == sequence.length, f"sequence {item.seq_id} samples before its end"
        ids = sequence.tokens[item.start : end]
        if len(ids) < item.num_tokens:
            assert sequence.coming is not None and sequence.step == self._last_sampled, "only one step is read ahead"
            ids.append(-1 - sequence.coming)
        return ids

    def _read_prompts(self, scheduled: Sequence[ScheduledSequence], hidden: torch.Tensor) -> dict[int, PromptReport]:
        """Show the readers their chunks; return the reports of those whose prompt is complete."""
        reports, row = {}, 0
        for item in scheduled:
            if (reader := self._readers.get(item.seq_id)) is not None:
                reader.read(hidden[row : row + item.num_tokens], item.start)
                if item.samples:
                    reports[item.seq_id] = self._readers.pop(item.seq_id).report()
            row += item.num_tokens
        return reports

    def _sample(
        self, items: Sequence[ScheduledSequence], rows: Sequence[SampledRow], computed: Computed, pending: _Pending
    ) -> None:
        count = len(items)
        pending.seq_ids = tuple(item.seq_id for item in items)
        pending.sequences = tuple(self._sequences[item.seq_id] for item in items)
        pending.tokens = self._token_buffers[0][:count]
        self._token_buffers.rotate()
        if computed.logits is None:
            return
        wanted = wanted_logprobs(computed.logits, rows)
        if needs_past(rows):
            self._settle()
        edit_logits(computed.logits, rows)
        sampled = self._executor.sampled[:count]
        sampled.copy_(sample_packed(computed.logits, computed.views))
        self._group.share(sampled)
        pending.tokens.copy_(sampled, non_blocking=True)
        if wanted is not None:
            pending.logprobs = wanted.of(sampled, self._executor.device)
        for place, sequence in enumerate(pending.sequences):
            sequence.coming, sequence.step = place, pending.number
        self._last_sampled = pending.number

    # -- reading tokens ---------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Read the tokens of every step that is in flight."""
        for pending in self._pending:
            if pending.end is not None and pending.error is None:
                self._read(pending)

    def _read(self, pending: _Pending) -> None:
        """Wait for a step's tokens and append them to their sequences, once."""
        if pending.read is not None:
            return
        assert pending.end is not None and pending.tokens is not None
        self._group.wait(pending.end)
        pending.read = tuple(pending.tokens.tolist())
        for sequence, token in zip(pending.sequences, pending.read, strict=True):
            sequence.tokens.append(token)
            sequence.sampling.accept(token)
            if sequence.step == pending.number:
                sequence.coming = None
