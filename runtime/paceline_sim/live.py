"""A pod in virtual time: the production scheduler on a modelled device that can be stopped, changed and observed like a pod.

`simulate` replays a whole trace; here time is in the caller's hands, so that whoever tunes pods can be run against days of
traffic in minutes. What it tells is what a pod tells on `/admin/observe`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass

from paceline_core.errors import RequestRefused
from paceline_core.knobs import Knobs
from paceline_core.plan import StepShape
from paceline_core.request import Ended, FinishReason
from paceline_core.scheduler import Scheduler
from paceline_core.step_time import StepModel, StepPredictor, StepTimeFitter
from paceline_core.stride import Stride
from paceline_core.wire import ObserveDocument, RequestRecord, StepRecord
from paceline_sim.clock import VirtualRunner
from paceline_sim.trace import TraceRequest

__all__ = ["VirtualPod"]

_KEPT = 8192  # records and steps, as a real pod keeps them
_REFIT = 256  # steps seen between two fits: a fit costs milliseconds, which virtual time doesn't cover
# batches and prompt lengths of the profile that a pod runs at start; the model has seen these before the first request
_PROFILE = ((1, 8), (1, 96), (2, 64), (4, 64), (8, 32), (16, 32), (32, 32), (64, 16))


@dataclass(slots=True)
class _Progress:
    request: TraceRequest
    epoch: int
    first_token: float | None = None
    output: int = 0


class VirtualPod:
    """One pod on `device`. Times are absolute seconds; `knobs` may change at any moment, as with a PATCH.

    `frozen` pretends that the statistics hang: the same answer for ever. `scale` is what the published step-time model is
    multiplied with: 1 is honest.
    """

    def __init__(
        self,
        knobs: Knobs,
        device: StepPredictor,
        *,
        num_blocks: int,
        max_model_len: int,
        now: float = 0.0,
        name: str = "pod",
    ) -> None:
        self.now, self.name, self.scale, self.frozen = now, name, 1.0, False
        self._device, self._runner = device, VirtualRunner(device)
        self._scheduler = Scheduler(knobs, num_blocks=num_blocks, max_model_len=max_model_len, step_model=device)
        self._arrivals: list[tuple[float, int, TraceRequest]] = []
        self._ids = itertools.count(1)
        self._live: dict[int, _Progress] = {}
        self._records: deque[tuple[int, RequestRecord]] = deque(maxlen=_KEPT)
        self._steps: deque[StepRecord] = deque(maxlen=_KEPT)
        self._cursor = 0
        self._fitter = StepTimeFitter()
        self._fitted: tuple[int, StepModel] | None = None
        self._frozen: ObserveDocument | None = None
        self._runner.busy_until = now
        self._profile()

    @property
    def knobs(self) -> Knobs:
        """The knobs in force, or about to be at the next step."""
        return self._scheduler.knobs

    def set_knobs(self, knobs: Knobs) -> None:
        """Change the knobs from the next step on."""
        self._scheduler.set_knobs(knobs)

    def send(self, request: TraceRequest) -> None:
        """Let a request arrive at its (absolute) arrival time, which isn't past."""
        heapq.heappush(self._arrivals, (request.arrival, next(self._ids), request))

    def run(self, until: float) -> None:
        """Go on until `until`; a step or stride that is under way then is finished."""
        while self.now < until:
            self._arrive()
            if (stride := self._scheduler.find_stride(self.now)) is not None and self._skip(stride, until):
                continue
            while (plan := self._scheduler.schedule(self.now)) is not None:
                self._runner.submit(plan, self.now)
            self.now = min(self._next_time(), until)
            if self.now == self._runner.next_end:
                self._complete()
            for ended in self._scheduler.take_ended():
                self._end(ended)

    def observe(self, since: int = 0) -> ObserveDocument:
        """Return what a pod answers on `/admin/observe?since=…`."""
        if self.frozen and self._frozen is not None:
            return self._frozen
        finished = tuple(record for number, record in self._records if number > since)
        unfinished = tuple(self._record(seq_id, live, None) for seq_id, live in self._live.items())
        steps, self._steps = tuple(self._steps), deque(maxlen=_KEPT)
        self._frozen = ObserveDocument(
            instance=self.name,
            cursor=self._cursor,
            now=self.now,
            epoch=self._scheduler.epoch,
            revision=self._scheduler.epoch + 1,
            gauges=self._scheduler.gauges(),
            requests=finished + unfinished,
            steps=steps,
            step_model=self._model().to_document(),
        )
        return self._frozen

    def take_records(self) -> list[RequestRecord]:
        """Return the ended requests that are kept, for whoever measures from outside, and forget them."""
        records = [record for _, record in self._records]
        self._records.clear()
        return records

    def unfinished(self) -> list[RequestRecord]:
        """Return the requests that are still here."""
        return [self._record(seq_id, live, None) for seq_id, live in self._live.items()]

    def _model(self) -> StepModel:
        if self._fitted is None or self._fitter.steps - self._fitted[0] >= _REFIT:
            self._fitted = (self._fitter.steps, self._fitter.model())
        model = self._fitted[1]
        if self.scale == 1.0:
            return model
        slopes = {name: self.scale * getattr(model, name) for name in ("constant", *model.seen)}
        return StepModel(**slopes, residual=model.residual, steps=model.steps, seen=model.seen)

    def _profile(self) -> None:
        for sequences, length in _PROFILE:
            prefill = StepShape(0, sequences * length, 0, sequences * length * length)
            for shape in (prefill, StepShape(sequences, 0, sequences * length, 0)):
                self._fitter.observe(shape, self._device.predict(shape))

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now:
            _, seq_id, request = heapq.heappop(self._arrivals)
            self._live[seq_id] = live = _Progress(request, self._scheduler.epoch)
            try:
                self._scheduler.add(request.to_request(seq_id, self._scheduler.knobs.block_size), self.now)
            except RequestRefused:
                del self._live[seq_id]
                self._keep(self._record(seq_id, live, None, outcome="refused"))

    def _next_time(self) -> float:
        times = [self._runner.next_end, self._scheduler.next_event(self.now)]
        times += [self._arrivals[0][0]] if self._arrivals else []
        return min((time for time in times if time is not None), default=float("inf"))

    def _complete(self) -> None:
        plan, result = self._runner.collect()
        for seq_id, tokens in self._scheduler.complete(plan, result, self.now).items():
            live = self._live.get(seq_id)
            if live is not None:
                live.output += len(tokens)
                live.first_token = self.now if live.first_token is None else live.first_token
        if plan.scheduled:
            self._measured(plan.shape, result.duration)

    def _skip(self, stride: Stride, until: float) -> bool:
        """Take the steps of `stride` that fit before the next arrival and `until`; return whether any did."""
        width, period = len(stride.sequences), len(stride.growth)
        until = min(until, self._arrivals[0][0] if self._arrivals else until)
        context, left, taken, duration = stride.context, stride.available, 0, 0.0
        while taken < stride.most and self.now < until and stride.growth[taken % period] <= left:
            left -= stride.growth[taken % period]
            duration = self._device.predict_decode(width, context)
            self.now += duration
            context += width
            taken += 1
        if not taken:
            return False
        self._runner.skip(self._scheduler.skip(stride, taken, self.now), self.now, duration)
        for seq in stride.sequences:
            self._live[seq.request.seq_id].output += taken
        self._measured(StepShape(width, 0, context - width, 0), duration)
        return True

    def _measured(self, shape: StepShape, duration: float) -> None:
        """Keep a step: of a stride the last stands for all."""
        self._fitter.observe(shape, duration)
        scheduler = self._scheduler
        sizes = (shape.decode_tokens, shape.prefill_tokens, shape.context_tokens, shape.prefill_attention)
        step = StepRecord(self.now, duration, scheduler.epoch, *sizes, scheduler.num_running, scheduler.num_waiting)
        self._steps.append(step)

    def _end(self, ended: Ended) -> None:
        live = self._live.pop(ended.request.seq_id)
        self._keep(self._record(ended.request.seq_id, live, ended))

    def _keep(self, record: RequestRecord) -> None:
        self._cursor += 1
        self._records.append((self._cursor, record))

    def _record(self, seq_id: int, live: _Progress, ended: Ended | None, outcome: str = "unfinished") -> RequestRecord:
        if ended is not None:
            outcome = "finished" if ended.reason in (FinishReason.STOP, FinishReason.LENGTH) else "refused"
        end = None if ended is None else ended.last_token if ended.last_token is not None else ended.released
        return RequestRecord(
            request_id=f"{self.name}-{seq_id}",
            arrival=live.request.arrival,
            prompt_tokens=live.request.prompt_len,
            output_tokens=ended.output_len if ended is not None else live.output,
            outcome=outcome,
            epoch=live.epoch,
            end_epoch=self._scheduler.epoch,
            first_scheduled=ended.first_scheduled if ended is not None else None,
            first_token=ended.first_token if ended is not None else live.first_token,
            end=end,
            preemptions=ended.preemptions if ended is not None else 0,
            max_tokens=live.request.output_len,
            prefix_hashes=live.request.prefix_hashes,
        )
