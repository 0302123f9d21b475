"""The engine's own process: model, scheduler and step loop behind two ZeroMQ sockets.

Started by the API process as `python -m paceline_runtime.engine_process INBOX OUTBOX` with its settings as one JSON line on
stdin. Stdin stays open as long as the API process lives: when it closes, this process ends, so none is ever orphaned.
Both sockets queue without limit in memory (what is queued is bounded by the requests that the API admits), so a step never
waits for the API and the API never waits for a step.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from paceline_core.errors import PacelineError, RequestRefused
from paceline_core.knobs import knobs_from_wire
from paceline_core.request import FinishReason
from paceline_core.step_time import StepTimeFitter
from paceline_core.wire import Gauges
from paceline_runtime.backend import load_backend
from paceline_runtime.drafting import InertKnob, proposer_for
from paceline_runtime.engine import Engine, Turn
from paceline_runtime.engine_reports import ended_of, members_of, request_of, statistics_of
from paceline_runtime.grammar_queue import GrammarQueue, open_grammars
from paceline_runtime.heap import keep_heap
from paceline_runtime.logs import log_event, set_up_logging
from paceline_runtime.messages import (
    AbortSequence,
    AddSequence,
    EngineFailed,
    EngineReady,
    GrammarsReady,
    Heartbeat,
    KnobsApplied,
    KnobsRefused,
    SequenceEnded,
    SetKnobs,
    SetTimeline,
    StepOutput,
    ToEngine,
    decode_to_engine,
    encode,
)
from paceline_runtime.model_errors import GrammarError
from paceline_runtime.settings import EngineSettings
from paceline_runtime.step_profile import profile_steps

if TYPE_CHECKING:
    from paceline_runtime.grammar_matcher import GrammarMatcher  # loads the grammar library

__all__ = ["EngineLoop", "main", "open_socket"]

HEARTBEAT_SECONDS = 0.5  # a fortieth of the shortest useful --hang-timeout, and nothing on the wire
_PR_SET_PDEATHSIG = 1


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    """Return a connected socket that neither blocks a sender (no high-water mark) nor the exit (no linger)."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    return socket


class EngineLoop:
    """Moves messages between the sockets and an `Engine`. Everything but `busy_since` belongs to one thread."""

    def __init__(
        self,
        engine: Engine,
        eos_token_ids: frozenset[int],
        inbox: zmq.Socket[bytes],
        outbox: zmq.Socket[bytes],
        grammars: GrammarQueue | None = None,
        speculative: InertKnob | None = None,
    ) -> None:
        self.engine = engine
        self._grammars = grammars
        self._speculative = speculative
        self._eos = eos_token_ids
        self._inbox, self._outbox = inbox, outbox
        self._refused: list[SequenceEnded] = []
        self._acks: list[SetKnobs] = []
        self._epoch = 0
        self._timeline = False
        self._sent_gauges = Gauges()
        self.busy_since: float | None = None  # when the turn that runs now began; the watchdog reads it

    def run(self) -> None:
        """Run until the process ends: take what came, turn, send what came of it."""
        while True:
            self._receive()
            self.busy_since = time.monotonic()
            self._send(self.engine.turn())
            self.busy_since = None

    def _receive(self) -> None:
        """Handle every message that is here; with nothing to do, sleep until one comes or the scheduler's next event."""
        wait = self.engine.wait()
        timeout = -1 if wait is None else int(wait * 1000 + 0.999)  # rounded up, or the last millisecond would spin
        if not self._inbox.poll(timeout):
            return
        while True:
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(decode_to_engine(data))

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, AddSequence):
            if message.params.grammar is not None and self._grammars is not None:
                self._grammars.put(message)
            else:
                self._add(message)
        elif isinstance(message, AbortSequence):
            self._abort(message)
        elif isinstance(message, GrammarsReady):
            self._add_compiled()
        elif isinstance(message, SetKnobs):
            self._set_knobs(message)
        elif isinstance(message, SetTimeline):
            self._timeline = message.on
        else:
            self.engine.close_source()

    def _set_knobs(self, message: SetKnobs) -> None:
        try:
            knobs = knobs_from_wire(message.knobs)
            self._epoch = self.engine.set_knobs(knobs)
        except PacelineError as error:
            self._outbox.send(encode(KnobsRefused(message.revision, str(error))))
        else:
            self._acks.append(message)
            if self._speculative is not None:
                self._speculative.look(knobs)

    def _abort(self, message: AbortSequence) -> None:
        if self._grammars is not None and self._grammars.drop(message.seq_id):
            self._end_unstarted(message.seq_id, message.reason)
        else:
            self.engine.abort(message.seq_id, message.reason)

    def _add_compiled(self) -> None:
        """Take the sequences whose grammars were compiled beside the steps."""
        assert self._grammars is not None, "only a queue of grammars sends this"
        for message, matcher in self._grammars.take():
            if isinstance(matcher, GrammarError):
                self._end_unstarted(message.seq_id, FinishReason.REFUSED, str(matcher), "invalid_grammar")
            else:
                self._add(message, matcher)

    def _add(self, message: AddSequence, matcher: GrammarMatcher | None = None) -> None:
        try:
            self.engine.add(request_of(message, self._eos), message.params, matcher, message.submitted)
        except RequestRefused as error:
            self._end_unstarted(message.seq_id, FinishReason.REFUSED, str(error), error.reason)

    def _end_unstarted(self, seq_id: int, reason: FinishReason, refusal: str = "", code: str = "") -> None:
        epoch, now = self.engine.epoch, time.monotonic()
        self._refused.append(
            SequenceEnded(seq_id, reason, 0, now, epoch=epoch, end_epoch=epoch, refusal=refusal, refusal_code=code)
        )

    def _send(self, turn: Turn) -> None:
        ended = [*self._refused, *(ended_of(e, turn.stories[e.request.seq_id]) for e in turn.ended)]
        self._refused = []
        gauges = self.engine.gauges()
        # also without a step: a request that begins to wait is news
        if turn.tokens or ended or turn.plan is not None or gauges != self._sent_gauges:
            details = dict(turn.logprobs), dict(turn.prompts)
            members = members_of(turn) if self._timeline else None
            output = StepOutput(dict(turn.tokens), ended, gauges, statistics_of(turn), *details, members)
            self._outbox.send(encode(output))
            self._sent_gauges = gauges
        if self._acks and not self.engine.resizing:
            for ack in self._acks:
                self._outbox.send(encode(KnobsApplied(ack.revision, self._epoch, self.engine.num_blocks)))
            self._acks = []


