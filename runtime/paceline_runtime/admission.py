"""Who may come in: bounds on the queue by count and by predicted wait, and early words for work that can't be in time.

What is turned away is counted and kept in the records, because whoever tunes a server must see also whom it didn't serve.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline_runtime.api_errors import ApiError, unavailable
from paceline_runtime.call_options import CallOptions
from paceline_runtime.drain import Drain, DrainPhase
from paceline_runtime.engine_client import EngineClient, EngineState
from paceline_runtime.forecast import EngineView, retry_after
from paceline_runtime.knob_store import KnobStore
from paceline_runtime.recorder import Recorder
from paceline_runtime.settings import RuntimeSettings

__all__ = ["Admission"]

# Requests that all came at once also end at once, so a short queue may wait half or twice as long as is forecast; a deadline
# is called hopeless only beyond that.
_DOUBT = 0.5
# Seconds that the API process may be behind the engine. Where it has too little of a CPU, an unbounded lag would grow until
# every client has given up; what is here already catches up once nothing new comes.
MAX_LAG = 5.0


@dataclass(slots=True)
class Admission:
    """Checks a request against the state of the server. `low_memory` is set while memory is nearly full."""

    settings: RuntimeSettings
    knobs: KnobStore
    client: EngineClient
    drain: Drain
    recorder: Recorder
    low_memory: bool = False

    def set_low_memory(self, low: bool) -> None:
        """Turn new work away, or take it again."""
        self.low_memory = low

    def check(self, options: CallOptions) -> float:
        """Return the seconds that the request will wait for a slot. Raises `ApiError` (429, 503) if it may not come in."""
        if self.drain.phase is DrainPhase.CLOSED:
            raise unavailable("the server is shutting down", "shutting_down")
        if self.client.state is not EngineState.READY:
            raise unavailable(f"not ready: engine {self.client.state}", "not_ready", "2")
        if self.low_memory:
            raise unavailable("the server's memory is nearly full: come back later", "low_memory", "5")
        if self.client.lag > MAX_LAG:
            raise _busy("the server is behind with sending what was generated", "overloaded", self.client.lag)
        wait = self.predicted_wait(options.priority)
        self._check_queue(wait)
        if options.timeout is not None and wait * _DOUBT > options.timeout:
            text = f"the first token would take about {wait:.3g} s, X-Request-Timeout is {options.timeout:.3g} s"
            raise _busy(text, "deadline_unreachable", wait - options.timeout)
        return wait

    def predicted_wait(self, priority: int = 0) -> float:
        """Return the seconds that a newcomer would wait for a slot."""
        client, knobs = self.client, self.knobs.target
        if client.ready is None or (len(client.live) < knobs.max_num_seqs and not client.gauges.waiting):
            return 0.0
        view = EngineView(knobs, client.ready.num_blocks, client.gauges, client.step_model, client.live.values())
        return self.recorder.forecast.predict(view, priority)

    def turned_away(self, error: ApiError, options: CallOptions | None, prompt_tokens: int = 0) -> None:
        """Count and keep a request that was refused with `error`."""
        if options is None:
            self.recorder.count_turned_away(error.code)
            return
        self.recorder.turned_away(
            options.request_id, options.arrival, error.code, prompt_tokens=prompt_tokens, tenant=options.tenant
        )

    def _check_queue(self, wait: float) -> None:
        waiting = len(self.client.live) - self.knobs.target.max_num_seqs
        if waiting >= self.settings.max_queue_len:
            raise _busy(f"{waiting} requests wait already: come back later", "queue_full", wait)
        if wait > self.settings.max_queue_wait:
            text = f"a request would wait about {wait:.3g} s for a slot, and {self.settings.max_queue_wait:g} s is the most"
            raise _busy(text, "queue_wait", wait - self.settings.max_queue_wait)


def _busy(message: str, code: str, seconds: float) -> ApiError:
    return ApiError(429, message, code=code, headers={"Retry-After": retry_after(seconds)})
