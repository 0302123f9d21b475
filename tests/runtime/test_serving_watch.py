"""What watches a server, without processes: memory, slow requests, the forecast's correction, the ring of steps, hangs."""

from __future__ import annotations

import time

import pytest
from prometheus_client import REGISTRY

from paceline_core.knobs import Knobs
from paceline_core.wire import Gauges, RequestRecord, StepModelDocument, StepRecord
from paceline_runtime import slow_requests
from paceline_runtime.engine_client import EngineClient, EngineState
from paceline_runtime.forecast import EngineView, WaitForecast, retry_after
from paceline_runtime.knob_store import KnobStore
from paceline_runtime.memory_watch import MemoryWatch
from paceline_runtime.metrics import RuntimeMetrics
from paceline_runtime.observe import _StepRing
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.secret_file import SecretFile
from paceline_runtime.sequence import LiveSequence, Submission
from paceline_runtime.settings import EngineSettings
from paceline_runtime.slow_requests import SlowRequestLog


def test_memory_closes_and_opens_with_a_gap_between() -> None:
    heard: list[bool] = []
    watch = MemoryWatch(RuntimeMetrics("m"), 1000, heard.append)
    for api, engine in ((400, 400), (500, 455), (500, 420), (500, 399), (500, 440)):
        watch.look(api, engine)
    assert heard == [True, False]


def test_without_a_limit_memory_is_only_told() -> None:
    metrics = RuntimeMetrics("m")
    watch = MemoryWatch(metrics, None, pytest.fail)
    watch.look(10, 20)
    assert 'paceline_memory_bytes{engine="0",model_name="m",process="engine"} 20.0' in metrics.render().decode()
    assert REGISTRY.get_sample_value("paceline_memory_bytes") is None  # nothing goes into the global registry


def record(name: str = "r") -> RequestRecord:
    return RequestRecord(name, 0.0, 1, 1, "finished", 0, 0, parts={"slot": 2.0, "decode": 3.0}, delayed_by={"other": 1.0})


def test_slow_requests_are_logged_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict] = []
    monkeypatch.setattr(slow_requests, "log_event", lambda event, **fields: lines.append(fields))
    log = SlowRequestLog(1.0)
    assert not log.look(record(), 1.0, 100.0)
    assert all(log.look(record(), 5.0, 100.0) for _ in range(1000))
    assert len(lines) == 20
    log.look(record("later"), 5.0, 101.0)
    assert (lines[-1]["request_id"], lines[-1]["left_out"]) == ("later", 980)
    assert list(lines[0]["parts"]) == ["decode", "slot"]


def live(count: int, priority: int = 0) -> list[LiveSequence]:
    submission = Submission("r", [1], SamplingParams(), 0.0, priority)
    return [LiveSequence(number, submission, 0) for number in range(count)]


def view(waiting: list[LiveSequence], strategy: str = "continuous", running: int = 4) -> EngineView:
    knobs = Knobs(max_num_seqs=4).updated({"strategy": strategy})
    model = StepModelDocument(0.01, 0.001, 0.0001, 0.0, 0.0)
    started = live(running)
    for sequence in started:
        sequence.push((1,), 1.0)
    return EngineView(knobs, 1000, Gauges(running=running), model, [*started, *waiting])


def test_the_forecast_learns_from_how_long_requests_wait() -> None:
    forecast = WaitForecast()
    for _ in range(20):
        forecast.finished(100, 50)
    first = forecast.predict(view(live(8)))
    assert first > 0
    for _ in range(100):
        forecast.waited(forecast.predict(view(live(8))), 3 * first)
    assert forecast.predict(view(live(8))) == pytest.approx(3 * first, rel=0.05)
    for _ in range(200):
        forecast.waited(forecast.predict(view(live(8))), 1e-9)
    assert forecast.predict(view(live(8))) >= first / 8  # it never loses its head


def test_who_has_priority_does_not_wait_for_the_others() -> None:
    forecast = WaitForecast()
    queue = live(20, priority=100)
    assert forecast.predict(view(queue, "iteration"), 0) < forecast.predict(view(queue, "iteration"), 100)
    assert forecast.predict(view(queue), 0) == forecast.predict(view(queue), 100)


def test_without_a_model_nothing_is_forecast() -> None:
    assert WaitForecast().predict(EngineView(Knobs(), 10, Gauges(), None, live(9))) == 0.0


@pytest.mark.parametrize(("seconds", "text"), [(-3.0, "1"), (0.2, "1"), (1.2, "2"), (1e9, "600")])
def test_retry_after(seconds: float, text: str) -> None:
    assert retry_after(seconds) == text


def test_the_ring_of_steps_keeps_the_last_ones_exactly() -> None:
    ring = _StepRing(5)
    steps = [StepRecord(0.1 * i, 0.001 * i, i, 2 * i, 3 * i, 10**12 + i, 5 * i, 6, 7) for i in range(12)]
    assert list(ring.after(0)) == []
    for index, step in enumerate(steps):
        ring.append(10 * (index + 1), step)
    assert [record for _, record in ring.after(0)] == steps[-5:]
    assert [number for number, _ in ring.after(100)] == [110, 120]
    assert list(ring.after(120)) == []
    assert ring.lost_until == 70
    assert all(isinstance(record.context_tokens, int) for _, record in ring.after(0))


def hang(stalled: float, expected: float, silent: float = 0.0) -> str | None:
    client = EngineClient(EngineSettings(None, {}), KnobStore(Knobs()), None)  # type: ignore[arg-type]
    client.state = EngineState.READY
    client._stalled, client._expected, client._heard = stalled, expected, time.monotonic() - silent
    return client.hung(10.0)


@pytest.mark.parametrize(
    ("stalled", "expected", "silent", "words"),
    [
        (9.0, 0.1, 0.0, None),
        (11.0, 0.1, 0.0, "a step has been running for 11 s"),
        (25.0, 9.0, 0.0, None),  # such a step takes long, the model says
        (28.0, 9.0, 0.0, "9 s were expected"),
        (0.0, 0.0, 11.0, "has said nothing"),
    ],
)
def test_a_hang_is_told_from_a_long_step(stalled: float, expected: float, silent: float, words: str | None) -> None:
    found = hang(stalled, expected, silent)
    assert found is None if words is None else words in str(found)


def test_a_loading_engine_does_not_hang() -> None:
    client = EngineClient(EngineSettings(None, {}), KnobStore(Knobs()), None)  # type: ignore[arg-type]
    client._heard = 0.0
    assert client.hung(1.0) is None
    assert client.activity == "loading"


def test_a_secret_that_breaks_is_told_once(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline_runtime import secret_file
    from paceline_runtime.settings import SettingsError

    told: list[str] = []
    monkeypatch.setattr(secret_file, "log_event", lambda event, **_: told.append(event))

    def parse(path) -> str:
        if (text := path.read_text()) == "bad":
            raise SettingsError("bad")
        return text

    path = tmp_path / "s"
    path.write_text("one")
    secret = SecretFile(path, "keys", parse)
    for text, value in (("bad", "one"), ("bad", "one"), ("three", "three")):
        path.write_text(text)
        assert [secret.value() for _ in range(3)] == [value] * 3
    assert told.count("keys_reloaded") == 1 and 1 <= told.count("keys_kept") <= 2