def _watch(loop: EngineLoop, outbox: zmq.Socket[bytes]) -> None:
    """Send heartbeats from a thread of its own, so that a long step delays none and a hang shows as `stalled`."""
    while True:
        busy_since, model = loop.busy_since, loop.engine.step_model
        stalled = 0.0 if busy_since is None else time.monotonic() - busy_since
        document = None if model is None else model.to_document()
        outbox.send(encode(Heartbeat(loop.engine.steps, stalled, document, loop.engine.expected)))
        time.sleep(HEARTBEAT_SECONDS)


def _end_with_parent() -> None:
    """End this process when the API process ends: by its pipe everywhere, also while stopped or hung by the kernel."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait_for_end() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=wait_for_end, name="parent-watch", daemon=True).start()


def _start(settings: EngineSettings, outbox: zmq.Socket[bytes], inbox: zmq.Socket[bytes]) -> EngineLoop:
    """Load, profile and announce the model."""
    knobs = knobs_from_wire(settings.knobs)
    backend = load_backend(settings, knobs)
    fitter = StepTimeFitter()
    profile_steps(backend, knobs, fitter)
    depth = _depth(settings, backend.device)
    engine = Engine(
        backend,
        knobs,
        pipeline_depth=depth,
        fitter=fitter,
        first_epoch=settings.first_epoch,
        proposer=proposer_for(backend.device),
    )
    inert = InertKnob(backend.device)
    inert.look(knobs)
    log_event(
        "engine_ready", device=backend.device, kv_blocks=backend.num_blocks, block_size=knobs.block_size,
        kv_tokens=backend.num_blocks * knobs.block_size, max_model_len=backend.max_model_len,
    )  # fmt: skip
    ready = EngineReady(
        max_model_len=backend.max_model_len,
        vocab_size=backend.vocab_size,
        eos_token_ids=list(backend.eos_token_ids),
        num_blocks=backend.num_blocks,
        device=backend.device,
        epoch=engine.epoch,
    )
    keep_heap()
    outbox.send(encode(ready))
    # a clock's text is a placeholder, whatever the grammar
    grammars = None if backend.device == "clock" else open_grammars(settings, backend, inbox)
    return EngineLoop(engine, frozenset(backend.eos_token_ids), inbox, outbox, grammars, inert)


def _depth(settings: EngineSettings, device: str) -> int:
    """Prepare the next step while this one runs where the device works beside us; on a CPU they'd share its cores."""
    return settings.pipeline_depth or (2 if device == "cuda" else 1)


def main() -> None:
    """Load the model, say so, and serve until the API process goes away."""
    inbox_address, outbox_address = sys.argv[1:3]
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSettings)
    # the API process drains on these, and tells (or outlives) us; a terminal's Ctrl-C reaches the whole process group
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_parent()
    set_up_logging(settings.log_format, "engine")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = open_socket(context, zmq.PULL, inbox_address)
    watchdog = open_socket(context, zmq.PUSH, outbox_address)
    outbox = open_socket(context, zmq.PUSH, outbox_address)
    # connections are made in this order, so the first word to arrive says that all are: the sockets' names can go
    outbox.send(encode(Heartbeat(steps=0, stalled=0.0)))
    try:
        loop = _start(settings, outbox, inbox)
    except Exception as error:  # noqa: BLE001  # whatever it is, the server must be told: it would only be tried again
        _fail(outbox, error)
        context.destroy()
        return
    threading.Thread(target=_watch, args=(loop, watchdog), name="watchdog", daemon=True).start()
    loop.run()


def _fail(outbox: zmq.Socket[bytes], error: Exception) -> None:
    """Say in one line why there is no engine; what isn't one of the errors that a user can do something about is a bug."""
    text = " ".join(str(error).split())
    if not isinstance(error, PacelineError | OSError | MemoryError):
        log_event("load_failed", level=logging.ERROR, error=error)
        text = f"loading the model failed unexpectedly ({type(error).__name__}: {text or 'no details'}); the log says where"
    outbox.setsockopt(zmq.LINGER, 5000)  # the one message that must arrive
    outbox.send(encode(EngineFailed(text or type(error).__name__)))
    outbox.close()


if __name__ == "__main__":
    main()
