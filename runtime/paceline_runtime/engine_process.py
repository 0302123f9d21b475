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

import msgspec
import zmq

from paceline_core.errors import PacelineError, RequestRefused
from paceline_core.knobs import knobs_from_wire
from paceline_core.request import Ended, FinishReason, Request
from paceline_core.step_time import StepTimeFitter
from paceline_core.wire import Gauges
from paceline_runtime.backend import load_backend
from paceline_runtime.engine import Engine, Turn
from paceline_runtime.logs import log_event, set_up_logging
from paceline_runtime.messages import (
    AbortSequence,
    AddSequence,
    EngineFailed,
    EngineReady,
    Heartbeat,
    KnobsApplied,
    KnobsRefused,
    SequenceEnded,
    SetKnobs,
    StepOutput,
    StepStatistics,
    ToEngine,
    decode_to_engine,
    encode,
)
from paceline_runtime.settings import EngineSettings
from paceline_runtime.step_profile import profile_steps

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
        self, engine: Engine, eos_token_ids: frozenset[int], inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]
    ) -> None:
        self.engine = engine
        self._eos = eos_token_ids
        self._inbox, self._outbox = inbox, outbox
        self._refused: list[SequenceEnded] = []
        self._acks: list[SetKnobs] = []
        self._epoch = 0
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
            self._add(message)
        elif isinstance(message, AbortSequence):
            self.engine.abort(message.seq_id, message.reason)
        elif isinstance(message, SetKnobs):
            self._set_knobs(message)
        else:
            self.engine.close_source()

    def _set_knobs(self, message: SetKnobs) -> None:
        try:
            self._epoch = self.engine.set_knobs(knobs_from_wire(message.knobs))
        except PacelineError as error:
            self._outbox.send(encode(KnobsRefused(message.revision, str(error))))
        else:
            self._acks.append(message)

    def _add(self, message: AddSequence) -> None:
        try:
            self.engine.add(_request(message, self._eos), message.params)
        except RequestRefused as error:
            epoch = self.engine.epoch
            ended = SequenceEnded(
                message.seq_id, FinishReason.REFUSED, 0, time.monotonic(), epoch=epoch, end_epoch=epoch,
                refusal=str(error), refusal_code=error.reason,
            )  # fmt: skip
            self._refused.append(ended)

    def _send(self, turn: Turn) -> None:
        ended = [*self._refused, *(_ended(e) for e in turn.ended)]
        self._refused = []
        gauges = self.engine.gauges()
        # also without a step: a request that begins to wait is news
        if turn.tokens or ended or turn.plan is not None or gauges != self._sent_gauges:
            self._outbox.send(encode(StepOutput(dict(turn.tokens), ended, gauges, _statistics(turn))))
            self._sent_gauges = gauges
        if self._acks and not self.engine.resizing:
            for ack in self._acks:
                self._outbox.send(encode(KnobsApplied(ack.revision, self._epoch, self.engine.num_blocks)))
            self._acks = []


def _request(message: AddSequence, eos: frozenset[int]) -> Request:
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
    )


def _ended(ended: Ended) -> SequenceEnded:
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
    )


def _statistics(turn: Turn) -> StepStatistics | None:
    if turn.plan is None or not turn.plan.scheduled:
        return None
    s = turn.plan.shape
    work = (s.decode_tokens, s.prefill_tokens, s.context_tokens, s.prefill_attention)
    return StepStatistics(time.monotonic(), turn.duration, turn.plan.epoch, *work)


def _watch(loop: EngineLoop, outbox: zmq.Socket[bytes]) -> None:
    """Send heartbeats from a thread of its own, so that a long step delays none and a hang shows as `stalled`."""
    while True:
        busy_since, model = loop.busy_since, loop.engine.step_model
        stalled = 0.0 if busy_since is None else time.monotonic() - busy_since
        outbox.send(encode(Heartbeat(loop.engine.steps, stalled, None if model is None else model.to_document())))
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
    engine = Engine(backend, knobs, pipeline_depth=depth, fitter=fitter, first_epoch=settings.first_epoch)
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
    outbox.send(encode(ready))
    return EngineLoop(engine, frozenset(backend.eos_token_ids), inbox, outbox)


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
