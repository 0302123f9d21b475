"""The tuner's one task: looks at every service that is due, and carries out what its brain says.

Reading pods is bounded (`scrape`), the twin runs in a process of its own at low priority, so neither holds up a reconcile.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from paceline_operator.acceptance import Acceptor
from paceline_operator.cluster import Cluster
from paceline_operator.drift import is_owned_by
from paceline_operator.effective import effective, read_override, tuned_name
from paceline_operator.errors import ApiRefused, ApiUnavailable, SpecError
from paceline_operator.events import Decision as Told
from paceline_operator.events import event_of
from paceline_operator.knob_sync import PodKnobs, Target
from paceline_operator.metrics import Metrics
from paceline_operator.pods import instances
from paceline_operator.settings import Settings
from paceline_operator.spec import InferenceService
from paceline_operator.status import TuningStatus
from paceline_operator.store import Key, Store
from paceline_operator.tuning.asked import still_asked
from paceline_operator.tuning.brain import Brain
from paceline_operator.tuning.decide import Decision, decide
from paceline_operator.tuning.decision_log import DecisionLog
from paceline_operator.tuning.facts import Ask, Situation, Tell
from paceline_operator.tuning.metrics import TunerMetrics
from paceline_operator.tuning.overrides import FIELD_MANAGER, config_map, out_of_force, read_state
from paceline_operator.tuning.question import Question
from paceline_operator.tuning.scrape import Scraper, Source
from paceline_operator.tuning.situation import situation_of
from paceline_operator.tuning.state import State
from paceline_operator.tuning.status import report

__all__ = ["Tuner"]

logger = logging.getLogger(__name__)
_LOOKS = 5  # per interval while something is tried: harm shall be seen early
_LEAST = 1.0  # seconds between two looks


@dataclass(slots=True)
class _Tuned:
    """One service: its brain, when it was looked at and is due, the answer that it waits for, what was written last, and
    what is to be told once what it is about is written.
    """

    brain: Brain
    service: InferenceService
    looked: float = 0.0
    due: float = 0.0
    untold: list[Tell] = field(default_factory=list)
    question: Question | None = None
    asked: asyncio.Task[Decision | None] | None = None
    written: Mapping[str, str] | None = None
    status: TuningStatus | None = None


@dataclass(slots=True)
class Tuner:
    """Tunes all services of a store. `targets` and `knobs` are the controller's, `wake` asks it for a pass."""

    settings: Settings
    cluster: Cluster
    store: Store
    acceptor: Acceptor
    metrics: Metrics
    targets: Mapping[Key, Target]
    knobs: Mapping[Key, Mapping[str, PodKnobs]]
    wake: Callable[[Key], None]
    clock: Callable[[], float] = time.time
    scraper: Scraper | None = None
    _tuned: dict[Key, _Tuned] = field(default_factory=dict)
    _own: TunerMetrics = field(init=False)
    _log: DecisionLog = field(init=False)
    _pool: ProcessPoolExecutor | None = None

    def __post_init__(self) -> None:
        self._own = TunerMetrics(self.metrics.registry)
        path = self.settings.tuning_log
        self._log = DecisionLog(Path(path) if path else None)

    def status(self, key: Key) -> TuningStatus | None:
        """Return what to tell of a service, None if it isn't tuned."""
        tuned = self._tuned.get(key)
        return tuned.status if tuned is not None else None

    async def run(self) -> None:
        """Look at what is due, for ever."""
        if self.scraper is None:
            concurrency = self.settings.admin_concurrency
            self.scraper = Scraper(timeout=self.settings.admin_timeout, concurrency=concurrency, clock=self.clock)
        try:
            while True:
                try:
                    with self._own.round_seconds.time():
                        await self.round()
                except Exception:  # tuning that ended in silence would leave a trial in force for ever
                    logger.exception("a round of tuning failed")
                    self._own.failures.inc()
                await asyncio.sleep(max(_LEAST, self.settings.tuning_interval / (2 * _LOOKS)))
        finally:
            await self.scraper.close()
            self.close()

    def close(self) -> None:
        """End the twin's processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def round(self) -> None:
        """Look once at every service that is due."""
        now = self.clock()
        for key in list(self._tuned):
            if self._service(key) is None:
                self._forget(key)
        due = [(key, tuned) for key in self.store if (tuned := self._known(key)) is not None and self._is_due(tuned, now)]
        await self._scrape(due)
        for key, tuned in due:
            try:
                await self._look(key, tuned)
            except (ApiRefused, ApiUnavailable) as error:
                logger.warning("%s/%s: tuning waits: %s", *key, error)
            except Exception:  # a bug with one service must not stop the others
                logger.exception("%s/%s: the look failed", *key)
                self._own.failures.inc()
        self._own.count_pods([p.health for t in self._tuned.values() for p in t.brain.ledgers.values()])

    def _service(self, key: Key) -> InferenceService | None:
        """Return the service if it shall be tuned."""
        body = self.store.service(key)
        if body is None or "deletionTimestamp" in body["metadata"] or key not in self.targets:
            return None
        try:
            service = self.acceptor.accept(key, body)
        except SpecError:
            return None  # nothing is tuned under a spec that can't be used
        mode, known = service.tuning.mode, self._tuned.get(key)
        # what was being tried when the mode was switched off is still to be taken back
        return service if mode != "Off" or (known is not None and known.brain.state.trial is not None) else None

    def _known(self, key: Key) -> _Tuned | None:
        service = self._service(key)
        if service is None:
            return None
        tuned = self._tuned.get(key)
        if tuned is None or tuned.service.uid != service.uid:
            live = self.store.get(key, "ConfigMap", tuned_name(service.name))
            own = live if live is not None and is_owned_by(live, service.uid) else None
            tuned = self._tuned[key] = _Tuned(Brain(read_state(own) or State()), service)
            # what pods are run by is there to be written over: also where the state beside it can't be read
            tuned.written = None if own is None else own.get("data") or {}
        tuned.service = service
        return tuned

    def _is_due(self, tuned: _Tuned, now: float) -> bool:
        return now >= tuned.due or now < tuned.looked or (tuned.asked is not None and tuned.asked.done())

    def _forget(self, key: Key) -> None:
        tuned = self._tuned.pop(key)
        if tuned.asked is not None:
            tuned.asked.cancel()
        self._own.forget(key.namespace, tuned.service.name)
        self.wake(key)

    async def _scrape(self, due: list[tuple[Key, _Tuned]]) -> None:
        assert self.scraper is not None
        sources = []
        for key, tuned in due:
            pods = [pod for pod in instances(self.store.all(key, "Pod")) if pod.ready]
            tuned.brain.keep_only(pod.name for pod in pods)
            token = self.targets[key].token
            sources += [(Source(pod.name, pod.address, token), tuned.brain.ledger(pod.name)) for pod in pods]
        await self.scraper.look(sources)

    async def _look(self, key: Key, tuned: _Tuned) -> None:
        target = self.targets.get(key)
        if target is None:
            return
        now, interval = self.clock(), self.settings.tuning_interval
        if now < tuned.looked - interval:
            tuned.brain.ledgers.clear()  # the clock went back: what was read lies in the future
        tuned.looked = now
        live = self.store.get(key, "ConfigMap", tuned_name(tuned.service.name))
        found = effective(tuned.service, read_override(live))
        trial = tuned.brain.state.trial
        # a target from before the trial began or ended says nothing about whether pods have taken it over
        current = target.trial_pods == frozenset(trial.pods if trial is not None else ())
        situation = situation_of(
            tuned.service, found, instances(self.store.all(key, "Pod")), self.knobs.get(key, {}),
            target.digest if current else "", next(iter(self.store.all(key, "Deployment")), None), interval,
            out_of_force(tuned.service, tuned.brain.state),
        )  # fmt: skip
        look = partial(tuned.brain.look, situation, now, self._answer(tuned, situation))
        # a trial's guard asks the twin about some seconds of traffic: too long for everything else to wait
        effects = look() if trial is None else await asyncio.to_thread(look)
        tuned.untold += [effect for effect in effects if isinstance(effect, Tell)]
        await self._write(key, tuned)  # before anything is told: what isn't written hasn't happened
        while tuned.untold:
            await self._tell(key, tuned.untold.pop(0))
        if ask := next((effect for effect in effects if isinstance(effect, Ask)), None):
            self._ask(tuned, situation, ask, now)
        busy = tuned.brain.state.trial is not None
        tuned.due = now + max(_LEAST, interval / _LOOKS if busy else interval) * 0.95
        self._publish(key, tuned, situation)

    def _answer(self, tuned: _Tuned, situation: Situation) -> Decision | None:
        """Return the twin's answer if it has come, and is about what is still the case; else it may be asked again."""
        question, asked = tuned.question, tuned.asked
        # a question whose state couldn't be written was never put
        tuned.brain.searching = asked is not None and not asked.done()
        if asked is None or not asked.done():
            return None
        tuned.asked = None
        answer = None if asked.cancelled() else asked.result()
        if answer is None or question is None:
            return None
        self._own.decisions.labels(answer.kind, answer.reason).inc()
        epochs = {name: ledger.epoch for name, ledger in tuned.brain.ledgers.items()}
        try:
            self._log.add(question, answer, epochs)
        except OSError as error:
            logger.warning("a decision couldn't be logged: %s", error)
        return answer if still_asked(question, situation, tuned.brain.state) else None

    def _ask(self, tuned: _Tuned, situation: Situation, ask: Ask, now: float) -> None:
        tuned.question = tuned.brain.question(situation, ask, now)
        tuned.brain.searching = tuned.question is not None
        if tuned.question is not None:
            tuned.asked = asyncio.create_task(self._decide(tuned.question))

    async def _decide(self, question: Question) -> Decision | None:
        if self._pool is None:
            # spawned, not forked: the operator has threads; and nice, so that the twin never slows a reconcile
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.settings.tuning_workers, context, initializer=_begin)
        try:
            with self._own.search_seconds.time():
                return await asyncio.get_running_loop().run_in_executor(self._pool, decide, question)
        except BrokenProcessPool:
            logger.warning("the twin's process has died; a new one is started for the next question")
            self._pool = None
        except Exception:  # one question that can't be answered: logged with all that it takes to ask it again
            logger.exception("%s: the twin failed", question.service)
            self._own.failures.inc()
        return None

    async def _write(self, key: Key, tuned: _Tuned) -> None:
        """Write the ConfigMap if what it says has changed."""
        state = tuned.brain.state
        if tuned.written is None and not (state.override or state.trial or state.history):
            return  # nothing that has to survive
        child = config_map(tuned.service, state)
        if child["data"] == tuned.written:
            return
        self.store.put("ConfigMap", await self.cluster.apply(child, FIELD_MANAGER))
        tuned.written = child["data"]
        self.wake(key)

    async def _tell(self, key: Key, tell: Tell) -> None:
        logger.info("%s/%s: %s: %s", *key, tell.reason, tell.message)
        self._own.events.labels(tell.reason).inc()
        body = self.store.service(key)
        if body is None:
            return
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.clock()))
        try:
            await self.cluster.create_event(event_of(body, Told(tell.reason, tell.message, tell.warning), stamp))
        except (ApiRefused, ApiUnavailable) as error:  # the log has it
            logger.warning("an event couldn't be recorded: %s", error)

    def _publish(self, key: Key, tuned: _Tuned, situation: Situation) -> None:
        self._own.observe(key.namespace, tuned.service.name, tuned.brain)
        status = report(tuned.brain, situation.mode, situation.knobs)
        if status != tuned.status:
            tuned.status = status
            self.wake(key)


def _begin() -> None:
    """Set a twin's process up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)
