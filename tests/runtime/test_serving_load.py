"""Behaviour under load on the clock device: queue bounds, keys, tiers, slow readers, odd clients, records, metrics."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from serving_process import FAST, PATIENCE, SLOW, RuntimeProcess, events, eventually
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from paceline_core.causes import PARTS
from paceline_core.knobs import Knobs
from paceline_core.request import BATCH_PRIORITY, FinishReason
from paceline_core.wire import Gauges, ObserveDocument, RequestRecord, TimelineDocument, from_json
from paceline_runtime import api_middleware, http_protocol
from paceline_runtime.admission import Admission
from paceline_runtime.api_errors import ApiError
from paceline_runtime.call_options import CallOptions
from paceline_runtime.drain import Drain
from paceline_runtime.engine_client import EngineClient, EngineState
from paceline_runtime.knob_store import KnobStore
from paceline_runtime.messages import SequenceEnded, StepOutput, StepStatistics
from paceline_runtime.metrics import RuntimeMetrics
from paceline_runtime.observe import ObserveLog
from paceline_runtime.recorder import Recorder
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.sequence import LiveSequence, Submission
from paceline_runtime.settings import EngineSettings, RuntimeSettings

# one sequence at a time, 50 ms a token
ONE_SLOT = ("--max-num-seqs", "1")


def records(runtime: RuntimeProcess) -> list[RequestRecord]:
    return list(from_json(ObserveDocument, runtime.admin.get("/admin/observe").json()).requests)


def record_of(runtime: RuntimeProcess, request_id: str) -> RequestRecord:
    found = [r for r in records(runtime) if r.request_id == request_id]
    assert len(found) == 1, found
    return found[0]


@contextmanager
def streams(runtime: RuntimeProcess, count: int, max_tokens: int = 1000) -> Iterator[None]:
    """That many streams that go on; each has begun."""
    with ExitStack() as stack:
        open_streams = [events(stack.enter_context(runtime.stream(max_tokens=max_tokens))) for _ in range(count)]
        for stream in open_streams:
            next(stream)
        yield


# -- the queue ------------------------------------------------------------------------------------------------------------


def test_a_predicted_wait_above_the_bound_is_a_429_that_says_when_to_come_back(start_runtime) -> None:
    runtime = start_runtime(*ONE_SLOT, "--max-queue-wait", "2s", model=SLOW)
    eventually(lambda: runtime.admin.get("/admin/observe").json()["stepModel"], "there is a step-time model")
    with streams(runtime, 1):
        answer = runtime.http.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 5}, headers={"X-Request-Id": "turned-away"}
        )
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "queue_wait"
    # nothing has finished yet, so 256 tokens of 50 ms are expected of whoever is before
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    assert runtime.metric("paceline_refusals_total", reason="queue_wait") == 1
    record = record_of(runtime, "turned-away")
    assert (record.outcome, record.reason, record.output_tokens) == ("refused", "queue_wait", 0)


def test_a_queue_that_is_full_by_count(start_runtime) -> None:
    runtime = start_runtime(*ONE_SLOT, "--max-queue-len", "2", model=SLOW)
    with ThreadPoolExecutor(2) as pool:
        with streams(runtime, 1):
            waiting = [pool.submit(runtime.complete, max_tokens=1) for _ in range(2)]
            eventually(lambda: runtime.gauges()["waiting"] == 2, "two wait")
            answer = runtime.complete(max_tokens=1)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
            assert int(answer.headers["retry-after"]) >= 1
            assert runtime.metric("paceline_predicted_wait_seconds") > 0
        assert [w.result().status_code for w in waiting] == [200, 200]


def behind_by(seconds: float) -> tuple[EngineClient, Admission, StepStatistics]:
    """A server that has just looked at a step that ended so long ago; sequence 1 goes on."""
    settings = RuntimeSettings(EngineSettings(None, {}), "m")
    knobs = KnobStore(Knobs())
    recorder = Recorder(RuntimeMetrics("m"), ObserveLog(), knobs, b"k", 1.0)
    client = EngineClient(settings.engine, knobs, recorder)
    admission = Admission(settings, knobs, client, Drain(0, 0, lambda: None), recorder)
    client.state = EngineState.READY
    step = StepStatistics(time.monotonic() - seconds, 0.01, 0, 1, 0, 1, 0)
    client._live[1] = LiveSequence(1, Submission("r", [1], SamplingParams(), 0.0), 0)
    client._stepped(StepOutput({1: (5,)}, [], Gauges(running=1), step))
    return client, admission, step


def ended_as(reason: FinishReason) -> SequenceEnded:
    return SequenceEnded(1, reason, 1, time.monotonic(), parts=(0.0,) * len(PARTS))


def test_a_server_that_is_behind_takes_nothing_new() -> None:
    client, admission, step = behind_by(8.5)
    with pytest.raises(ApiError) as error:
        admission.check(CallOptions("r"))
    client._stepped(StepOutput({}, [ended_as(FinishReason.LENGTH)], Gauges(), step))
    assert admission.check(CallOptions("r")) == 0.0  # nothing is left to be behind with
    assert (error.value.status, error.value.code, error.value.headers["Retry-After"]) == (429, "overloaded", "9")


def test_a_server_whose_clients_all_gave_up_is_not_behind_any_more() -> None:
    """Aborts end in turns without a step, and no other step would come: nothing new is let in to cause one."""
    client, admission, _ = behind_by(8.5)
    client._stepped(StepOutput({}, [ended_as(FinishReason.ABORT)], Gauges()))
    assert admission.check(CallOptions("r")) == 0.0


def test_a_server_is_not_behind_with_what_a_dead_engine_said() -> None:
    client, admission, _ = behind_by(8.5)
    client._lose_all("was ended by signal SIGKILL")
    client.state = EngineState.READY
    assert admission.check(CallOptions("r")) == 0.0


def test_hopeless_work_is_refused_before_it_waits(start_runtime) -> None:
    runtime = start_runtime(*ONE_SLOT, model=SLOW)
    eventually(lambda: runtime.admin.get("/admin/observe").json()["stepModel"], "there is a step-time model")
    with streams(runtime, 1):
        answer = runtime.http.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 5}, headers={"X-Request-Timeout": "1s"}
        )
    # what waits in vain until its deadline gets a 504
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "deadline_unreachable")


def test_batch_work_waits_behind_interactive_work(start_runtime) -> None:
    runtime = start_runtime(*ONE_SLOT, "--batching-strategy", "iteration", model=SLOW)

    def ask(tier: str) -> float:
        answer = runtime.http.post(
            "/v1/completions", json={"prompt": tier, "max_tokens": 4}, headers={"X-Request-Priority": tier}
        )
        assert answer.status_code == 200
        return time.monotonic()

    with ThreadPoolExecutor(4) as pool:
        with streams(runtime, 1):
            batch = [pool.submit(ask, "batch") for _ in range(2)]
            eventually(lambda: runtime.gauges()["waiting"] == 2, "batch work waits")
            urgent = [pool.submit(ask, "interactive") for _ in range(2)]
            eventually(lambda: runtime.gauges()["waiting"] == 4, "all wait")
        assert max(u.result() for u in urgent) < min(b.result() for b in batch)


@pytest.mark.parametrize("value", ["urgent", "1.5", "99999999999999", ""])
def test_a_bad_priority_is_a_400(shared_runtime: RuntimeProcess, value: str) -> None:
    answer = shared_runtime.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Priority": value})
    assert answer.status_code == 400


# -- keys -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def keyed(start_runtime, tmp_path: Path) -> tuple[RuntimeProcess, Path]:
    path = tmp_path / "keys"
    path.write_text("# who may ask\nweb key-web\nweb key-web-next\nnightly key-nightly tier=batch\n")
    runtime = start_runtime("--api-key-file", str(path), "--batching-strategy", "iteration")
    return runtime, path


def asked(runtime: RuntimeProcess, key: str | None, **headers: str) -> httpx.Response:
    authorization = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"prompt": "the same prompt for everybody, long enough for blocks", "max_tokens": 3}
    return runtime.http.post("/v1/completions", json=body, headers={**authorization, **headers})


def test_keys_open_the_api_and_nothing_else_needs_one(keyed) -> None:
    runtime, _ = keyed
    for key in (None, "x", "key-we", "key-webb", "key-nightly tier=batch"):
        answer = asked(runtime, key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["x-request-id"]
    for path in ("/v1/models", "/tokenize"):
        assert runtime.http.get(path).status_code == 401
    for path in ("/health/live", "/health/ready", "/metrics", "/version"):
        assert runtime.http.get(path).status_code == 200
    assert asked(runtime, "key-web").status_code == asked(runtime, "key-web-next").status_code == 200


def test_keys_are_counted_by_name_and_share_no_cache_with_others(keyed) -> None:
    runtime, _ = keyed
    for key in ("key-web", "key-web-next", "key-nightly"):
        asked(runtime, key, **{"X-Request-Id": key}).raise_for_status()
    assert runtime.metric("paceline_api_key_tokens_total", key="web", kind="output") == 6
    assert runtime.metric("paceline_api_key_requests_total", key="nightly", outcome="finished") == 1
    text = runtime.http.get("/metrics").text + runtime.admin.get("/admin/observe").text + runtime.log
    assert "key-web" not in text.replace('"requestId":"key-web', "")
    web, again, nightly = (record_of(runtime, key) for key in ("key-web", "key-web-next", "key-nightly"))
    assert (web.tenant, nightly.tenant) == ("web", "nightly")
    assert (web.priority, nightly.priority) == (0, BATCH_PRIORITY)
    assert again.cached_tokens > 0  # the same name
    assert nightly.cached_tokens == 0  # another's prompt can't be told from how fast the answer comes
    assert web.prefix_hashes == again.prefix_hashes != nightly.prefix_hashes


@pytest.mark.parametrize(
    ("body", "priority"),
    [
        ({"service_tier": "flex"}, BATCH_PRIORITY),
        ({"service_tier": "priority"}, 0),
        ({"service_tier": "auto"}, 0),
        ({"priority": 7}, 7),
        ({"priority": -3, "service_tier": "flex"}, -3),
        ({"priority": None, "service_tier": None}, 0),
    ],
)
def test_the_body_says_how_urgent_it_is(shared_runtime: RuntimeProcess, body: dict[str, Any], priority: int) -> None:
    for number, (path, prompt) in enumerate(
        (("completions", {"prompt": "x"}), ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}))
    ):
        name = f"body-{number}-{priority}-{len(body)}-{body.get('service_tier')}"
        request = {**prompt, **body, "max_tokens": 2}
        shared_runtime.http.post("/v1/" + path, json=request, headers={"X-Request-Id": name}).raise_for_status()
        assert record_of(shared_runtime, name).priority == priority
    headers = {"X-Request-Id": name + "-header", "X-Request-Priority": "11"}
    shared_runtime.http.post("/v1/completions", json={"prompt": "x", **body}, headers=headers).raise_for_status()
    assert record_of(shared_runtime, name + "-header").priority == 11


@pytest.mark.parametrize("body", [{"priority": "high"}, {"priority": 2**40}, {"priority": 1.5}, {"service_tier": "gold"}])
def test_a_bad_priority_in_the_body_is_a_400(shared_runtime: RuntimeProcess, body: dict[str, Any]) -> None:
    answer = shared_runtime.http.post("/v1/completions", json={"prompt": "x", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(body))


def test_the_body_gets_nobody_ahead_of_their_key(keyed) -> None:
    runtime, _ = keyed
    headers = {"Authorization": "Bearer key-nightly"}
    for name, body in (("tier", {"service_tier": "priority"}), ("number", {"priority": -9}), ("late", {"priority": 500})):
        request = {"prompt": "x", "max_tokens": 2, **body}
        answer = runtime.http.post("/v1/completions", json=request, headers={**headers, "X-Request-Id": name})
        answer.raise_for_status()
    assert [record_of(runtime, name).priority for name in ("tier", "number", "late")] == [
        BATCH_PRIORITY,
        BATCH_PRIORITY,
        500,
    ]


def test_nobody_gets_ahead_of_what_their_key_allows(keyed) -> None:
    runtime, _ = keyed
    asked(runtime, "key-nightly", **{"X-Request-Priority": "-5", "X-Request-Id": "pushy"}).raise_for_status()
    asked(runtime, "key-web", **{"X-Request-Priority": "batch", "X-Request-Id": "modest"}).raise_for_status()
    assert record_of(runtime, "pushy").priority == BATCH_PRIORITY
    assert record_of(runtime, "modest").priority == BATCH_PRIORITY


def test_keys_change_without_a_restart_and_a_broken_file_changes_nothing(keyed) -> None:
    runtime, path = keyed

    def write(text: str) -> None:
        fresh = path.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(path)

    write("web key-web-next\nnew key-new priority=3\n")
    assert [asked(runtime, key).status_code for key in ("key-web", "key-web-next", "key-new")] == [401, 200, 200]
    write("web\n")
    assert asked(runtime, "key-web-next").status_code == 200
    assert "api_keys_kept" in runtime.log and "key-" not in runtime.log
    path.unlink()
    assert asked(runtime, "key-web-next").status_code == 200


# -- clients that misbehave -----------------------------------------------------------------------------------------------


def connect(runtime: RuntimeProcess) -> socket.socket:
    host, port = runtime.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def test_a_client_that_never_reads_is_given_up_and_stalls_nobody(start_runtime) -> None:
    runtime = start_runtime("--read-timeout", "1s", "--max-num-seqs", "8", model={**FAST, "constant": 0.001})
    # one token of the answer is an event of some 300 bytes; 8,000 of them are more than the buffers of a small window hold
    body = json.dumps({"prompt": "x", "max_tokens": 8000, "stream": True, "n": 2}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = runtime.url.removeprefix("http://").split(":")
        lazy.connect((host, int(port)))
        lazy.sendall(head.encode() + body)
        eventually(lambda: runtime.gauges()["running"] == 2, "it runs")
        assert runtime.complete(max_tokens=20).json()["usage"]["completion_tokens"] == 20  # others are served meanwhile
        eventually(lambda: "event=slow_reader" in runtime.log, "it is given up")
        eventually(lambda: runtime.gauges()["running"] == 0, "its slots are free")
    assert runtime.gauges()["kvBlocksUsed"] == 0
    aborted = runtime.metric("paceline_aborts_total", reason="slow_reader")
    assert aborted + sum(r.outcome == "finished" and r.output_tokens == 8000 for r in records(runtime)) >= 2


def test_heads_are_bounded(shared_runtime: RuntimeProcess) -> None:
    with connect(shared_runtime) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nX-Long: ")
        client.sendall(b"a" * (80 << 10))
        answer = client.recv(1000)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert shared_runtime.http.get("/version").status_code == 200


async def test_heads_that_never_come_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.05)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("no request came")

    config = uvicorn.Config(app, http=http_protocol.BoundedHttp, lifespan="off", log_config=None)
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: http_protocol.BoundedHttp(config, state, {}), "127.0.0.1", 0)
    async with server:
        address = server.sockets[0].getsockname()
        for said, answer in ((b"", b""), (b"GET / HTTP/1.1\r\nHost", b"HTTP/1.1 408 Request Timeout\r\n")):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(said)
            assert (await asyncio.wait_for(reader.read(), PATIENCE)).startswith(answer)
            writer.close()
            await writer.wait_closed()


def test_no_other_site_may_ask_from_a_browser(shared_runtime: RuntimeProcess) -> None:
    headers = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"}
    for answer in (shared_runtime.http.options("/v1/completions", headers=headers), shared_runtime.http.get("/version")):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_head_may_come_in_pieces_and_connections_are_reused(shared_runtime: RuntimeProcess) -> None:
    with connect(shared_runtime) as client:
        for _ in range(3):
            for piece in (b"GET /version HT", b"TP/1.1\r\nHost: x\r\n", b"\r\n"):
                client.sendall(piece)
            answer = b""
            while not answer.endswith(b"}"):
                answer += client.recv(4000)
            assert answer.startswith(b"HTTP/1.1 200 ")


async def test_bodies_that_never_come_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_middleware, "BODY_SECONDS", 0.01)
    drain = Drain(0, 0, lambda: None)

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    gate = api_middleware.WorkGate(app, drain, max_body=100, read_timeout=1.0)
    scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(HTTPException) as error:
        await gate(scope, never, lambda message: asyncio.sleep(0))
    assert error.value.status_code == 408
    assert drain.in_flight == 0


# -- what is told ---------------------------------------------------------------------------------------------------------


def test_a_slow_request_is_logged_with_its_causes(start_runtime) -> None:
    runtime = start_runtime(*ONE_SLOT, "--slow-request", "500ms", "--log-format", "text", model=SLOW)
    with ThreadPoolExecutor(1) as pool:
        with streams(runtime, 1):
            body, headers = {"prompt": "secret", "max_tokens": 2}, {"X-Request-Id": "slow-one"}
            answer = pool.submit(runtime.http.post, "/v1/completions", json=body, headers=headers)
            eventually(lambda: runtime.gauges()["waiting"] == 1, "it waits")
            time.sleep(0.7)
        answer.result().raise_for_status()
    line = eventually(lambda: re.search(r"event=slow_request request_id=slow-one .*", runtime.log), "it is logged")[0]
    assert "slot" in line and "secret" not in line
    record = record_of(runtime, "slow-one")
    assert record.parts["slot"] == max(record.parts.values())
    assert record.end is not None
    assert sum(record.parts.values()) >= record.end - record.arrival - 0.01
    assert record.parts["decode"] == pytest.approx(0.05, rel=0.5)
    assert runtime.metric("paceline_slow_requests_total") >= 1
    assert runtime.metric("paceline_request_part_seconds_sum", part="slot") >= 0.3


def test_a_stopped_engine_shows_as_a_gap(start_runtime) -> None:
    runtime = start_runtime(model=SLOW)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            runtime.http.post, "/v1/completions", json={"prompt": "x", "max_tokens": 30}, headers={"X-Request-Id": "paused"}
        )
        eventually(lambda: runtime.gauges()["running"] == 1, "it runs")
        os.kill(runtime.engine_pid, signal.SIGSTOP)
        began = time.monotonic()
        time.sleep(1.0)
        os.kill(runtime.engine_pid, signal.SIGCONT)
        paused = time.monotonic() - began
        answer.result().raise_for_status()
    assert record_of(runtime, "paused").parts["gap"] >= 0.9 * paused


def test_the_timeline_shows_who_was_in_each_step_while_somebody_looks(start_runtime) -> None:
    runtime = start_runtime(model=SLOW)

    def look(since: int = 0) -> TimelineDocument:
        return from_json(TimelineDocument, runtime.admin.get("/admin/timeline", params={"since": since}).json())

    runtime.complete(max_tokens=3).raise_for_status()
    assert look().steps == ()  # nobody was looking
    answer = runtime.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3}, headers={"X-Request-Id": "seen"})
    answer.raise_for_status()
    document = eventually(lambda: (d := look()) and len(d.steps) == 3 and d, "its steps are there")
    assert [[(m.request_id, m.tokens, m.prefill) for m in s.members] for s in document.steps] == [
        [("seen", 3, True)], [("seen", 1, False)], [("seen", 1, False)],
    ]  # fmt: skip
    assert [s.step for s in document.steps] == [1, 2, 3]
    assert look(since=document.cursor).steps == ()
    assert all(step.duration == pytest.approx(0.05, rel=0.1) for step in document.steps)


def test_liveness_says_what_the_engine_does(start_runtime) -> None:
    runtime = start_runtime("--hang-timeout", "3s", model={**SLOW, "prefillTokens": 0.03})
    assert runtime.http.get("/health/live").text == "ok: serving\n"
    eventually(lambda: runtime.admin.get("/admin/observe").json()["stepModel"], "there is a step-time model")
    with ThreadPoolExecutor(1) as pool:
        # one step of 6 s, twice the timeout: but the model knows that such a prompt takes so long
        answer = pool.submit(runtime.complete, prompt="x" * 200, max_tokens=1)
        text = eventually(lambda: (a := runtime.http.get("/health/live")).text != "ok: serving\n" and a, "a step runs long")
        assert text.status_code == 200, text.text
        assert re.fullmatch(r"ok: a step has been running for \d+ s, [56]\.?\d* s are expected\n", text.text), text.text
        assert answer.result().status_code == 200


def test_what_metrics_tell(start_runtime) -> None:
    runtime = start_runtime()
    for _ in range(2):
        runtime.complete(prompt="0123456789" * 5, max_tokens=4).raise_for_status()
    assert runtime.metric("vllm:request_success_total", finished_reason="length") == 2
    assert runtime.metric("vllm:prefix_cache_queries_total") == 100
    assert runtime.metric("vllm:prefix_cache_hits_total") == 48  # three full blocks of the second one
    assert runtime.metric("vllm:iteration_tokens_total_count") == 8
    assert runtime.metric("vllm:request_params_max_tokens_sum") == 8
    assert runtime.metric("vllm:request_params_n_count") == 2
    assert runtime.metric("vllm:request_queue_time_seconds_count") == 2
    assert runtime.metric("paceline_request_part_seconds_count", part="prefill") == 2
    assert runtime.metric("paceline_kv_blocks", state="total") == runtime.gauges()["kvBlocksTotal"]
    eventually(lambda: runtime.metric("paceline_memory_bytes", process="engine") > 1e7, "memory is told")
    eventually(lambda: runtime.metric("paceline_step_model_steps") > 0, "the model is told")
