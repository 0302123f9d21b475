"""What one pod has told so far, kept within bounds, and how far it can be believed. Time is an argument.

A pod may lie (NaN, negative counts, a clock that is off, counters that fall) or hang; it never spoils what others told.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field, fields, replace
from enum import StrEnum
from itertools import pairwise
from statistics import median

from paceline_core.errors import FormatError
from paceline_core.plan import StepShape
from paceline_core.step_time import StepModel
from paceline_core.wire import Gauges, ObserveDocument, RequestRecord, StepRecord
from paceline_sim.calibrated import StepClass, class_of

__all__ = ["MOST_OUTPUT", "MOST_PROMPT", "Health", "PodLedger"]

# Of one request, in tokens; more is a mistake in the record. The longest context of any model has ten million. The longest
# answers that models are made for have 128 k: twice as much takes three quarters of an hour at a hundred tokens per second,
# longer than decisions look back, and a tenth of a second of a replay for every five thousand
MOST_PROMPT, MOST_OUTPUT = 10_000_000, 1 << 18
_MOST_NOW = 1 << 31  # requests or KV blocks that a pod has at a time: of so many blocks one of 16 tokens fills any memory
_MOST_EVER = 1 << 53  # of anything that is counted, and of a step's work: floats are exact up to here
_LAST_CLOCK = 1e11  # Unix seconds: the year 5138
_PER_CLASS = 12  # newest steps of each size: rare sizes aren't forgotten
_EARLY = 5.0  # seconds: a request can't have come later than this from now
_BAD_SHARE = 0.2  # of a document's records: more, and nothing else in it is believed
_HANGS_AFTER = 30.0  # seconds without any progress while requests run
_HASH_STRIDE = 4  # every fourth prefix hash is kept: a chained hash stands for all before it
_MOST_HASHES = 128
_SKEW = 2.0  # seconds of difference between clocks that are worth a word
_MOST_WORDS = 160  # characters of a complaint, which may cite what a pod says: it is written into a status
_NOW = ("running", "waiting", "kv_blocks_total", "kv_blocks_used", "kv_blocks_cached")
_WRONG = ("model_not_found", "invalid", "too_long")  # reasons of a refusal that are the request's: no knobs serve it


class Health(StrEnum):
    """Whether a pod's word counts."""

    FRESH = "Fresh"
    SILENT = "Silent"  # no answer, or not asked yet
    STALE = "Stale"  # it answers, but nothing in it moves
    LYING = "Lying"  # figures that can't be
    OLD = "Old"  # another version of the contract: its gauges at most


