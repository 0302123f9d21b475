"""The server's parts without processes: text, knobs, records, the engine's loop, the clock."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_core.errors import KnobError, RequestRefused, RevisionConflict
from paceline_core.knobs import Knobs, Strategy
from paceline_core.plan import ScheduledSequence, StepPlan, StepShape
from paceline_core.request import FinishReason, Request
from paceline_core.step_time import StepModel, StepTimeFitter
from paceline_core.wire import Gauges, KnobsPatch, RequestRecord, StepRecord
from paceline_runtime import engine_client, observe
from paceline_runtime.api import EventResponse
from paceline_runtime.api_errors import ApiError
from paceline_runtime.api_requests import _of_choice
from paceline_runtime.byte_tokenizer import ByteTokenizer
from paceline_runtime.clock_runner import ClockModel, ClockRunner
from paceline_runtime.engine import Engine, EngineBroken
from paceline_runtime.engine_client import EngineCannotStart, EngineClient, EngineNotReady, KnobsNotTaken
from paceline_runtime.engine_link import EngineLink
from paceline_runtime.generation import Generation, Piece, pieces_of
from paceline_runtime.knob_store import KnobChange, KnobStore, NothingToRollBack
from paceline_runtime.logs import log_event, set_up_logging
from paceline_runtime.messages import (
    AddSequence,
    EngineFailed,
    EngineReady,
    KnobsRefused,
    SequenceEnded,
    SetKnobs,
    StepOutput,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from paceline_runtime.model_errors import MemoryBudgetError
from paceline_runtime.observe import ObserveLog, ObserveState, prefix_hashes
from paceline_runtime.openai_replies import ChatReply, CompletionReply, event_stream
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.sequence import EngineDied, LiveSequence, Submission
from paceline_runtime.settings import EngineSettings, SettingsError, cpu_threads
from paceline_runtime.step_profile import profile_steps
from paceline_runtime.text_stream import StopMatcher, TextStream

# -- text ---------------------------------------------------------------------------------------------------------------

LETTERS = st.text("ab", max_size=12)


@given(st.lists(LETTERS, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_text_is_cut_where_it_first_shows_whatever_the_pieces(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    whole = ""
    for piece in pieces:
        if matcher.hit:
            break
        whole += piece
        shown += matcher.push(piece)
        assert matcher.hit == any(stop in whole for stop in stops)
        # never more than what stays whatever comes: neither a stop text nor the start of one is shown
        assert whole.startswith(shown)
        assert not any(stop in shown for stop in stops)
    if not matcher.hit:
        assert shown + matcher.flush() == whole
    else:
        assert shown == whole[: min(whole.find(stop) for stop in stops if stop in whole)]


@given(st.text(max_size=30), st.integers(1, 7))
def test_byte_tokens_in_any_pieces_give_the_text_back(text: str, size: int) -> None:
    tokens = ByteTokenizer().encode(text)
    stream = TextStream(ByteTokenizer().detokenizer(), SamplingParams(max_tokens=1000), ())
    pieces = [stream.push(tokens[i : i + size]) for i in range(0, len(tokens), size)]
    assert "".join(pieces) + stream.finish(FinishReason.ABORT) == text
    assert all(text.find(piece) >= 0 for piece in pieces)


def test_a_stream_ends_at_the_right_token() -> None:
    def stream(**params) -> TextStream:
        return TextStream(ByteTokenizer().detokenizer(), SamplingParams(**params), (256,))

    at_limit = stream(max_tokens=3)
    assert at_limit.push(b"abcdef") == "abc"
    assert (at_limit.finish_reason, len(at_limit.token_ids)) == (FinishReason.LENGTH, 3)
    at_stop = stream(max_tokens=9)
    assert at_stop.push([*b"ab", 256, *b"cd"]) == "ab"
    assert (at_stop.finish_reason, len(at_stop.token_ids)) == (FinishReason.STOP, 3)
    too_early = stream(max_tokens=9, min_tokens=3)
    assert too_early.push([*b"a", 256, *b"b", 256]) == "ab"
    assert len(too_early.token_ids) == 4


# -- generations ----------------------------------------------------------------------------------------------------------


class FakeClient:
    def __init__(self) -> None:
        self.stopped: list[FinishReason] = []

    def stop(self, sequence: LiveSequence, reason: FinishReason, cause: str = "client") -> None:
        self.stopped.append(reason)


def generation(deadline: float | None = None, **params) -> tuple[FakeClient, LiveSequence, Generation]:
    sampling = SamplingParams(**params)
    sequence = LiveSequence(1, Submission("r", [1, 2], sampling, 0.0, deadline=deadline), epoch=0)
    client = FakeClient()
    text = TextStream(ByteTokenizer().detokenizer(), sampling, (256,))
    return client, sequence, Generation(client, sequence, text)


def ended(reason: FinishReason, **fields) -> SequenceEnded:
    return SequenceEnded(1, reason, 3, 1.0, **fields)


async def test_a_whole_result_is_held_until_the_engine_releases_it() -> None:
    _, sequence, gen = generation(max_tokens=3)
    answer = asyncio.ensure_future(gen.whole())
    sequence.push(tuple(b"abc"), 1.0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert gen.finish_reason == "length"
    assert not answer.done()  # static batching: the batch goes on
    sequence.end(ended(FinishReason.LENGTH, cached_len=1))
    result = await answer
    assert (result.text, result.finish_reason, result.cached_tokens) == ("abc", "length", 1)


async def test_a_stream_ends_without_waiting_for_its_batch() -> None:
    _, sequence, gen = generation(max_tokens=3)
    sequence.push(tuple(b"abc"), 1.0)
    assert [piece async for piece in gen.pieces()] == ["abc"]


async def test_a_stop_text_tells_the_engine() -> None:
    client, sequence, gen = generation(max_tokens=30, stop=("b",))
    sequence.push(tuple(b"abc"), 1.0)
    assert [piece async for piece in gen.pieces()] == ["a"]
    gen.close()
    assert client.stopped == [FinishReason.STOP]


async def test_an_end_that_the_text_did_not_show() -> None:
    _, sequence, gen = generation(max_tokens=30, stop=("bcd",))
    sequence.push(tuple(b"abc"), 1.0)
    sequence.end(ended(FinishReason.LENGTH))  # a smaller pool ended it
    assert "".join([piece async for piece in gen.pieces()]) == "abc"
    assert gen.finish_reason == "length"


@pytest.mark.parametrize(
    ("end", "deadline", "status", "code"),
    [
        (ended(FinishReason.ABORT), None, 503, "shutting_down"),
        (ended(FinishReason.REFUSED), 1e9, 504, "deadline_exceeded"),
        (ended(FinishReason.REFUSED), None, 400, "context_length_exceeded"),  # the pool was made smaller
        (ended(FinishReason.REFUSED, refusal="too big", refusal_code="kv_capacity"), None, 400, "kv_capacity"),
    ],
)
async def test_ends_that_are_errors(end: SequenceEnded, deadline: float | None, status: int, code: str) -> None:
    _, sequence, gen = generation(deadline, max_tokens=3)
    sequence.end(end)
    with pytest.raises(ApiError) as caught:
        await gen.whole()
    assert (caught.value.status, caught.value.code) == (status, code)


async def test_a_dead_engine_ends_what_it_had() -> None:
    _, sequence, gen = generation(max_tokens=3)
    sequence.fail(EngineDied("gone"))
    with pytest.raises(EngineDied):
        await gen.whole()


async def test_leaving_early_aborts_once() -> None:
    client, sequence, gen = generation(max_tokens=30)
    sequence.push(tuple(b"abc"), 1.0)
    async for _ in gen.pieces():
        break
    gen.close()
    assert client.stopped == [FinishReason.ABORT]


async def test_leaving_before_the_first_event_aborts_too() -> None:
    client, _, gen = generation(max_tokens=30)
    never_asked = event_stream(CompletionReply("id", "m", ByteTokenizer()), [gen], Piece(0, "a"), pieces_of([gen]))

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def full_pipe(_message: object) -> None:
        await asyncio.Event().wait()

    await EventResponse(never_asked, [gen])({"type": "http", "asgi": {"spec_version": "2.3"}}, gone, full_pipe)
    assert client.stopped == [FinishReason.ABORT]


async def test_the_first_failure_of_a_batch_ends_its_pieces() -> None:
    _, good, first = generation(max_tokens=30)
    _, bad, second = generation(max_tokens=30)
    good.push(tuple(b"a"), 1.0)
    pieces = pieces_of([first, second])
    assert await anext(pieces) == Piece(0, "a")
    bad.fail(EngineDied("gone"))
    with pytest.raises(EngineDied):
        await anext(pieces)


def test_a_seed_gives_each_choice_tokens_of_its_own() -> None:
    seeded = SamplingParams(seed=2**64 - 1)
    assert [_of_choice(seeded, choice).seed for choice in range(3)] == [2**64 - 1, 0, 1]
    assert _of_choice(SamplingParams(), 1).seed is None


# -- messages -------------------------------------------------------------------------------------------------------------


def test_messages_survive_the_wire() -> None:
    params = SamplingParams(max_tokens=5, stop=("a",), stop_token_ids=(1, 2), seed=3, top_k=-1)
    add = AddSequence(7, [1, 2], params, 1.5, priority=-2, deadline=9.0)
    assert decode_to_engine(encode(add)) == add
    output = StepOutput({7: (1,)}, [ended(FinishReason.STOP)], Gauges(running=1))
    assert decode_from_engine(encode(output)) == output


# -- knobs ----------------------------------------------------------------------------------------------------------------


def test_knobs_wait_for_the_engine() -> None:
    store = KnobStore(Knobs())
    change = store.patch(KnobsPatch({"maxNumSeqs": 4}))
    assert change.knobs.max_num_seqs == 4
    document = store.document("i")
    assert (document.knobs["maxNumSeqs"], document.desired["maxNumSeqs"]) == (256, 4)
    assert document.status["maxNumSeqs"] == "pending"
    store.applied(change.revision, epoch=3)
    document = store.document("i")
    assert (document.knobs["maxNumSeqs"], document.desired, document.epoch) == (4, {}, 3)


def test_a_late_word_on_an_older_revision_confirms_nothing_newer() -> None:
    store = KnobStore(Knobs())
    first = store.patch(KnobsPatch({"maxNumSeqs": 4}))
    store.patch(KnobsPatch({"maxNumSeqs": 8}))
    store.applied(first.revision, epoch=1)
    assert store.document("i").status["maxNumSeqs"] == "pending"


def test_what_the_engine_refuses_is_taken_back() -> None:
    store = KnobStore(Knobs())
    change = store.patch(KnobsPatch({"kvMemoryFraction": 0.001}))
    store.refused(change.revision)
    document = store.document("i")
    assert document.knobs["kvMemoryFraction"] == 0.9
    assert set(document.status.values()) == {"applied"}
    assert document.revision > change.revision


def test_refusals_of_changes_in_a_row_lead_back_to_what_runs() -> None:
    store = KnobStore(Knobs())
    store.applied(store.patch(KnobsPatch({"maxNumSeqs": 4})).revision, epoch=1)
    first = store.patch(KnobsPatch({"kvMemoryFraction": 0.001}))
    second = store.patch(KnobsPatch({"maxNumSeqs": 8}))  # on top of the first, which the engine hasn't answered yet
    store.refused(first.revision)
    assert store.document("i").status["maxNumSeqs"] == "pending"
    store.refused(second.revision)
    document = store.document("i")
    assert (document.knobs["maxNumSeqs"], document.knobs["kvMemoryFraction"]) == (4, 0.9)
    assert set(document.status.values()) == {"applied"}
    assert store.rollback().knobs.max_num_seqs == 256


def test_a_rollback_that_is_refused_can_be_tried_again() -> None:
    store = KnobStore(Knobs(kv_memory_fraction=0.001))
    store.applied(store.patch(KnobsPatch({"kvMemoryFraction": 0.5})).revision, epoch=1)
    store.refused(store.rollback().revision)
    assert store.document("i").knobs["kvMemoryFraction"] == 0.5
    assert store.rollback().knobs.kv_memory_fraction == 0.001


def test_a_failed_change_leaves_no_trace() -> None:
    store = KnobStore(Knobs())
    with pytest.raises(KnobError):
        store.patch(KnobsPatch({"maxNumSeqs": 0}, fencing=9))
    with pytest.raises(RevisionConflict):
        store.patch(KnobsPatch({"maxNumSeqs": 1}), if_match=99)
    with pytest.raises(NothingToRollBack):
        store.rollback()
    assert store.patch(KnobsPatch({"maxNumSeqs": 5}, fencing=1)).revision == 2  # 9 never counted


# -- records --------------------------------------------------------------------------------------------------------------


def state(instance: str = "a", unfinished: tuple[RequestRecord, ...] = ()) -> ObserveState:
    return ObserveState(instance, 5.0, 1, 2, Gauges(), None, unfinished)


def step(number: int) -> StepRecord:
    return StepRecord(float(number), 0.01, 0, number, 0, 0, 0, 1, 0)


def request(name: str) -> RequestRecord:
    return RequestRecord(name, 0.0, 1, 1, "finished", 0, 0)


def test_pages_join_without_gap_or_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "PAGE", 7)
    log = ObserveLog()
    for number in range(20):
        log.add_step(step(number))
        log.add_request(request(str(number)))
    steps: list[int] = []
    names: list[str] = []
    cursor = 0
    while True:
        page = log.read(cursor, "a", state())
        if not page.steps and not page.requests:
            break
        cursor = page.cursor
        steps += [s.decode_tokens for s in page.steps]
        names += [r.request_id for r in page.requests]
        assert not page.truncated
    assert steps == list(range(20))
    assert names == [str(n) for n in range(20)]


def test_lost_records_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "STEPS_KEPT", 4)
    log = ObserveLog()
    for number in range(10):
        log.add_step(step(number))
    assert [s.decode_tokens for s in log.read(2, "a", state()).steps] == [6, 7, 8, 9]
    assert log.read(2, "a", state()).truncated
    assert not log.read(6, "a", state()).truncated
    assert not log.read(0, "a", state()).truncated  # a first look has lost nothing that it knew of


def test_another_instance_starts_from_the_oldest() -> None:
    log = ObserveLog()
    log.add_step(step(1))
    assert log.read(1, "a", state("a")).steps == ()
    assert len(log.read(1, "old", state("a")).steps) == 1
    assert len(log.read(77, None, state("a")).steps) == 1  # a cursor from the future is from another life


def test_prefix_hashes_are_chained_and_keyed() -> None:
    first = prefix_hashes([1] * 8, 4, b"key")
    assert len(first) == 2
    assert first[0] != first[1]
    assert prefix_hashes([1] * 7, 4, b"key") == first[:1]
    assert prefix_hashes([2, *[1] * 7], 4, b"key")[1] != first[1]
    assert prefix_hashes([1] * 8, 4, b"other") != first
    assert all(0 <= h < 1 << 53 for h in prefix_hashes(list(range(400)), 4, b"key"))


# -- engine and clock -----------------------------------------------------------------------------------------------------


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def clock_backend(time: FakeTime, model: StepModel | None = None) -> ClockModel:
    runner = ClockRunner(model or StepModel(constant=1.0), [1, 2, 3], now=time, sleep=time.sleep)
    return ClockModel(runner, 64, 1000, 257, (256,), 1.0)


def engine(time: FakeTime, depth: int = 1, **knobs) -> Engine:
    return Engine(clock_backend(time), Knobs(**knobs), pipeline_depth=depth, now=time)


def add(engine: Engine, seq_id: int, max_tokens: int, now: float = 100.0) -> None:
    request = Request(seq_id=seq_id, prompt_len=2, max_tokens=max_tokens, arrival=now, tokens=[7, 8])
    engine.add(request, SamplingParams(max_tokens=max_tokens))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("strategy", list(Strategy))
def test_every_strategy_gives_every_token_in_order(depth: int, strategy: Strategy) -> None:
    time = FakeTime()
    eng = engine(time, depth, strategy=strategy, max_num_seqs=2)
    lengths = {1: 5, 2: 1, 3: 4, 4: 2}
    for seq_id, length in lengths.items():
        add(eng, seq_id, length)
    eng.close_source()
    tokens: dict[int, list[int]] = {seq_id: [] for seq_id in lengths}
    reasons = {}
    while eng.has_work:
        turn = eng.turn()
        for seq_id, new in turn.tokens.items():
            tokens[seq_id] += new
        reasons |= {e.request.seq_id: e.reason for e in turn.ended}
        time.now += eng.wait() or 0.0
    assert tokens == {seq_id: ([1, 2, 3] * 2)[:length] for seq_id, length in lengths.items()}
    assert reasons == dict.fromkeys(lengths, FinishReason.LENGTH)


def test_an_idle_engine_waits_for_input_or_for_the_next_event() -> None:
    time = FakeTime()
    eng = engine(time, strategy=Strategy.DYNAMIC, max_queue_delay=0.5)
    assert eng.turn().plan is None
    assert eng.wait() is None
    add(eng, 1, 3)
    assert eng.turn().plan is None
    assert eng.wait() == pytest.approx(0.5)
    time.now += 0.5
    assert eng.turn().plan is not None
    assert eng.wait() == 0.0


def test_an_event_that_comes_due_between_look_and_sleep_is_not_lost() -> None:
    time = FakeTime()
    eng = engine(time, strategy=Strategy.DYNAMIC, max_queue_delay=0.5)
    add(eng, 1, 3)
    assert eng.turn().plan is None
    time.now += 0.7  # the machine was busy elsewhere
    assert eng.wait() == 0.0
    assert eng.turn().plan is not None


def test_steps_take_their_modelled_time_one_after_another() -> None:
    time = FakeTime()
    runner = ClockRunner(StepModel(constant=1.0, decode_tokens=0.5), [9], now=time, sleep=time.sleep)
    runner.add(1, [7, 8], SamplingParams())
    plans = [
        StepPlan(i, 0, (ScheduledSequence(1, 1 + i, 1, [0], samples=True),), StepShape(decode_tokens=1)) for i in (1, 2)
    ]
    for plan in plans:
        runner.submit(plan)
    assert runner.collect().tokens == {1: (9,)}
    assert time.now == pytest.approx(101.5)
    runner.collect()
    assert time.now == pytest.approx(103.0)


def test_a_sequence_that_leaves_while_the_clock_works_on_it_harms_nobody() -> None:
    """With two plans in flight the second tells the runner to forget what the first one still names."""
    eng = engine(FakeTime(), depth=2)
    for seq_id in (1, 2):
        add(eng, seq_id, 6)
    count = len(eng.turn().tokens[2])
    eng.abort(1)
    while eng.has_work:
        count += len(eng.turn().tokens.get(2, ()))
    assert count == 6


class SmallModel(ClockModel):
    """Memory for 100 numbers: each token of a step takes one, a block as well."""

    def check_step(self, tokens: int, num_blocks: int) -> None:
        if tokens + num_blocks > 100:
            raise MemoryBudgetError(f"no memory for {tokens} tokens beside {num_blocks} blocks")


def test_knobs_whose_steps_have_no_memory_are_refused_and_change_nothing() -> None:
    time = FakeTime()
    runner = ClockRunner(StepModel(constant=1.0), [1, 2, 3], now=time, sleep=time.sleep)
    eng = Engine(SmallModel(runner, 64, 1000, 257, (256,), 1.0), Knobs(max_num_batched_tokens=36, max_num_seqs=4), now=time)
    half = Knobs(max_num_batched_tokens=68, max_num_seqs=4, kv_memory_fraction=0.5)
    for wanted in (Knobs(max_num_batched_tokens=37, max_num_seqs=4), replace(half, max_num_batched_tokens=69)):
        with pytest.raises(MemoryBudgetError):
            eng.set_knobs(wanted)
        assert (eng.epoch, eng.resizing) == (0, False)
    assert eng.set_knobs(half) == 1
    with pytest.raises(MemoryBudgetError):  # the pool to come counts, also before it is there
        eng.set_knobs(replace(half, max_num_batched_tokens=69))
    with pytest.raises(MemoryBudgetError):
        eng.set_knobs(replace(half, kv_memory_fraction=1.0))
    add(eng, 1, 3)
    while eng.has_work:
        eng.turn()
    assert (eng.epoch, eng.num_blocks) == (1, 32)


def test_a_new_share_of_memory_resizes_the_pool_while_sequences_run() -> None:
    time = FakeTime()
    eng = engine(time)
    add(eng, 1, 6)
    eng.turn()
    eng.set_knobs(Knobs(kv_memory_fraction=0.5))
    assert eng.resizing
    count = 1
    while eng.has_work:
        count += len(eng.turn().tokens.get(1, ()))
    assert count == 6
    assert not eng.resizing
    assert eng.num_blocks == 32
    assert eng.gauges().kv_blocks_total == 32


def test_what_can_never_run_is_refused_and_forgotten() -> None:
    eng = engine(FakeTime())
    with pytest.raises(RequestRefused):
        eng.add(Request(1, 2000, 1, 0.0, tokens=[1] * 2000), SamplingParams())
    assert not eng.has_work


def test_an_engine_whose_step_failed_says_so_instead_of_waiting_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    eng = engine(FakeTime())
    add(eng, 1, max_tokens=3)
    monkeypatch.setattr(eng._runner, "collect", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        eng.turn()
    with pytest.raises(EngineBroken, match="ZeroDivisionError"):
        eng.turn()


def test_the_profile_seeds_the_model_and_leaves_nothing_behind() -> None:
    time = FakeTime()
    backend = clock_backend(time, StepModel(constant=0.01, decode_tokens=0.002, prefill_tokens=0.0005))
    fitter = StepTimeFitter()
    profile_steps(backend, Knobs(), fitter)
    model = fitter.model()
    assert model.predict(StepShape(decode_tokens=4)) == pytest.approx(0.018, rel=0.05)
    assert model.predict(StepShape(prefill_tokens=80)) == pytest.approx(0.05, rel=0.05)
    assert backend.runner._prompt_len == {}


@pytest.mark.parametrize("step_seconds", [0.3, 5.0])
def test_the_profile_of_a_slow_machine_is_cut_short(step_seconds: float) -> None:
    time = FakeTime()
    began = time()
    backend = clock_backend(time, StepModel(constant=step_seconds))
    fitter = StepTimeFitter()
    profile_steps(backend, Knobs(), fitter, now=time)
    assert time() - began <= 2.0 + step_seconds
    assert fitter.model().predict(StepShape(decode_tokens=1)) > 0
    assert backend.runner._prompt_len == {}


# -- settings -------------------------------------------------------------------------------------------------------------


def test_threads_are_the_smallest_limit(tmp_path: Path) -> None:
    cgroup = tmp_path / "cpu.max"
    free = cpu_threads({}, cgroup)
    assert free >= 1
    assert cpu_threads({"PACELINE_CPU_LIMIT": "1"}, cgroup) == 1
    cgroup.write_text("50000 100000\n")
    assert cpu_threads({}, cgroup) == 1
    cgroup.write_text("max 100000\n")
    assert cpu_threads({}, cgroup) == free
    with pytest.raises(SettingsError, match="PACELINE_CPU_LIMIT"):
        cpu_threads({"PACELINE_CPU_LIMIT": "many"}, cgroup)


def test_json_logs_are_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    set_up_logging("json", "test")
    log_event("something", number=3, text='with "quotes"')
    set_up_logging("text", "test")
    log_event("something", text="two words")
    first, second = capsys.readouterr().out.splitlines()
    assert json.loads(first)["text"] == 'with "quotes"'
    assert 'event=something text="two words"' in second


# -- supervision ----------------------------------------------------------------------------------------------------------


class Listener:
    """Notes what the client reports."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def __getattr__(self, name: str):
        return lambda *_: self.notes.append(name)


