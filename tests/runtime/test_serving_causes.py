"""Causal latency in the engine, in virtual time: what is injected shows under its own part and culprit, within 10 %."""

from __future__ import annotations

import pytest

from paceline_core.causes import Causes, Story
from paceline_core.knobs import Knobs
from paceline_core.plan import ScheduledSequence, StepPlan, StepShape
from paceline_core.request import Ended, Request
from paceline_core.step_time import StepModel, StepTimeFitter
from paceline_runtime.clock_runner import ClockModel, ClockRunner
from paceline_runtime.engine import Engine
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.step_profile import profile_steps

STEP, PER_TOKEN = 0.01, 0.001  # seconds of a step, and of each prompt token in it


class VirtualTime:
    """A clock that only moves when somebody sleeps; every reading costs the engine a moment, as its own work does."""

    def __init__(self, overhead: float = 0.0) -> None:
        self.now = 100.0
        self.overhead = overhead

    def __call__(self) -> float:
        self.now += self.overhead
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Bench:
    """An engine in virtual time that was profiled as at a real start, and the stories of what ended."""

    def __init__(self, blocks: int = 1000, depth: int = 1, overhead: float = 0.0, **knobs: object) -> None:
        self.time = VirtualTime(overhead)
        model = StepModel(STEP, decode_tokens=1e-5, prefill_tokens=PER_TOKEN)
        runner = ClockRunner(model, [1, 2, 3], now=self.time, sleep=self.time.sleep)
        backend = ClockModel(runner, blocks, 5000, 257, (256,), 1.0)
        settings = Knobs(kv_memory_fraction=1.0, **{"prefix_caching": False, **knobs})  # type: ignore[arg-type]
        fitter = StepTimeFitter()
        profile_steps(backend, settings, fitter, now=self.time)
        self.engine = Engine(backend, settings, pipeline_depth=depth, fitter=fitter, now=self.time)
        self.stories: dict[int, Story] = {}
        self.ends: dict[int, Ended] = {}
        self._numbers = iter(range(1, 1000))

    def add(self, prompt_len: int, max_tokens: int, intake: float = 0.0) -> int:
        """Add a request that came `intake` seconds ago and was read just now."""
        number = next(self._numbers)
        request = Request(number, prompt_len, max_tokens, self.time.now - intake, tokens=[number % 200] * prompt_len)
        self.engine.add(request, SamplingParams(max_tokens=max_tokens), submitted=self.time.now)
        return number

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            turn = self.engine.turn()
            self.stories.update(turn.stories)
            self.ends.update({ended.request.seq_id: ended for ended in turn.ended})

    def finish(self) -> None:
        while self.engine.has_work:
            self.turn()

    def parts(self, number: int) -> dict[str, float]:
        """Return the parts of a request that has ended; nothing of its time may be missing."""
        ended, story = self.ends[number], self.stories[number]
        assert story.parts.total == pytest.approx(ended.released - ended.request.arrival, rel=1e-9)
        return story.parts.by_cause()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_known_chunk_is_charged_to_whom_it_delays_and_blamed_on_whose_it_is(depth: int) -> None:
    bench = Bench(depth=depth)
    victim = bench.add(10, 60)
    bench.turn(5)
    culprit = bench.add(400, 1)
    bench.finish()
    assert bench.parts(victim)["delayed"] == pytest.approx(400 * PER_TOKEN, rel=0.1)
    assert bench.stories[victim].delayed_by == {culprit: pytest.approx(400 * PER_TOKEN, rel=0.1)}
    assert bench.parts(victim)["decode"] == pytest.approx(59 * STEP, rel=0.1)
    assert bench.parts(culprit)["prefill"] == pytest.approx(STEP + 400 * PER_TOKEN, rel=0.1)
    assert bench.parts(culprit)["delayed"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("turns", range(6))
def test_who_leaves_while_its_prompt_is_computed_has_no_time_of_the_steps_after(depth: int, turns: int) -> None:
    bench = Bench(depth=depth, max_num_batched_tokens=100, long_prefill_threshold=100, max_num_seqs=8)
    bench.add(10, 60)
    bench.turn(3)
    leaver = bench.add(350, 1)
    bench.turn(turns)
    bench.time.now += 0.0005
    bench.engine.abort(leaver)
    bench.finish()
    parts = bench.parts(leaver)
    assert all(seconds >= -1e-9 for seconds in parts.values()), parts


def test_two_chunks_in_one_step_share_the_blame_by_what_they_cost() -> None:
    bench = Bench()
    victim = bench.add(10, 40)
    bench.turn(5)
    large, small = bench.add(300, 1), bench.add(100, 1)
    bench.finish()
    blamed = bench.stories[victim].delayed_by
    assert blamed == {large: pytest.approx(0.3, rel=0.1), small: pytest.approx(0.1, rel=0.1)}
    assert sum(blamed.values()) == pytest.approx(bench.parts(victim)["delayed"])
    assert bench.stories[small].delayed_by == {large: pytest.approx(0.3, rel=0.1)}
    assert bench.parts(small)["delayed"] == pytest.approx(0.3, rel=0.1)


def test_a_prompt_that_waits_for_its_next_chunk_blames_whose_turn_it_was() -> None:
    bench = Bench(max_num_batched_tokens=100, long_prefill_threshold=100, max_num_seqs=8)
    first, second = bench.add(300, 1), bench.add(100, 1)
    bench.finish()
    assert bench.parts(second)["budget"] == pytest.approx(3 * (STEP + 0.1), rel=0.1)
    assert bench.parts(first)["prefill"] == pytest.approx(3 * (STEP + 0.1), rel=0.1)


def test_a_known_preemption_is_told_with_who_took_the_memory() -> None:
    bench = Bench(blocks=24)  # 384 tokens: both fit at first, then the older one takes the younger one's blocks
    for _ in range(40):  # answers have been short so far, so memory isn't reserved for longer ones
        bench.add(10, 2)
    bench.finish()
    older, younger = bench.add(100, 200), bench.add(100, 200)
    while bench.engine.has_work and bench.engine.gauges().preemptions == 0:
        bench.turn()
    lost_at = bench.time.now
    assert bench.engine.gauges().running == 1
    bench.finish()
    # it waits until the older one has ended and frees its memory, then recomputes what it had
    recomputed = STEP + 192 * PER_TOKEN
    expected = bench.ends[older].released - lost_at + recomputed
    assert bench.parts(younger)["preempted"] == pytest.approx(expected, rel=0.1)
    assert bench.stories[younger].preempted_by == {older: pytest.approx(bench.parts(younger)["preempted"])}
    assert bench.parts(older)["preempted"] == 0


def test_a_known_pause_is_a_gap_for_who_runs_and_for_who_waits() -> None:
    bench = Bench(max_num_seqs=1)
    running = bench.add(10, 20)
    bench.turn(5)
    waiting = bench.add(10, 1)
    bench.turn(2)
    bench.time.sleep(3.0)  # nothing is computed: as when a process is stopped, or cleans its memory up
    late = bench.add(10, 1)  # comes at the end of the pause, and has none of it
    bench.finish()
    assert bench.parts(running)["gap"] == pytest.approx(3.0, rel=0.1)
    assert bench.parts(running)["decode"] == pytest.approx(19 * STEP, rel=0.1)
    assert bench.parts(waiting)["gap"] == pytest.approx(3.0, rel=0.1)
    assert bench.parts(waiting)["slot"] == pytest.approx(15 * STEP, rel=0.1)
    assert bench.parts(late)["gap"] == pytest.approx(0.0, abs=1e-9)


def test_who_comes_in_the_middle_of_a_pause_has_what_is_left_of_it() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(10, 20)
    bench.turn(5)
    bench.time.sleep(2.0)
    waiting = bench.add(10, 1)
    bench.time.sleep(1.0)
    bench.finish()
    assert bench.parts(waiting)["gap"] == pytest.approx(1.0, rel=0.1)


def test_a_rebuilt_pool_is_a_preemption_by_nobody() -> None:
    bench = Bench()
    number = bench.add(100, 30)
    bench.turn(10)
    bench.engine.set_knobs(Knobs(kv_memory_fraction=0.5, prefix_caching=False))
    bench.finish()
    assert bench.parts(number)["preempted"] == pytest.approx(STEP + 110 * PER_TOKEN, rel=0.1)
    assert list(bench.stories[number].preempted_by) == [-1]


def test_the_time_between_steps_is_a_gap_and_nothing_is_left_over() -> None:
    bench = Bench(overhead=0.0005)  # of every look at the clock: several per step
    numbers = [bench.add(20 + 10 * i, 30, intake=0.02) for i in range(5)]
    bench.finish()
    for number in numbers:
        parts = bench.parts(number)
        assert parts["intake"] == pytest.approx(0.02)
        assert 0.01 < parts["gap"] < 0.2
        assert min(parts.values()) >= 0
        assert parts["decode"] == pytest.approx(29 * STEP, rel=0.1)


def test_an_idle_engine_owes_nobody_a_gap() -> None:
    bench = Bench()
    bench.add(10, 3)
    bench.finish()
    bench.turn()
    bench.time.sleep(50.0)
    number = bench.add(10, 3)
    bench.finish()
    assert bench.parts(number)["gap"] == pytest.approx(0.0, abs=1e-9)


def test_without_a_model_tokens_count_alike() -> None:
    causes = Causes(None)
    table = (0,)
    causes.arrived(1, 0.0)
    causes.arrived(2, 0.0)
    entries = (ScheduledSequence(1, 0, 30, table, True), ScheduledSequence(2, 0, 10, table, True))
    plan = StepPlan(0, 0, entries, StepShape(0, 40, 0, 1000))
    causes.planned(plan, 0.0)
    causes.completed(plan, 4.0, 4.0)
    assert causes._chapters[1].parts.prefill == pytest.approx(3.0)
    assert causes._chapters[2].parts.prefill == pytest.approx(1.0)
    assert causes._chapters[2].parts.delayed == pytest.approx(3.0)


def test_the_history_is_trimmed_and_goes_on_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_core.cause_clocks._TRIM_AT", 64)
    bench = Bench(overhead=0.0001)
    old = bench.add(10, 600)
    for _ in range(60):
        bench.add(40, 5)
        bench.turn(5)
    assert len(bench.engine._causes._history) > 64  # the old one's time reaches back to the start
    bench.finish()
    assert bench.parts(old)["delayed"] == pytest.approx(60 * 40 * PER_TOKEN, rel=0.1)
    for _ in range(200):
        bench.add(40, 2)
        bench.turn(3)
    assert len(bench.engine._causes._history) < 200
