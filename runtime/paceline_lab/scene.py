"""Plays a scenario and says who was in which slot when, who waited, and for whom."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

from paceline_core.causes import Story, largest
from paceline_core.plan import ScheduledSequence, StepPlan
from paceline_core.request import Ended
from paceline_lab.scenario import Scenario
from paceline_sim import Result, Slo, simulate, summarise

__all__ = ["scene_of"]

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ROUNDING = 1e-9  # steps
_CULPRITS = 3  # per request: a sentence names no more


def scene_of(scenario: Scenario) -> dict[str, Any]:
    """Return the scene of a scenario, ready for JSON: steps, stays in slots, requests and figures; times are steps.

    Raises `RequestRefused` if one of its requests can never run.
    """
    stage = _Stage(scenario)
    result = simulate(
        scenario.trace,
        scenario.knobs,
        scenario.model,
        num_blocks=scenario.num_blocks,
        max_model_len=scenario.longest,
        skip_ahead=False,
        observer=stage,
    )
    return {
        "strategy": scenario.strategy,
        "slots": scenario.slots,
        "duration": result.duration,
        "kvBlocks": result.kv_blocks,
        "figures": _figures(result) | {"longestPause": stage.longest_pause},
        "steps": stage.steps,
        "stays": [stay.document() for stay in stage.stays],
        "requests": [stage.requests[index] for index in sorted(stage.requests)],
    }


def name_of(index: int) -> str:
    """Return a request's letter: A to Z, then A1, B1 …"""
    round_, letter = divmod(index, len(_LETTERS))
    return _LETTERS[letter] + (str(round_) if round_ else "")


@dataclass(slots=True)
class _Stay:
    """A request's time in a slot, as far as it did one thing: `prefill`, `decode`, `recompute`, `idle` or `held`."""

    slot: int
    request: int
    kind: str
    start: float
    end: float

    def document(self) -> list[object]:
        return [self.slot, self.request, self.kind, self.start, self.end]


@dataclass(slots=True)
class _Stage:
    """Observes a replay: gives each running request the lowest free slot and notes what it does there."""

    scenario: Scenario
    steps: list[list[float]] = field(default_factory=list)  # end, seconds, decode tokens, prefill tokens, KV blocks
    stays: list[_Stay] = field(default_factory=list)
    requests: dict[int, dict[str, Any]] = field(default_factory=dict)
    longest_pause: float = 0.0  # between two tokens of one request
    _free: list[int] = field(default_factory=list)
    _slots: dict[int, int] = field(default_factory=dict)  # of who runs
    _latest: dict[int, _Stay] = field(default_factory=dict)  # of who runs
    _made: dict[int, int] = field(default_factory=dict)  # tokens so far
    _last: dict[int, float] = field(default_factory=dict)  # when the newest token came
    _waits: dict[int, list[list[float]]] = field(default_factory=dict)  # [from, until] after a preemption
    _released: dict[int, tuple[int, float]] = field(default_factory=dict)  # slot → who left it last, and when
    _after: dict[int, int] = field(default_factory=dict)  # request → whose slot it took at once

    def __post_init__(self) -> None:
        self._free = list(range(self.scenario.slots))

    def planned(self, plan: StepPlan, now: float) -> None:
        for seq_id in plan.preempted:
            self._leave(seq_id, now)
            self._waits.setdefault(seq_id, []).append([now, now])
        for entry in plan.scheduled:
            if entry.seq_id not in self._slots:
                self._enter(entry.seq_id, now)

    def completed(self, plan: StepPlan, end: float, duration: float, kv_blocks: int) -> None:
        shape = plan.shape
        self.steps.append([end, duration, shape.decode_tokens, shape.prefill_tokens, kv_blocks])
        for entry in plan.scheduled:
            self._stay(entry.seq_id, self._kind(entry), end - duration, end)
            if entry.samples:
                self._made[entry.seq_id] = self._made.get(entry.seq_id, 0) + 1
                self.longest_pause = max(self.longest_pause, end - self._last.get(entry.seq_id, end))
                self._last[entry.seq_id] = end

    def ended(self, ended: Ended, story: Story) -> None:
        index = ended.request.seq_id
        if ended.last_token is not None and ended.released > ended.last_token:
            self._stay(index, "held", ended.last_token, ended.released)
        if index in self._slots:
            self._leave(index, ended.released)
        self.requests[index] = {
            "name": name_of(index),
            "arrival": ended.request.arrival,
            "prompt": ended.request.prompt_len,
            "output": ended.output_len,
            "started": ended.first_scheduled,
            "firstToken": ended.first_token,
            "lastToken": ended.last_token,
            "released": ended.released,
            "preemptions": ended.preemptions,
            "waits": self._waits.get(index, []),
            "parts": {cause: steps for cause, steps in story.parts.by_cause().items() if steps > 0},
            "delayedBy": _names(story.delayed_by),
            "preemptedBy": _names(story.preempted_by),
            "slotOf": name_of(self._after[index]) if index in self._after else None,
        }

    def _enter(self, seq_id: int, now: float) -> None:
        slot = self._slots[seq_id] = heapq.heappop(self._free)
        before = self._released.get(slot)
        if before is not None and before[1] == now and now > seq_id * self.scenario.every:
            self._after[seq_id] = before[0]
        if waits := self._waits.get(seq_id):
            waits[-1][1] = now

    def _leave(self, seq_id: int, now: float) -> None:
        slot = self._slots.pop(seq_id)
        self._latest.pop(seq_id, None)
        self._released[slot] = (seq_id, now)
        heapq.heappush(self._free, slot)

    def _kind(self, entry: ScheduledSequence) -> str:
        prompt = self.scenario.prompt_lens[entry.seq_id]
        made = self._made.get(entry.seq_id, 0)
        if made and entry.start < prompt + made - 1:
            return "recompute"
        return "prefill" if not made and prompt > 1 else "decode"

    def _stay(self, seq_id: int, kind: str, start: float, end: float) -> None:
        latest = self._latest.get(seq_id)
        if latest is not None and start - latest.end > _ROUNDING:
            latest = self._add(seq_id, "idle", latest.end, start)
        if latest is not None and latest.kind == kind:
            latest.end = end
        else:
            self._add(seq_id, kind, start, end)

    def _add(self, seq_id: int, kind: str, start: float, end: float) -> _Stay:
        stay = self._latest[seq_id] = _Stay(self._slots[seq_id], seq_id, kind, start, end)
        self.stays.append(stay)
        return stay


def _names(blamed: dict[int, float]) -> dict[str, float]:
    return {name_of(index): steps for index, steps in largest(blamed, _CULPRITS).items() if index >= 0}


def _figures(result: Result) -> dict[str, float]:
    summary = summarise(result, Slo())
    return {
        "steps": result.steps,
        "duration": result.duration,
        "slotUtilisation": result.slot_utilisation,
        "meanLatency": summary.e2e.mean,
        "p95Latency": summary.e2e.p95,
        "meanTtft": summary.ttft.mean,
        "p95Ttft": summary.ttft.p95,
        "tokensPerStep": summary.token_rate,
        "preemptions": result.preemptions,
        "kvPeak": result.kv_peak,
    }
