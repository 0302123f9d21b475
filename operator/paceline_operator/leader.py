"""Takes the Lease, keeps it on a thread of its own, and says at every moment whether this process may still act.

`may_act` needs no thread: it compares the monotonic clock with the last accepted renewal. A process that was paused for
longer than the deadline therefore refuses its own next write when it wakes up, before anything tells it of a successor.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol

from kubernetes import client

from paceline_operator.errors import LeaseError
from paceline_operator.lease import Record, Times, View, claim, release, renewal
from paceline_operator.metrics import Metrics
from paceline_operator.transport import Answer, Object, send

__all__ = ["Elected", "Election", "Leadership", "monotonic"]

logger = logging.getLogger(__name__)
_CALL_TIMEOUT = (2.0, 3.0)  # seconds to connect, to answer: several attempts have to fit into the deadline
_FINAL = (400, 401, 403, 422)
_LAST_WORD = 10.0  # seconds after a loss in which the process has to end by itself


class Leadership(Protocol):
    """Whether this process may act, and the number that its actions carry."""

    def fence(self) -> int:
        """Return the fencing number; 0: there is no election."""

    def may_act(self) -> bool:
        """Return whether this process leads at this moment."""


class Elected:
    """The leadership of a process that nobody competes with: the same calls as an `Election`, without a Lease."""

    stopped = False

    def fence(self) -> int:
        """Return 0, which neither fences nor is fenced."""
        return 0

    def may_act(self) -> bool:
        """Return True."""
        return True

    def acquire(self) -> bool:
        """Return whether `stop` wasn't called before."""
        return not self.stopped

    def hold(self, lost: Callable[[], None]) -> None:
        """Do nothing: it can't be lost."""

    def stop(self) -> None:
        """Make `acquire` return False."""
        self.stopped = True

    def release(self) -> None:
        """Do nothing: nobody waits for it."""


def monotonic() -> float:
    """Return seconds that go on while the process is stopped and, on Linux, while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Election:
    """One candidate for one Lease. `acquire` blocks until it leads, then `hold` renews until `release` or a loss."""

    def __init__(
        self,
        configuration: client.Configuration,
        namespace: str,
        name: str,
        metrics: Metrics,
        *,
        identity: str = "",
        times: Times = Times(),  # noqa: B008  frozen
        clock: Callable[[], float] = monotonic,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._api = client.ApiClient(configuration)
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace, self._name = namespace, name
        self._metrics, self._times, self._clock = metrics, times, clock
        self.identity = identity or f"{platform.node()}_{uuid.uuid4().hex[:8]}"
        self._view: View | None = None
        self._lease: Object = {}
        self._renewed = float("-inf")  # clock before the last accepted write
        self._fence = 0
        self._refusal: Answer | None = None
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._beat = beat  # called whenever the loop goes round: for liveness

    def fence(self) -> int:
        """Return the fencing number of this leadership."""
        return self._fence

    def may_act(self) -> bool:
        """Return whether the last accepted renewal is younger than the deadline."""
        return self._clock() - self._renewed < self._times.deadline

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._ending.is_set()

    def stop(self) -> None:
        """Make `acquire` return False, or end `hold`."""
        self._ending.set()

    def acquire(self) -> bool:
        """Block until this process leads; return False if `stop` was called before. Raises `LeaseError` if the API server
        refuses us the Lease."""
        told = ""
        while not self._ending.is_set():
            self._check_refusal()
            if self._try():
                logger.info("leads as %s, fencing number %d", self.identity, self._fence)
                self._metrics.leader.set(1)
                self._metrics.fence.set(self._fence)
                return True
            holder = self._view.record.holder if self._view else ""
            if holder and holder != told:
                logger.info("%s leads; waits for its Lease", holder)
                told = holder
            self._ending.wait(self._times.retry)
        return False

    def hold(self, lost: Callable[[], None]) -> None:
        """Renew on a thread of its own; call `lost` once from there if the Lease is lost. What doesn't end then is ended."""
        self._thread = threading.Thread(target=self._keep, args=(lost,), name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Stop renewing and give the Lease back if it is still ours. Call it when nothing writes any more."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
        if self.may_act():
            self._put(release(self._lease, datetime.now(UTC)))
            self._renewed = float("-inf")
            self._metrics.leader.set(0)
            logger.info("gave the Lease back")
        self._api.close()  # type: ignore[no-untyped-call]

    def _try(self) -> bool:
        """Look at the Lease; take it if it is free. Return whether it is ours now."""
        self._beat()
        answer = self._send("GET", f"{self._collection}/{self._name}")
        if answer.status != 404 and not 0 < answer.status < 300:
            self._complain(answer)
            return False
        lease, now = answer.result("Lease"), self._clock()
        record = Record.of(lease)
        self._view = View(record, now) if self._view is None else self._view.updated(record, now)
        if not self._view.is_free(self.identity, self._times.duration, now):
            return False
        spec = claim(record, self.identity, self._times.duration, datetime.now(UTC))
        self._lease = lease or {"metadata": {"name": self._name, "namespace": self._namespace}}
        if not self._put(spec):
            return False
        self._fence = int(spec["leaseTransitions"])
        return True

    def _keep(self, lost: Callable[[], None]) -> None:
        while not self._ending.wait(self._times.retry):
            self._beat()
            if self._put(renewal(self._lease, datetime.now(UTC))):
                continue
            if not self.may_act() or not self._still_ours():
                break
        else:
            return
        self._renewed = float("-inf")
        self._metrics.leader.set(0)
        logger.error("lost the Lease %s/%s: ends", self._namespace, self._name)
        lost()
        if not self._ending.wait(_LAST_WORD):
            os._exit(3)  # whatever hangs must not outlive the leadership

    def _still_ours(self) -> bool:
        """Look again after a write that failed: True if the Lease is still ours, or can't be seen at the moment."""
        answer = self._send("GET", f"{self._collection}/{self._name}")
        if answer.status == 404:
            return False
        if answer.data is None or answer.status >= 300:
            return True
        record = Record.of(answer.data)
        if (record.holder, record.transitions) != (self.identity, self._fence):
            return False
        self._lease = answer.data  # somebody has annotated it, or our answer got lost
        return True

    def _put(self, spec: dict[str, Any]) -> bool:
        """Write the Lease in the version that we know; return whether that was accepted."""
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **self._lease, "spec": spec}
        before = self._clock()
        if "resourceVersion" in body["metadata"]:
            answer = self._send("PUT", f"{self._collection}/{self._name}", body)
        else:
            answer = self._send("POST", self._collection, body)
        if answer.data is None or not 0 < answer.status < 300:
            if answer.status != 409:
                self._complain(answer)
            return False
        self._lease, self._renewed = answer.data, before
        return True

    def _send(self, verb: str, path: str, body: Any = None) -> Answer:
        answer = send(self._api, verb, path, body, timeout=_CALL_TIMEOUT)
        self._metrics.api_calls.labels(verb, "Lease", str(answer.status)).inc()
        return answer

    def _complain(self, answer: Answer) -> None:
        logger.warning("the Lease %s/%s: HTTP %d: %s", self._namespace, self._name, answer.status, answer.message[:200])
        self._refusal = answer if answer.status in _FINAL else None

    def _check_refusal(self) -> None:
        """Raise `LeaseError` for what trying again can't mend."""
        if self._refusal is not None:
            remedy = "grant the operator get, create and update of Leases in its own namespace"
            what = f"the Lease {self._namespace}/{self._name} is refused to us"
            raise LeaseError(f"{what}: {self._refusal.message[:200]}: {remedy}")
