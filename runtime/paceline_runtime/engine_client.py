"""The API process's side of the engine: starts it, starts it again when it dies, and routes its tokens to their readers."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from paceline_core.errors import PacelineError
from paceline_core.knobs import knobs_to_wire
from paceline_core.request import FinishReason
from paceline_core.wire import Gauges, StepModelDocument
from paceline_runtime.engine_link import EngineLink
from paceline_runtime.engine_listener import EngineListener
from paceline_runtime.knob_store import KnobChange, KnobStore
from paceline_runtime.logs import log_event
from paceline_runtime.messages import (
    AbortSequence,
    AddSequence,
    CloseSource,
    EngineFailed,
    EngineReady,
    FromEngine,
    Heartbeat,
    KnobsApplied,
    KnobsRefused,
    SetKnobs,
    SetTimeline,
    StepOutput,
)
from paceline_runtime.sequence import EngineDied, LiveSequence, Submission
from paceline_runtime.settings import EngineSettings

__all__ = ["EngineCannotStart", "EngineClient", "EngineNotReady", "EngineState", "KnobsNotTaken"]

MAX_DEATHS_WHILE_LOADING = 3  # then the process ends, so that the kubelet's back-off and the pod's status take over
PATIENCE_WITH_STEPS = 3.0  # times what the step-time model says, which is off by less than that
_REFUSALS_KEPT = 16
_FIRST_BACKOFF, _MAX_BACKOFF = 0.2, 10.0


class EngineCannotStart(PacelineError):
    """The engine said why, and trying again won't help."""


class EngineNotReady(PacelineError):
    """The engine is loading or restarting: come back later."""


class KnobsNotTaken(PacelineError):
    """The knobs are valid, but this engine can't run under them; the ones before are in force."""