class FakeLink:
    """An engine that says its lines and dies."""

    scripts: ClassVar[list[list[object]]] = []
    sent: ClassVar[list[object]] = []
    pid = 1
    exit_text = "was ended by signal SIGKILL (out of memory?)"

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def send(self, message: object) -> None:
        FakeLink.sent.append(message)

    async def messages(self):
        for message in FakeLink.scripts.pop(0) if FakeLink.scripts else []:
            await asyncio.sleep(0)
            yield message


async def test_a_temporary_folder_too_deep_for_a_socket_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(SettingsError, match="set TMPDIR to a shorter one"):
        EngineLink(EngineSettings(None, {}))
    assert list(deep.iterdir()) == []


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> tuple[EngineClient, Listener, KnobStore]:
    monkeypatch.setattr(engine_client, "EngineLink", FakeLink)
    monkeypatch.setattr(engine_client, "_FIRST_BACKOFF", 0.0)
    FakeLink.scripts, FakeLink.sent = [], []
    listener, knobs = Listener(), KnobStore(Knobs())
    return EngineClient(EngineSettings(None, {}), knobs, listener), listener, knobs


READY = EngineReady(100, 257, [256], 8, "clock", 0)


async def test_an_engine_that_keeps_dying_while_loading_ends_the_server(supervised) -> None:
    client, _, _ = supervised
    with pytest.raises(EngineCannotStart, match=r"signal SIGKILL \(out of memory\?\) 3 times"):
        await client.run()
    assert client.starts == 3


