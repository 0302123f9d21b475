"""The HTTP server: who may come in, how failures look, start and stop."""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import ipaddress
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from paceline_local.apiserver.certificates import read_token, tls_context, write_kubeconfig
from paceline_local.apiserver.collector import Collector
from paceline_local.apiserver.errors import ApiError, StateError
from paceline_local.apiserver.handlers import Handlers, error_response
from paceline_local.apiserver.journal import Journal
from paceline_local.apiserver.operations import Operations
from paceline_local.apiserver.resources import Registry
from paceline_local.apiserver.store import Store
from paceline_local.apiserver.targets import Target, WriteOptions

__all__ = ["Settings", "lock_state", "serve"]

_log = logging.getLogger(__name__)
_MAX_BODY = 3 << 20  # the real server's limit on a request, too
_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")


@dataclass(frozen=True, slots=True)
class Settings:
    """Where to keep state and where to listen; port 0 takes a free one. Only a loopback `host` is allowed."""

    state: Path
    host: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        try:
            loopback = ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            loopback = False
        if not loopback:
            raise StateError(
                f"--host {self.host} isn't a loopback address: this server starts processes for whoever may use it"
            )
        if not 0 <= self.port <= 65535:
            raise StateError(f"--port {self.port} isn't a port: give one between 1 and 65535, or 0 for a free one")


def lock_state(state: Path) -> int:
    """Make the state folder (0700) ours alone; returns the lock's file descriptor, to be kept open."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        state.chmod(0o700)
        fd = os.open(state / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StateError(f"the state folder {state} can't be written ({error.strerror}): give another --state") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise StateError(f"another server uses the state folder {state}: stop it or give another --state") from error
    return fd


async def serve(settings: Settings, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `ready` gets one line once requests are answered."""
    journal = Journal(settings.state)
    operations = Operations(Store(journal), Registry())
    _bootstrap(operations)
    runner = web.AppRunner(_app(operations, settings), handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    port = await _listen(runner, settings)
    kubeconfig = write_kubeconfig(settings.state, f"https://{_bracketed(settings.host)}:{port}", read_token(settings.state))
    collector = asyncio.create_task(Collector(operations).run())
    stop = _stop_event()
    ready(f"ready at https://{_bracketed(settings.host)}:{port} (kubeconfig {kubeconfig})")
    await stop.wait()
    collector.cancel()
    await runner.cleanup()
    journal.close()


async def _listen(runner: web.AppRunner, settings: Settings) -> int:
    try:
        site = web.TCPSite(runner, settings.host, settings.port, ssl_context=tls_context(settings.state, settings.host))
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise StateError(
            f"can't listen on {settings.host}:{settings.port} ({error.strerror}): give another --port"
        ) from error
    port: int = runner.addresses[0][1]
    return port


def _stop_event() -> asyncio.Event:
    """Return what SIGINT and SIGTERM set."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _bootstrap(operations: Operations) -> None:
    """Make the namespaces that every cluster has."""
    registry, options = operations.registry, WriteOptions(manager="paceline-apiserver")
    for name in _NAMESPACES:
        target = Target(registry.find("", "v1", "namespaces"), name=name)
        if operations.store.get(target.key) is None:
            operations.create(target, {"metadata": {"name": name}}, options)


def _app(operations: Operations, settings: Settings) -> web.Application:
    app = web.Application(middlewares=[_failures, _guard(settings)], client_max_size=_MAX_BODY)
    app.router.add_route("*", "/{path:.*}", Handlers(operations).handle)
    return app


@web.middleware
async def _failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPRequestEntityTooLarge:
        return error_response(
            ApiError(413, "RequestEntityTooLarge", f"the request is too large: the limit is {_MAX_BODY} bytes")
        )
    except OSError as error:  # a full disk: the machine's fault, which no traceback explains
        _log.error("%s %s failed: %s", request.method, request.path, error)
        return error_response(ApiError(500, "InternalError", f"internal error: {error}"))
    except Exception as error:  # noqa: BLE001  # the server must go on; the client learns that it's our fault
        _log.exception("%s %s failed", request.method, request.path)
        return error_response(ApiError(500, "InternalError", f"internal error: {error!r}"))


def _guard(settings: Settings) -> Middleware:
    """Return the middleware that lets only the token's holder in, and no browser: pages of other sites, or names that were
    rebound to loopback, must not reach a server that starts processes."""
    token = read_token(settings.state).encode()
    names = {_bracketed(settings.host), "localhost", "127.0.0.1"}

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.host.rpartition(":")[0] not in names and request.host not in names:
            raise ApiError(403, "Forbidden", f"this server isn't called {request.host!r}")
        if "Origin" in request.headers:
            raise ApiError(403, "Forbidden", "requests of web pages (with an Origin) are refused")
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(errors="replace"), token):
            raise ApiError(401, "Unauthorized", "Unauthorized")
        return await handler(request)

    return guard


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