class EngineState(StrEnum):
    """What the engine is up to."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"


class EngineClient:
    """Used from one event loop. `run` supervises; everything else returns at once."""

    def __init__(self, settings: EngineSettings, knobs: KnobStore, listener: EngineListener) -> None:
        self._settings = settings
        self._knobs = knobs
        self._listener = listener
        self._link: EngineLink | None = None
        self._ids = itertools.count(1)
        self._live: dict[int, LiveSequence] = {}
        self._heard = time.monotonic()
        self._stalled = self._expected = 0.0
        self._timeline_until = 0.0
        self._refusals: dict[int, str] = {}
        self._applied = asyncio.Condition()
        self.state = EngineState.LOADING
        self.ready: EngineReady | None = None
        self.gauges = Gauges()
        self.step_model: StepModelDocument | None = None
        self.starts = 0
        self.lag = 0.0  # seconds from the end of the last step until this process looked at what came of it
        self.engine_pid: int | None = None
        self._instance = f"{time.time_ns():x}"

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission) -> LiveSequence:
        """Send a sequence to the engine. Raises `EngineNotReady`."""
        if self.state is not EngineState.READY or self._link is None:
            raise EngineNotReady(f"the engine is {self.state}")
        sequence = LiveSequence(next(self._ids), submission, self._knobs.epoch)
        s = submission
        self._link.send(
            AddSequence(sequence.seq_id, s.tokens, s.params, s.arrival, s.priority, s.deadline, s.salt, time.monotonic())
        )
        self._live[sequence.seq_id] = sequence  # not before it is sent: what fails to be would never end
        self._listener.submitted(sequence)
        return sequence

    def stop(self, sequence: LiveSequence, reason: FinishReason, cause: str = "client") -> None:
        """Ask the engine to end a sequence, once; `ABORT`: nobody wants it any more, `STOP`: its text reached a stop text.

        `cause` is the word under which an abort is counted, unless the sequence has one already.
        """
        if sequence.stop_sent is None and sequence.seq_id in self._live and self._link is not None:
            sequence.stop_sent, sequence.stop_cause = reason, sequence.stop_cause or cause
            self._link.send(AbortSequence(sequence.seq_id, reason))

    def stop_all(self) -> None:
        """Abort every sequence (the drain's time is over)."""
        for sequence in list(self._live.values()):
            self.stop(sequence, FinishReason.ABORT, "shutdown")

    def close_source(self) -> None:
        """Tell the engine that no more sequences will come."""
        if self.state is EngineState.READY and self._link is not None:
            self._link.send(CloseSource())

    def watch_timeline(self, seconds: float) -> None:
        """Have the engine say who is in each step, for so long from now on."""
        was_on = time.monotonic() < self._timeline_until
        self._timeline_until = max(self._timeline_until, time.monotonic() + seconds)
        if not was_on:
            self._send_timeline(on=True)

    def _send_timeline(self, *, on: bool) -> None:
        if self.state is EngineState.READY and self._link is not None:
            self._link.send(SetTimeline(on))

    @property
    def live(self) -> Mapping[int, LiveSequence]:
        """Sequences that the engine hasn't ended yet."""
        return self._live

    # -- knobs and health -------------------------------------------------------------------------------------------

    def set_knobs(self, change: KnobChange) -> None:
        """Tell the engine what it doesn't run under yet; while there is none, the next one starts with these knobs."""
        if change.revision <= self._knobs.applied_revision:
            return  # nothing changed: no epoch of its own
        if self.state is EngineState.READY and self._link is not None:
            self._link.send(SetKnobs(change.revision, knobs_to_wire(change.knobs)))

    async def wait_applied(self, revision: int, seconds: float) -> None:
        """Return when the engine has taken the knobs of `revision`, or after `seconds`. Raises `KnobsNotTaken`."""
        try:
            async with asyncio.timeout(seconds), self._applied:
                await self._applied.wait_for(lambda: self._knobs.applied_revision >= revision or revision in self._refusals)
        except TimeoutError:
            return
        if (message := self._refusals.pop(revision, None)) is not None:
            raise KnobsNotTaken(message)

    def hung(self, timeout: float) -> str | None:
        """Return how the engine hangs: it is silent, or one step takes longer than `timeout` and than such a step should.

        None while it is well, loads, or computes a step that the step-time model says takes so long.
        """
        if self.state is not EngineState.READY:
            return None
        if (silent := time.monotonic() - self._heard) > timeout:
            return f"the engine process has said nothing for {silent:.0f} s"
        if self._stalled > max(timeout, PATIENCE_WITH_STEPS * self._expected):
            return f"a step has been running for {self._stalled:.0f} s, {self._expected:.3g} s were expected"
        return None

    @property
    def activity(self) -> str:
        """What the engine does, in a few words."""
        if self.state is not EngineState.READY:
            return str(self.state)
        slow = self._stalled > 1.0
        return (
            f"a step has been running for {self._stalled:.0f} s, {self._expected:.3g} s are expected" if slow else "serving"
        )

    @property
    def instance(self) -> str:
        """Names this life of the engine: changes when it is started again."""
        return f"{self._instance}-{self.starts}"

    # -- supervision ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep an engine running until cancelled. Raises `EngineCannotStart`."""
        deaths, backoff = 0, _FIRST_BACKOFF
        while True:
            text = await self._live_once()
            was_ready = self.state is EngineState.READY
            deaths, backoff = (0, _FIRST_BACKOFF) if was_ready else (deaths + 1, min(backoff * 2, _MAX_BACKOFF))
            if deaths >= MAX_DEATHS_WHILE_LOADING:
                raise EngineCannotStart(f"the engine process {text} {deaths} times while loading the model")
            self._lose_all(text)
            await asyncio.sleep(backoff)

    async def _live_once(self) -> str:
        """Run one engine process to its end and return how it ended."""
        self.starts += 1
        knobs = knobs_to_wire(self._knobs.target)
        # records of this engine and of the one before are read together: an epoch must not mean two things
        first_epoch = 0 if self.starts == 1 else self._knobs.epoch + 1
        link = EngineLink(dataclasses.replace(self._settings, knobs=knobs, first_epoch=first_epoch))
        self._link, self._started_with = link, self._knobs.revision
        try:
            await link.start()
            self.engine_pid = link.pid
            log_event("engine_started", pid=link.pid, start=self.starts)
            async for message in link.messages():
                await self._handle(message)
            return link.exit_text
        finally:
            self._link = self.engine_pid = None
            await link.close()

    def _lose_all(self, text: str) -> None:
        """Fail every sequence that the dead engine had."""
        lost, self._live = list(self._live.values()), {}
        self.state, self.gauges, self._stalled, self.lag = EngineState.RESTARTING, Gauges(), 0.0, 0.0
        log_event("engine_died", how=text, lost_sequences=len(lost))
        self._listener.engine_died(lost)
        for sequence in lost:
            sequence.fail(EngineDied(f"the engine process {text}; it is being started again"))

    # -- what the engine says ---------------------------------------------------------------------------------------

    async def _handle(self, message: FromEngine) -> None:
        self._heard = time.monotonic()
        if isinstance(message, StepOutput):
            self._stepped(message)
        elif isinstance(message, Heartbeat):
            self._stalled, self._expected, self.step_model = message.stalled, message.expected, message.step_model
            if message.step_model is not None:
                self._listener.fitted(message.step_model)
        elif isinstance(message, KnobsApplied):
            await self._confirm(message.revision, message.epoch, message.num_blocks)
        elif isinstance(message, KnobsRefused):
            await self._refuse(message)
        elif isinstance(message, EngineReady):
            await self._become_ready(message)
        elif isinstance(message, EngineFailed):
            raise EngineCannotStart(message.message)

    def _stepped(self, output: StepOutput) -> None:
        now = time.monotonic()
        self.gauges = output.gauges
        for seq_id, tokens in output.tokens.items():
            if (sequence := self._live.get(seq_id)) is not None:
                self._listener.tokens(sequence, len(tokens), now)
                sequence.push(tokens, now, output.logprobs.get(seq_id, ()), output.prompts.get(seq_id))
        for ended in output.ended:
            if (sequence := self._live.pop(ended.seq_id, None)) is not None:
                self._listener.sequence_ended(sequence, ended)
                sequence.end(ended)
        # without a step, or without anybody who waits for one, nothing is left to be behind with: no later step may come
        self.lag = now - output.step.end if output.step is not None and self._live else 0.0
        self._listener.stepped(output.step, output.gauges, output.members)
        if output.members is not None and now > self._timeline_until:
            self._send_timeline(on=False)

    async def _become_ready(self, ready: EngineReady) -> None:
        self.ready, self.state = ready, EngineState.READY
        self._listener.engine_ready(ready)
        if time.monotonic() < self._timeline_until:
            self._send_timeline(on=True)
        await self._confirm(self._started_with, ready.epoch, ready.num_blocks)
        if self._knobs.revision != self._started_with:  # changed while it was loading
            self.set_knobs(KnobChange(self._knobs.revision, self._knobs.target))

    async def _refuse(self, refusal: KnobsRefused) -> None:
        log_event("knobs_refused", revision=refusal.revision, reason=refusal.message)
        self._refusals[refusal.revision] = refusal.message
        if len(self._refusals) > _REFUSALS_KEPT:  # nobody waited for the oldest
            del self._refusals[min(self._refusals)]
        self._knobs.refused(refusal.revision)
        async with self._applied:
            self._applied.notify_all()

    async def _confirm(self, revision: int, epoch: int, num_blocks: int) -> None:
        assert self.ready is not None, "knobs are applied by an engine that is ready"
        self.ready = msgspec.structs.replace(self.ready, num_blocks=num_blocks)
        self._knobs.applied(revision, epoch)
        self._listener.knobs_applied(num_blocks)
        async with self._applied:
            self._applied.notify_all()