async def test_an_engine_that_says_why_it_failed_is_not_tried_again(supervised) -> None:
    client, _, _ = supervised
    FakeLink.scripts = [[EngineFailed("no such file")]]
    with pytest.raises(EngineCannotStart, match="no such file"):
        await client.run()
    assert client.starts == 1


async def test_an_engine_that_was_ready_is_started_again_without_end(supervised) -> None:
    client, listener, _ = supervised
    FakeLink.scripts = [[READY] for _ in range(7)]
    with pytest.raises(EngineCannotStart):
        await client.run()
    assert client.starts == 7 + 3
    assert listener.notes.count("engine_ready") == 7
    with pytest.raises(EngineNotReady):
        client.submit(Submission("r", [1], SamplingParams(), 0.0))


async def test_what_fails_to_be_sent_is_not_waited_for(supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _, _ = supervised

    class Script(list):
        def __iter__(self):
            yield READY
            with pytest.raises(OverflowError):
                client.submit(Submission("r", [1 << 70], SamplingParams(), 0.0))
            assert not client.live

    monkeypatch.setattr(FakeLink, "send", lambda _self, message: encode(message))
    FakeLink.scripts = [Script()]
    with pytest.raises(EngineCannotStart):
        await client.run()
    assert FakeLink.scripts == []


async def test_each_change_hears_its_own_refusal_and_none_is_told_twice(supervised) -> None:
    client, _, knobs = supervised
    changes: list[KnobChange] = []

    class Script(list):
        def __iter__(self):
            yield READY
            for fraction in (0.001, 0.002):
                changes.append(knobs.patch(KnobsPatch({"kvMemoryFraction": fraction})))
                client.set_knobs(changes[-1])
            yield from (KnobsRefused(change.revision, f"no to {change.revision}") for change in changes)
            client.set_knobs(knobs.patch(KnobsPatch({"kvMemoryFraction": 0.9})))  # what runs already

    FakeLink.scripts = [Script()]
    with pytest.raises(EngineCannotStart):
        await client.run()
    for change in changes:
        with pytest.raises(KnobsNotTaken, match=f"no to {change.revision}"):
            await client.wait_applied(change.revision, 0.0)
    assert [m.revision for m in FakeLink.sent if isinstance(m, SetKnobs)] == [2, 3]


async def test_knobs_that_changed_while_loading_are_sent_when_it_is_ready(supervised) -> None:
    client, _, knobs = supervised

    class Script(list):
        def __iter__(self):
            client.set_knobs(knobs.patch(KnobsPatch({"maxNumSeqs": 3})))  # nobody there to tell yet
            return iter([READY])

    FakeLink.scripts = [Script()]
    with pytest.raises(EngineCannotStart):
        await client.run()
    assert [m.knobs["maxNumSeqs"] for m in FakeLink.sent if isinstance(m, SetKnobs)] == [3]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("reply", [ChatReply, CompletionReply])
def test_a_piece_of_text_is_the_same_event_token_after_token(reply: type[ChatReply | CompletionReply], usage: bool) -> None:
    made = reply("id", 'a "model"', ByteTokenizer(), n=2, include_usage=usage)
    for index, text in ((0, " word"), (1, "\x00text\x00"), (1, 'é"\n'), (0, "}]")):
        (event,) = made.pieces(Piece(index, text))
        document = json.loads(event.removeprefix(b"data: "))
        (choice,) = document["choices"]
        assert choice.get("text", choice.get("delta", {}).get("content")) == text
        assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (index, None, None)
        assert document["model"] == 'a "model"' and ("usage" in document) == usage
        assert event.endswith(b"}\n\n")
