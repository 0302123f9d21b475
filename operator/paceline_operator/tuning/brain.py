"""One service's tuner without its effects: what its pods told, where it stands, what to ask. Time is an argument."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from paceline_core.wire import RequestRecord
from paceline_operator.tuning.decide import Decision
from paceline_operator.tuning.facts import Ask, Facts, PodFact, Situation, Tell
from paceline_operator.tuning.guard import Evidence, Score, Sides, batch_seconds, margins, weigh
from paceline_operator.tuning.ledger import PodLedger
from paceline_operator.tuning.luck import Luck
from paceline_operator.tuning.machine import advance
from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.question import Question
from paceline_operator.tuning.sampling import samples_of, traffic_of
from paceline_operator.tuning.service_rate import Lately, ServiceRates, tokens_per_batch
from paceline_operator.tuning.state import Phase, State, Trial
from paceline_operator.tuning.stretch import LATELY, Stretch, stretch_of
from paceline_operator.tuning.traffic import load_ahead
from paceline_operator.tuning.view import ServiceView, merge
from paceline_sim.calibrated import CalibratedModel, calibrate

__all__ = ["Brain", "Situation"]

_WINDOWS = (4, 8, 16, 32)  # intervals; the first that holds enough requests is judged
_ENOUGH = 60  # requests
_LONGEST = 32  # intervals that a stretch of traffic is looked back
_KEPT = 4000  # records of all pods of a service together
_LEAST_KEPT, _MOST_KEPT = 60, 1500  # records of a pod, however many pods there are
_CONTROLS = 6  # pods on each side of a trial of which all is kept
_BACKLOG = 2  # intervals that a pod that is compared with its own past may take to work off what had queued
_GUARD = 1.5  # where no objective is stated: times of now, this many times over, are what must be kept


@dataclass(slots=True)
class Brain:
    """Ledgers, state, and the last view and decision of one service."""

    state: State = field(default_factory=State)
    ledgers: dict[str, PodLedger] = field(default_factory=dict)
    view: ServiceView | None = None
    stretch: Stretch | None = None
    decision: Decision | None = None
    searching: bool = False
    lately: Lately = field(default_factory=Lately)
    _guard: Objective | None = None

    def ledger(self, name: str) -> PodLedger:
        """Return a pod's ledger, a new one for a new pod."""
        return self.ledgers.setdefault(name, PodLedger(name))

    def keep_only(self, names: Iterable[str]) -> None:
        """Forget pods that are gone; share the room among those that are there."""
        known = set(names)
        self.ledgers = {name: ledger for name, ledger in self.ledgers.items() if name in known}
        compared = self._compared()
        for name, ledger in self.ledgers.items():
            share = _MOST_KEPT if name in compared else _KEPT // len(self.ledgers)
            ledger.most = max(_LEAST_KEPT, min(_MOST_KEPT, share))

    def _compared(self) -> set[str]:
        """Return the pods of a trial, and some others: the guard needs all that came to them since it began."""
        trial = self.state.trial
        if trial is None or not trial.pods:
            return set()
        others = sorted(self.ledgers.keys() - set(trial.pods))
        return {*trial.pods[:_CONTROLS], *others[:_CONTROLS]}

    def look(self, situation: Situation, now: float, answer: Decision | None = None) -> tuple[Tell | Ask, ...]:
        """Take the situation in, move on, return what to do. `answer` is the twin's, if one has come."""
        objective = self.objective(situation)
        self.view = merge(self.ledgers.values(), objective, now, self._window(situation.interval, now))
        self.stretch = self._stretch(objective, situation.interval, now)
        self.lately = self._lately(objective, situation.interval, now)
        if answer is not None:
            self.searching = False
            self.decision = answer if self.state.phase is not Phase.VERIFYING else self.decision
        facts = Facts(
            mode=situation.mode,
            spec_hash=situation.spec_hash,
            knobs=situation.knobs,
            pods=tuple(self._judged(pod) for pod in situation.pods),
            view=self.view,
            interval=situation.interval,
            percentile=situation.percentile if objective.stated else 90.0,
            busy=situation.busy,
            dropped=situation.dropped,
            searching=self.searching,
            decision=answer,
            evidence=self._evidence(self.state.trial, situation, objective, now),
            after=self._after(objective, now),
            rate_after=self._rate(self.state.since, now),
            lately=self.lately,
            score=self._score(objective, now),
            stretch=self.stretch,
        )
        self.state, effects = advance(self.state, facts, now)
        if self.state.trial is None:
            self._guard = None
        elif not objective.stated and self._guard is None:
            self._guard = objective  # a guard that moved with what it guards would guard nothing
        self.searching = self.searching or any(isinstance(effect, Ask) for effect in effects)
        return effects

    def objective(self, situation: Situation) -> Objective:
        """Return the stated objective, or a guard made from the latencies of now."""
        if situation.ttft is not None or situation.tpot is not None:
            return Objective(situation.ttft, situation.tpot, situation.percentile)
        if self._guard is not None:
            return self._guard
        view = self.view
        ttft, tpot = (view.ttft_p95, view.tpot_p95) if view is not None else (0.0, 0.0)
        return Objective(_GUARD * ttft or None, _GUARD * tpot or None, 95.0, stated=False)

    def question(self, situation: Situation, ask: Ask, now: float) -> Question | None:
        """Return the question that `ask` is about; None while no pod has told enough to put it."""
        trying = set(self.state.trial.pods) if self.state.trial is not None else set()
        applied = {pod.name for pod in situation.pods if pod.applied} - trying
        pods = [p for p in self.ledgers.values() if p.fresh and p.model is not None and p.name in applied]
        if not pods or self.view is None or self.stretch is None:
            return None
        objective = self.objective(situation)
        changed = self.state.since if ask.only is not None else 0.0
        draining = self.lately.starved and ask.only is None
        load = 1.0 if ask.only is not None else load_ahead(self.stretch)
        since, block_size = max(now - self.view.window, self.stretch.began, changed), int(situation.knobs["blockSize"])
        return Question(
            at=now,
            service=situation.service,
            knobs=situation.knobs,
            bounds=situation.bounds,
            objective=replace(objective, draining=draining),
            model=_model_of(pods),
            num_blocks=_blocks_of(pods),
            samples=samples_of(
                pods, objective, since=since, now=now, epochs={p.name: p.epoch for p in pods},
                block_size=block_size,
            ),
            traffic=traffic_of(
                pods, since=max(self.stretch.began, changed), lately=now - LATELY * situation.interval, block_size=block_size
            ),
            load=load,
            pods=len(situation.pods),
            step_error=self.view.step_error,
            only=ask.only,
            blocked=(*(b.changes for b in self.state.blocked if b.until > now), *self.state.left),
            doubt=self.state.doubt,
        )  # fmt: skip

    def _judged(self, pod: PodFact) -> PodFact:
        ledger = self.ledgers.get(pod.name)
        fresh = pod.fresh and ledger is not None and ledger.fresh
        return PodFact(pod.name, pod.process, fresh, pod.applied, pod.refused)

    def _window(self, interval: float, now: float) -> float:
        arrivals = [r.arrival for pod in self.ledgers.values() if pod.fresh for r in pod.records]
        for count in _WINDOWS:
            if sum(arrival >= now - count * interval for arrival in arrivals) >= _ENOUGH:
                return count * interval
        return _WINDOWS[-1] * interval

    def _stretch(self, objective: Objective, interval: float, now: float) -> Stretch:
        fresh = [pod for pod in self.ledgers.values() if pod.fresh]
        share = len(self.ledgers) / len(fresh) if fresh else 1.0
        found = stretch_of((r for pod in fresh for r in pod.records), now, _LONGEST * interval, interval, share)
        known = self._under_current((pod.name for pod in fresh), max(found.began, now - LATELY * interval))
        judged = [margin >= 0 for r in known if (margin := objective.margin(r, now)) is not None]
        return replace(found, attainment=fmean(judged) if judged else 1.0)

    def _evidence(self, trial: Trial | None, situation: Situation, objective: Objective, now: float) -> Evidence | None:
        if trial is None or not trial.applied or not trial.pods:
            return None
        sides = [[n for n in self.ledgers if (n in trial.pods) is (among is not trial.control)] for among in (True, False)]
        changed, others = (self._scores(names, objective, now, trial.applied) for names in sides)
        interval = situation.interval
        start, end, batch = trial.applied, now - objective.settle, batch_seconds(interval)
        if trial.single:
            start = self._backlog_gone(trial, interval, now)
            others = [(arrival, trial.score) for arrival, _ in changed]
        elif not trial.starved:
            start = self._left_over_gone(trial, interval, now)
        served, rest = (self._served(names, start, end, batch, now) for names in sides)
        rates = ServiceRates(served, [trial.rate] * len(served) if trial.single else rest, trial.rate)
        if trial.starved:
            return weigh(changed, others, start=start, end=end, batch=batch, rates=rates)
        if trial.single:
            return weigh(changed, others, start=start, end=end, batch=batch)
        luck = self._luck(changed, others, situation, objective, start, now)
        queued = tuple(self._queued(names, objective, now, trial.applied) for names in sides)
        return weigh(
            changed, others, start=start, end=end, batch=batch, rates=rates, luck=luck, queued=(queued[0], queued[1])
        )

    def _luck(
        self, changed: Sequence[Score], others: Sequence[Score], situation: Situation, objective: Objective, start: float,
        now: float,
    ) -> Sides:  # fmt: skip
        pods = [pod for pod in self.ledgers.values() if pod.fresh and pod.model is not None]
        if not pods:
            return (), ()
        return Luck(situation.knobs, objective, _model_of(pods), _blocks_of(pods)).of(changed, others, pods, start, now)

    def _queued(self, names: Iterable[str], objective: Objective, now: float, since: float) -> list[Score]:
        """Return of each request whether it waited too long."""
        records = (r for r in self._under_current(names, since) if r.arrival <= now - objective.settle)
        return [(r.arrival, float(objective.waited(r, now))) for r in records if r.outcome != "aborted"]

    def _served(self, names: Iterable[str], start: float, end: float, batch: float, now: float) -> list[float]:
        """Return the output tokens/s of one of some pods in each batch."""
        pods = [pod for name in names if (pod := self.ledgers[name]).fresh]
        records = (r for pod in pods for r in pod.records)
        tokens = tokens_per_batch(records, start=start, end=end, batch=batch, now=now)
        return [count / batch / max(1, len(pods)) for count in tokens]

    def _rate(self, since: float, now: float) -> float:
        return sum(self._served(self.ledgers, since, now, now - since, now)) if now > since else 0.0

    def _lately(self, objective: Objective, interval: float, now: float) -> Lately:
        end = now - objective.settle
        records = [r for r in self._under_current(self.ledgers, end - interval) if r.arrival <= end]
        scores = [score for _, score in margins(records, objective, now, unknown=-1.0)]
        if not scores:
            return Lately()
        return Lately(
            requests=len(scores),
            score=fmean(scores),
            share=fmean(score >= objective.score(0.0) for score in scores),
            rate=self._rate(max(now - _WINDOWS[0] * interval, self.state.since), now),
            attainment=self.stretch.attainment if self.stretch is not None else 1.0,
            waited=fmean(objective.waited(r, now) for r in records if r.outcome != "aborted"),
        )

    def _backlog_gone(self, trial: Trial, interval: float, now: float) -> float:
        """Return when nobody was waiting any more who had come before a change on the only pod, two intervals at most.

        Who comes then waits behind them, and that isn't the change's fault; where it never ends, the change has to answer.
        """
        waited = [
            now if r.first_token is None else r.first_token
            for pod in self.ledgers.values() for r in pod.records
            if r.arrival < trial.applied and r.outcome in ("finished", "unfinished")
        ]  # fmt: skip
        return min(max([trial.applied, *waited]), trial.applied + _BACKLOG * interval)

    def _left_over_gone(self, trial: Trial, interval: float, now: float) -> float:
        """Return when the changed pods had finished what they had at the change, an interval later at most.

        Who comes to fewer slots then waits until those are free, and to more of them shares a step with all who had queued:
        that passes, and isn't what the change does.
        """
        there = [
            now if r.end is None else r.end
            for name in trial.pods if name in self.ledgers for r in self.ledgers[name].records if r.arrival < trial.applied
        ]  # fmt: skip
        return min(max([trial.applied, *there]), trial.applied + interval)

    def _scores(self, names: Iterable[str], objective: Objective, now: float, since: float) -> list[tuple[float, float]]:
        return margins(self._under_current(names, since), objective, now, unknown=-1.0)

    def _under_current(self, names: Iterable[str], since: float) -> Sequence[RequestRecord]:
        pods = (self.ledgers[name] for name in names)
        return [r for pod in pods for r in pod.records if pod.fresh and r.arrival >= since and r.epoch == pod.epoch]

    def _after(self, objective: Objective, now: float) -> tuple[int, float]:
        """Return how many requests came since the promotion and can be judged, and their share within the objective.

        If enough came lately it is their share: the first ones wait behind what the knobs from before had left.
        """
        if self.state.phase is not Phase.VERIFYING:
            return 0, 0.0
        end = now - objective.settle
        records = [r for r in self._under_current(self.ledgers, self.state.since) if r.arrival <= end]
        judged = sorted((r.arrival, m >= 0) for r in records if (m := objective.margin(r, now)) is not None)
        lately = judged[-max(_ENOUGH, len(judged) // 2) :]
        return len(judged), sum(met for _, met in lately) / max(1, len(lately))

    def _score(self, objective: Objective, now: float) -> float:
        scores = [s for _, s in self._scores(self.ledgers, objective, now, now - (self.view.window if self.view else 0.0))]
        return fmean(scores) if scores else 1.0


def _model_of(pods: Sequence[PodLedger]) -> CalibratedModel:
    """Return the model of the pod that has seen most, corrected by the steps of all."""
    newest = max((pod.model for pod in pods if pod.model is not None), key=lambda model: model.steps)
    return calibrate(newest, (step for pod in pods for step in pod.measured_steps()))


def _blocks_of(pods: Sequence[PodLedger]) -> int:
    return max(1, min(pod.gauges.kv_blocks_total for pod in pods))
