"""One server's life: both ports, the engine behind them, signals, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn
import uvloop
from fastapi import FastAPI

from paceline_core.main import INTERRUPTED
from paceline_runtime.admin import build_admin
from paceline_runtime.admin_auth import TokenFile
from paceline_runtime.admission import Admission
from paceline_runtime.api import build_api
from paceline_runtime.api_keys import KeyFile
from paceline_runtime.backend import load_tokenizer_for
from paceline_runtime.drain import Drain
from paceline_runtime.engine_client import EngineClient
from paceline_runtime.heap import keep_heap
from paceline_runtime.http_protocol import BoundedHttp
from paceline_runtime.knob_store import KnobStore
from paceline_runtime.logs import log_event
from paceline_runtime.memory import memory_limit
from paceline_runtime.memory_watch import MemoryWatch
from paceline_runtime.metrics import RuntimeMetrics
from paceline_runtime.observe import ObserveLog
from paceline_runtime.recorder import Recorder
from paceline_runtime.service import Service
from paceline_runtime.settings import RuntimeSettings
from paceline_runtime.tracing import open_tracing

__all__ = ["Doors", "run_server"]

# after the drain's time is over, what is left is aborted and gets this long to be told so
LAST_WORDS_SECONDS = 2.0
KEEP_ALIVE_SECONDS = 75  # longer than the 60 s of common load balancers, so that they, not we, close idle connections


@dataclass(frozen=True, slots=True)
class Doors:
    """The listening sockets and who may use them; without a token file there is no admin port, without keys all may ask."""

    public: socket.socket
    admin: socket.socket | None = None
    tokens: TokenFile | None = None
    keys: KeyFile | None = None


def run_server(settings: RuntimeSettings, doors: Doors) -> int:
    """Serve until a signal; return the exit code. Raises a `PacelineError` if the model can't be loaded."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, doors))


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to us: two of them share a process, and a drain comes first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(settings: RuntimeSettings, doors: Doors) -> int:
    service = _build_service(settings, doors.tokens)
    servers = [_server(build_api(service, doors.keys))]
    listeners = [doors.public]
    if doors.admin is not None and doors.tokens is not None:
        servers.append(_server(build_admin(service, doors.tokens)))
        listeners.append(doors.admin)
    serving = [asyncio.ensure_future(s.serve(sockets=[sock])) for s, sock in zip(servers, listeners, strict=True)]
    ports = [listener.getsockname()[1] for listener in listeners]
    log_event("listening", host=settings.host, port=ports[0], admin_port=ports[1] if ports[1:] else "off")
    try:
        return await _until_signal(service)
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*serving)
        if (tracing := service.recorder.tracing) is not None:
            await asyncio.to_thread(tracing.close)


async def _until_signal(service: Service) -> int:
    """Load, serve, and drain on SIGTERM; an engine that can't start ends it with its error."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    engine = asyncio.ensure_future(service.client.run())
    leaving = asyncio.ensure_future(_leave(service, signals))
    loading = asyncio.ensure_future(_load_tokenizer(service))
    memory = MemoryWatch(service.metrics, memory_limit(), service.admission.set_low_memory)
    watching = asyncio.ensure_future(memory.run(lambda: service.client.engine_pid))
    tasks = (engine, leaving, loading, watching)
    try:
        pending = set(tasks)
        while not leaving.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what ended it
        return leaving.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _leave(service: Service, signals: asyncio.Queue[int]) -> int:
    """Wait for SIGTERM and drain; Ctrl-C (or a second signal) ends at once what is in flight. Return the exit code."""
    first = await signals.get()
    if first == signal.SIGTERM:
        again = asyncio.ensure_future(signals.get())
        await asyncio.wait({service.drain.begin(), again}, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
    service.drain.close()
    service.client.stop_all()
    await service.drain.wait_idle(LAST_WORDS_SECONDS)
    log_event("stopped", unfinished=service.drain.in_flight)
    return 0 if first == signal.SIGTERM else INTERRUPTED


async def _load_tokenizer(service: Service) -> None:
    service.tokenizer = await asyncio.to_thread(load_tokenizer_for, service.settings.engine)
    keep_heap()


def _build_service(settings: RuntimeSettings, tokens: TokenFile | None) -> Service:
    knobs = KnobStore(settings.start_knobs)
    metrics = RuntimeMetrics(settings.served_model_name)
    log = ObserveLog()
    # pods of one service share the token, so their prefix hashes can be compared; nobody else can compute them
    key = secrets.token_bytes(32) if tokens is None else tokens.newest[:64]
    recorder = Recorder(metrics, log, knobs, key, settings.slow_request)
    client = EngineClient(settings.engine, knobs, recorder)
    drain = Drain(settings.drain_propagation, settings.drain_timeout, client.close_source)
    if settings.otlp_traces_endpoint is not None:
        recorder.tracing = open_tracing(settings.otlp_traces_endpoint, settings.served_model_name)
    admission = Admission(settings, knobs, client, drain, recorder)
    metrics.gauge("predicted_wait").set_function(admission.predicted_wait)
    metrics.gauge("lag").set_function(lambda: client.lag)
    return Service(settings, knobs, metrics, log, recorder, client, drain, admission)


def _server(app: FastAPI) -> _Server:
    config = uvicorn.Config(
        app,
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(LAST_WORDS_SECONDS) + 1,
    )
    return _Server(config)
