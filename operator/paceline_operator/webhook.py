"""The admission webhook's server, in every replica, leader or not: HTTPS on a thread with an event loop of its own.

The classes that a service is judged by are read when it is asked about, at most once a second unless one is missing: a
replica that doesn't lead watches nothing, and a `kubectl apply` of class and service in one go must find the class.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web
from kubernetes import client

from paceline_operator.admission import review
from paceline_operator.classes import ClassBook
from paceline_operator.errors import ApiUnavailable, SettingsError
from paceline_operator.metrics import Metrics
from paceline_operator.names import CLASS_PLURAL, GROUP, VERSION
from paceline_operator.settings import Settings
from paceline_operator.transport import send

__all__ = ["PATH", "ClassReader", "Webhook"]

logger = logging.getLogger(__name__)
PATH = "/validate"
_MOST_BYTES = 8 << 20  # a review holds the object twice, and etcd takes 1.5 MiB of one
_FRESH = 1.0  # seconds for which a list of classes is used again
_TIMEOUT = (1.0, 2.0)  # seconds to connect, to answer: webhooks are given 10 s at most places, ours asks for 5


class ClassReader:
    """Reads the InferenceClasses from the API server. For one thread at a time."""

    def __init__(
        self, configuration: client.Configuration, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = client.ApiClient(configuration)
        self._metrics, self._clock = metrics, clock
        self._book, self._read = ClassBook(), float("-inf")

    def __call__(self, newest: bool) -> ClassBook:
        """Return the classes, as of a second ago or later, or of now. Raises `ApiUnavailable`."""
        if newest or self._clock() - self._read > _FRESH:
            answer = send(self._api, "GET", f"/apis/{GROUP}/{VERSION}/{CLASS_PLURAL}", timeout=_TIMEOUT)
            self._metrics.api_calls.labels("GET", "InferenceClass", str(answer.status)).inc()
            if answer.data is None or not 0 < answer.status < 300:
                raise ApiUnavailable(f"the InferenceClasses can't be read: HTTP {answer.status}: {answer.message[:200]}")
            self._book = ClassBook(answer.data.get("items") or [])  # reviews, on another thread, keep the one that they have
            self._read = self._clock()
        return self._book


class Webhook:
    """Serves `/validate`. `context` may be given other certificates while it runs: new connections get them."""

    def __init__(
        self, settings: Settings, metrics: Metrics, classes: Callable[[bool], ClassBook], context: ssl.SSLContext
    ) -> None:
        self._settings, self._metrics, self._classes, self._context = settings, metrics, classes, context
        self._loop = asyncio.new_event_loop()
        self._reading = asyncio.Lock()
        self._started = threading.Event()
        self._failure: OSError | None = None
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)
        self.port = 0

    def start(self) -> None:
        """Serve from now on. Raises `SettingsError` if the port can't be taken."""
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            what = f"PACELINE_WEBHOOK_PORT={self._settings.webhook_port} can't be used"
            raise SettingsError(f"{what}: {self._failure.strerror}") from self._failure

    def stop(self) -> None:
        """Answer what is under way, then end."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except OSError as error:
            self._failure = error
            return
        finally:
            self._started.set()
        self._loop.run_forever()
        assert self._runner is not None, "it serves"
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=_MOST_BYTES)
        app.router.add_post(PATH, self._validate)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._settings.webhook_host, self._settings.webhook_port, ssl_context=self._context)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _validate(self, request: web.Request) -> web.Response:
        try:
            data = await request.json()
            result = review(data, await self._book(newest=False), self._settings)
            if "warnings" in result["response"]:  # a class that was made a moment ago?
                result = review(data, await self._book(newest=True), self._settings)
        except ValueError as error:
            self._count(None, "malformed")
            return web.Response(status=400, text=f"{error}\n")
        except ApiUnavailable as error:  # the webhook's failurePolicy decides then
            logger.warning("admission: %s", error)
            self._count(data, "failed")
            return web.Response(status=503, text=f"{error}\n")
        allowed = result["response"]["allowed"]
        self._count(data, "allowed" if allowed else "refused")
        if not allowed:
            logger.info("refused %s: %s", _words(data["request"]), result["response"]["status"]["message"])
        return web.json_response(result)

    async def _book(self, *, newest: bool) -> ClassBook:
        if not self._settings.use_classes:
            return ClassBook()
        async with self._reading:  # one list at a time, the others use it too
            return await asyncio.to_thread(self._classes, newest)

    def _count(self, data: Any, outcome: str) -> None:
        kind = data["request"].get("kind", {}).get("kind", "") if data else ""
        self._metrics.admission.labels(kind if kind in ("InferenceService", "InferenceClass") else "other", outcome).inc()


def _words(request: Any) -> str:
    return f"{request.get('kind', {}).get('kind')} {request.get('namespace', '')}/{request.get('name', '')}"
