"""Events: what happened to an object, for `kubectl describe`. A repeated event raises its count."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from paceline_local.client import ApiClient
from paceline_local.errors import ApiError, ApiUnavailable
from paceline_local.manifests import Manifest, micro_timestamp, timestamp
from paceline_local.resources import EVENTS

__all__ = ["EventRecorder"]

log = logging.getLogger(__name__)
_MAX_MESSAGE = 1024
_MAX_KNOWN = 1000
_AGAIN_S = 10.0  # a repeated event is written this often at most: a pod that loads for an hour fails a probe twice a second


@dataclass(slots=True)
class _Known:
    """An Event that was written: its name, how often it happened, and when it was written last (monotonic seconds)."""

    name: str
    count: int
    written: float


class EventRecorder:
    """Writes Events about objects under one component's name. An Event that can't be written is only logged.

    Repetitions that come quickly are counted, and written with the first that comes later. `clock` is monotonic seconds.
    """

    def __init__(self, client: ApiClient, component: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._component = component
        self._clock = clock
        self._known: dict[tuple[str, str, str], _Known] = {}  # by (uid, reason, message)

    async def emit(self, obj: Manifest, kind: str, reason: str, message: str) -> None:
        """Record an event of `kind` Normal or Warning about an object."""
        message = message[:_MAX_MESSAGE]
        key = (obj["metadata"]["uid"], reason, message)
        try:
            known = self._known.get(key)
            if known is not None and await self._count(obj, known):
                return
            await self._create(obj, key, kind)
        except (ApiError, ApiUnavailable) as error:
            log.warning("event %s of %s not written: %s", reason, obj["metadata"]["name"], error)

    async def _count(self, obj: Manifest, known: _Known) -> bool:
        known.count += 1
        if self._clock() - known.written < _AGAIN_S:
            return True
        known.written = self._clock()
        body = {"count": known.count, "lastTimestamp": timestamp(time.time())}
        try:
            await self._client.patch(EVENTS, known.name, body, obj["metadata"].get("namespace") or "default")
        except ApiError as error:
            if error.not_found:  # events expire
                return False
            raise
        return True

    async def _create(self, obj: Manifest, key: tuple[str, str, str], kind: str) -> None:
        meta, now = obj["metadata"], time.time()
        namespace = meta.get("namespace") or "default"
        name = f"{meta['name']}.{uuid.uuid4().hex[:16]}"
        subject = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "name": meta["name"], "uid": meta["uid"]}
        subject |= {"namespace": meta["namespace"]} if meta.get("namespace") else {}
        event = {
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": subject,
            "type": kind,
            "reason": key[1],
            "message": key[2],
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": self._component,
            "action": key[1],
            "count": 1,
            "firstTimestamp": timestamp(now),
            "lastTimestamp": timestamp(now),
            "eventTime": micro_timestamp(now),
        }
        await self._client.create(EVENTS, event, namespace)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[key] = _Known(name, 1, self._clock())