@dataclass(slots=True)
class PodLedger:
    """One pod's last records (times on our clock), steps, model and gauges. `most` bounds the records."""

    name: str
    most: int = 1500
    health: Health = Health.SILENT
    why: str = "not asked yet"
    instance: str = ""
    cursor: int = 0
    epoch: int = 0
    skew: float = 0.0
    seen_at: float = -math.inf
    gauges: Gauges = field(default_factory=Gauges)
    model: StepModel | None = None
    preempted: int = 0  # since the last answer
    dropped: int = 0  # records that couldn't be
    _classes: dict[StepClass, deque[tuple[StepShape, float]]] = field(default_factory=dict)
    _records: dict[str, RequestRecord] = field(default_factory=dict)
    _pod_now: float = -math.inf
    _moved_at: float = -math.inf

    @property
    def records(self) -> Iterable[RequestRecord]:
        """The requests that it told of, newest state each, in the order in which they were first told."""
        return self._records.values()

    @property
    def fresh(self) -> bool:
        """Whether its word counts now."""
        return self.health is Health.FRESH

    def fail(self, health: Health, why: str) -> None:
        """Note that it gave no answer that can be used; what it told before is kept."""
        self.health, self.why = health, why[:_MOST_WORDS]

    def gauges_only(self, gauges: Gauges, now: float, why: str) -> None:
        """Take the gauges of a pod whose records can't be read."""
        self.fail(Health.OLD, why)
        self.gauges, self.seen_at = gauges, now

    def absorb(self, document: ObserveDocument, now: float) -> None:
        """Take one answer, that came at `now`, as far as it can be true."""
        if complaint := _impossible(document):
            self.fail(Health.LYING, complaint)
            return
        if document.instance != self.instance:
            self._restart(document.instance)
        elif complaint := self._fell(document):
            self._restart(document.instance)
            self.fail(Health.LYING, complaint)
            return
        skew, stands = document.now - now, document.now <= self._pod_now and now > self.seen_at + 1.0
        moved = document.cursor != self.cursor or document.gauges != self.gauges or not document.gauges.running
        self._moved_at = now if moved else self._moved_at
        self.preempted = max(0, document.gauges.preemptions - self.gauges.preemptions)
        bad = self._take(document, skew, now)
        self._keep_model(document)
        self.epoch, self.cursor, self.gauges = document.epoch, document.cursor, document.gauges
        self.skew, self.seen_at, self._pod_now = skew, now, document.now
        self.health, self.why = self._judge(document, bad, stands, now)

    def _judge(self, document: ObserveDocument, bad: int, stands: bool, now: float) -> tuple[Health, str]:
        if stands:
            return Health.STALE, "its clock stands still: the statistics are frozen"
        if now - self._moved_at > _HANGS_AFTER:
            return Health.STALE, f"requests run, but nothing has moved for {now - self._moved_at:.0f} s"
        if bad >= 3 and bad > _BAD_SHARE * len(document.requests):
            return Health.LYING, f"{bad} of {len(document.requests)} records can't be"
        return Health.FRESH, f"its clock is off by {self.skew:+.1f} s, corrected" if abs(self.skew) > _SKEW else ""

    def _restart(self, instance: str) -> None:
        """Forget what an engine that is gone was doing; what it finished is still traffic."""
        self.instance, self.cursor, self.gauges, self.model = instance, 0, Gauges(), None
        self._classes.clear()
        self._pod_now = self._moved_at = -math.inf
        self._records = {key: r for key, r in self._records.items() if r.outcome != "unfinished"}

    def _fell(self, document: ObserveDocument) -> str:
        old, new = self.gauges, document.gauges
        for name in ("output_tokens", "prompt_tokens", "slot_steps"):
            if getattr(new, name) < getattr(old, name):
                fell = f"from {getattr(old, name)} to {getattr(new, name)}"
                return f"its counter {name} fell {fell} although the engine is the same"
        return "its cursor went backwards" if document.cursor < self.cursor else ""

    def _take(self, document: ObserveDocument, skew: float, now: float) -> int:
        """Keep what can be of the document's records; return how many couldn't."""
        bad = 0
        # whoever was unfinished at the last look and is gone from this one has ended and is told as such
        self._records = {key: r for key, r in self._records.items() if r.outcome != "unfinished"}
        for record in document.requests:
            kept = _shifted(record, skew)
            if not _believable(kept, now):
                bad += 1
            elif kept.outcome != "refused" or kept.reason not in _WRONG:
                self._records[record.request_id] = kept
        self.dropped += bad
        for key in list(self._records)[: max(0, len(self._records) - self.most)]:
            del self._records[key]
        for step in document.steps:
            self._keep_step(step)
        return bad

    def _keep_step(self, step: StepRecord) -> None:
        shape = StepShape(step.decode_tokens, step.prefill_tokens, step.context_tokens, step.prefill_attention)
        if 0 < step.duration < math.inf and all(0 <= size <= _MOST_EVER for size in astuple(shape)):
            self._classes.setdefault(class_of(shape), deque(maxlen=_PER_CLASS)).append((shape, step.duration))

    def _keep_model(self, document: ObserveDocument) -> None:
        if document.step_model is None:
            return
        try:
            self.model = StepModel.from_document(document.step_model)
        except FormatError:
            self.model = None

    def step_ratios(self) -> Iterator[float]:
        """Yield measured over predicted seconds of each size of steps, the median of its last: 1 where the model is right.

        Sizes count alike, however often they come: a model that isn't this device's is off in all of them, while one that
        is linear is off where caches end, and a queue may bring nothing but such steps for a while.
        """
        model = self.model
        for steps in self._classes.values() if model is not None else ():
            ratios = [seconds / predicted for shape, seconds in steps if model and (predicted := model.predict(shape)) > 0]
            if ratios:
                yield median(ratios)

    def measured_steps(self) -> Iterator[tuple[StepShape, float]]:
        """Yield the steps that are kept of every size."""
        for steps in self._classes.values():
            yield from steps


def _impossible(document: ObserveDocument) -> str:
    """Return what in a document can't be, apart from single records."""
    if not 0 <= document.now <= _LAST_CLOCK:
        return f"its clock says {document.now}"
    if not (0 <= document.cursor <= _MOST_EVER and 0 <= document.epoch <= _MOST_EVER):
        return "its cursor or epoch is no count"
    if complaint := _wrong_gauge(document.gauges):
        return complaint
    model = document.step_model
    if model is not None and not 0 <= model.steps <= _MOST_EVER:
        return "its step-time model has seen no such number of steps"
    if model is not None and not all(math.isfinite(x) for x in (model.constant, model.residual, *_ends(model.seen))):
        return "its step-time model has a figure that is not a number"
    return ""


def _wrong_gauge(gauges: Gauges) -> str:
    for spec in fields(gauges):
        count, most = getattr(gauges, spec.name), _MOST_NOW if spec.name in _NOW else _MOST_EVER
        if not 0 <= count <= most:
            return f"its gauge {spec.name} is {'negative' if count < 0 else 'more than a pod can have'}"
    return ""


def _ends(seen: object) -> Iterator[float]:
    for low, high in getattr(seen, "values", dict)():
        yield from (low, high)


def _believable(record: RequestRecord, now: float) -> bool:
    times = [record.arrival, record.first_token, record.end]
    known = [time for time in times if time is not None]
    if not all(map(math.isfinite, known)) or record.arrival > now + _EARLY:
        return False
    fewest = 0 if record.outcome == "refused" else 1  # nobody counts the tokens of what is refused at once
    sizes_fit = fewest <= record.prompt_tokens <= MOST_PROMPT and 0 <= record.output_tokens <= MOST_OUTPUT
    return sizes_fit and all(a <= b + 1e-3 for a, b in pairwise(known))


def _shifted(record: RequestRecord, skew: float) -> RequestRecord:
    """Return a record on our clock, with fewer hashes."""
    hashes = record.prefix_hashes[_HASH_STRIDE - 1 :: _HASH_STRIDE][:_MOST_HASHES]
    first, end = (None if time is None else time - skew for time in (record.first_token, record.end))
    return replace(record, arrival=record.arrival - skew, first_token=first, end=end, prefix_hashes=hashes)
