"""The admin port on the clock device: tokens, live knobs, rollback, observation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving_process import SLOW, TOKEN, RuntimeProcess, clock_runtime, events, eventually

from paceline_core.wire import KnobsDocument, ObserveDocument, from_json

START = {
    "strategy": "continuous", "maxNumSeqs": 8, "maxNumSeqsLimit": 16, "maxQueueDelay": "50ms", "staticFlush": "1s",
    "kvMemoryFraction": 0.9,
}  # fmt: skip


@pytest.fixture(scope="module")
def changing_runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuntimeProcess]:
    flags = ("--max-num-seqs", "8", "--max-num-seqs-limit", "16")
    with clock_runtime(tmp_path_factory.mktemp("runtime"), *flags) as runtime:
        yield runtime


@pytest.fixture
def runtime(changing_runtime: RuntimeProcess) -> RuntimeProcess:
    """One runtime for the tests that change its knobs, with the knobs that it started with."""
    changing_runtime.knobs(**START)
    return changing_runtime


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer é"])
@pytest.mark.parametrize("path", ["/admin/knobs", "/admin/observe", "/nothing"])
def test_nothing_without_a_token(shared_runtime: RuntimeProcess, header: str | None, path: str) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    answer = httpx.get(shared_runtime.admin_url + path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "unauthorized"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_the_token_rotates_without_a_gap(runtime: RuntimeProcess) -> None:
    def status(token: str) -> int:
        return httpx.get(runtime.admin_url + "/admin/knobs", headers={"Authorization": f"Bearer {token}"}).status_code

    def write(text: str) -> None:  # as a kubelet does: another file takes the place
        fresh = runtime.token_file.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(runtime.token_file)

    write(f"second\n{TOKEN}\n")
    assert (status("second"), status(TOKEN)) == (200, 200)
    write("second\n")
    assert (status("second"), status(TOKEN)) == (200, 401)
    runtime.token_file.unlink()
    assert status("second") == 200  # a mount that is being replaced locks nobody out
    write(TOKEN + "\n")
    assert (status("second"), status(TOKEN)) == (401, 200)


def test_knobs_document(runtime: RuntimeProcess) -> None:
    answer = runtime.admin.get("/admin/knobs")
    document = from_json(KnobsDocument, answer.json())
    assert document.knobs["maxNumSeqs"] == 8
    assert set(document.status.values()) == {"applied"}
    assert answer.headers["etag"] == f'"{document.revision}"'


def test_a_change_is_applied_and_rolled_back(runtime: RuntimeProcess) -> None:
    first = runtime.admin.get("/admin/knobs").json()
    changed = runtime.knobs(strategy="dynamic", maxNumSeqs=4, maxQueueDelay="20ms")
    assert changed["revision"] == first["revision"] + 1
    assert changed["epoch"] > first["epoch"]
    assert (changed["knobs"]["strategy"], changed["knobs"]["maxNumSeqs"]) == ("dynamic", 4)
    again = runtime.knobs(strategy="dynamic")
    assert again["revision"] == changed["revision"]  # nothing new: a repeated PATCH changes nothing
    back = runtime.admin.post("/admin/knobs/rollback")
    assert back.status_code == 200
    assert eventually(runtime._settled, "settled")["knobs"] == first["knobs"]
    assert runtime.metric("paceline_knob_revision") == changed["revision"] + 1


def test_without_a_change_there_is_nothing_to_roll_back(shared_runtime: RuntimeProcess) -> None:
    answer = shared_runtime.admin.post("/admin/knobs/rollback")
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "nothing_to_roll_back"


def test_a_lost_race_changes_nothing(runtime: RuntimeProcess) -> None:
    revision = runtime.admin.get("/admin/knobs").headers["etag"]
    assert runtime.admin.patch("/admin/knobs", json={"knobs": {"maxNumSeqs": 4}}, headers={"If-Match": revision}).is_success
    late = runtime.admin.patch("/admin/knobs", json={"knobs": {"maxNumSeqs": 2}}, headers={"If-Match": revision})
    assert late.status_code == 409
    assert late.json()["error"]["revision"] == int(late.headers["etag"].strip('"'))
    assert runtime.admin.get("/admin/knobs").json()["knobs"]["maxNumSeqs"] == 4


def test_an_old_leader_is_fenced(runtime: RuntimeProcess) -> None:
    assert runtime.admin.patch("/admin/knobs", json={"knobs": {"maxNumSeqs": 4}, "fencing": 7}).is_success
    assert runtime.admin.patch("/admin/knobs", json={"knobs": {"maxNumSeqs": 2}, "fencing": 6}).status_code == 409
    assert runtime.admin.patch("/admin/knobs", json={"knobs": {"maxNumSeqs": 2}, "fencing": 7}).is_success


def test_bad_knobs_are_all_named(runtime: RuntimeProcess) -> None:
    before = runtime.admin.get("/admin/knobs").json()
    answer = runtime.admin.patch("/admin/knobs", json={"knobs": {"maxNumSeqs": 0, "strategy": "magic", "speed": 1}})
    assert answer.status_code == 422
    violations = {v["field"]: v for v in answer.json()["error"]["violations"]}
    assert set(violations) == {"maxNumSeqs", "strategy", "speed"}
    assert violations["maxNumSeqs"]["bound"] == "1 ≤ value ≤ 65536"
    crossed = runtime.admin.patch("/admin/knobs", json={"knobs": {"maxNumBatchedTokens": 4}})
    assert crossed.status_code == 422
    assert "maxNumSeqs" in crossed.json()["error"]["message"]
    assert runtime.admin.get("/admin/knobs").json() == before


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 422),
        (b'{"knobs": 5}', 422),
        (b"{}", 422),
        (b'{"knobs": {}, "schemaVersion": 9}', 422),
        (b'{"knobs": {"kvMemoryFraction": NaN}}', 400),
        (b'{"knobs": {"kvMemoryFraction": 1e999}}', 400),
        (b'{"knobs": {"strategy": "\\ud800"}}', 400),
    ],
)
def test_bad_bodies(shared_runtime: RuntimeProcess, body: bytes, status: int) -> None:
    answer = shared_runtime.admin.patch("/admin/knobs", content=body)
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize("value", ["x", '"x"', "-1", "1.5"])
def test_bad_if_match(shared_runtime: RuntimeProcess, value: str) -> None:
    answer = shared_runtime.admin.patch("/admin/knobs", json={"knobs": {}}, headers={"If-Match": value})
    assert answer.status_code == 400


def test_what_needs_a_restart_says_so(runtime: RuntimeProcess) -> None:
    document = runtime.knobs(maxNumSeqsLimit=64, maxNumSeqs=32, staticFlush="2s")
    assert document["status"]["maxNumSeqsLimit"] == "needs-restart"
    assert document["status"]["maxNumSeqs"] == "needs-restart"  # above the limit that this engine was started with
    assert document["status"]["staticFlush"] == "applied"
    assert document["desired"] == {"maxNumSeqsLimit": 64, "maxNumSeqs": 32}
    assert (document["knobs"]["maxNumSeqs"], document["knobs"]["maxNumSeqsLimit"]) == (8, 16)


def test_changes_under_load_drop_no_request_and_keep_the_processes(runtime: RuntimeProcess) -> None:
    engine = runtime.engine_pid
    stop = threading.Event()
    outcomes: list[tuple[int, int]] = []

    def client() -> None:
        with httpx.Client(base_url=runtime.url, timeout=60) as http:
            while not stop.is_set():
                answer = http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 20})
                outcomes.append((answer.status_code, answer.json().get("usage", {}).get("completion_tokens", 0)))

    with ThreadPoolExecutor(12) as pool:
        clients = [pool.submit(client) for _ in range(12)]
        for strategy in ("static", "dynamic", "iteration", "continuous", "static", "continuous"):
            document = runtime.knobs(strategy=strategy, maxNumSeqs=4, staticFlush="50ms")
            assert document["knobs"]["strategy"] == strategy
            seen = len(outcomes)
            eventually(lambda n=seen: len(outcomes) >= n + 12, "requests are answered under the new strategy")
        stop.set()
        for future in clients:
            future.result()
    assert set(outcomes) == {(200, 20)}
    assert runtime.engine_pid == engine
    assert runtime.process.poll() is None


def test_streams_go_on_through_switches_and_a_resized_pool(runtime: RuntimeProcess) -> None:
    runtime.knobs(kvMemoryFraction=0.5)
    with runtime.stream(max_tokens=1500) as response:
        chunks = events(response)
        texts = [next(chunks)["choices"][0]["text"]]
        before = runtime.gauges()["kvBlocksTotal"]
        for knobs in (
            {"strategy": "static"},
            {"kvMemoryFraction": 0.25},
            {"strategy": "iteration"},
            {"kvMemoryFraction": 0.5},
        ):
            document = runtime.knobs(**knobs)
            name, value = next(iter(knobs.items()))
            assert document["knobs"][name] == value
            texts.append(next(chunks)["choices"][0]["text"])
            if "kvMemoryFraction" in knobs:
                eventually(lambda v=value: runtime.gauges()["kvBlocksTotal"] == before * v / 0.5, "the pool is resized")
                assert runtime.metric("vllm:cache_config_info", num_gpu_blocks=str(int(before * value / 0.5))) == 1
        rest = list(chunks)
    assert rest[-1] == "[DONE]"
    assert rest[-2]["choices"][0]["finish_reason"] == "length"
    whole = runtime.complete(max_tokens=1500).json()["choices"][0]["text"]
    assert "".join(texts) + "".join(c["choices"][0]["text"] for c in rest[:-1]) == whole


def test_observe_gives_requests_and_steps_once(runtime: RuntimeProcess) -> None:
    start = runtime.admin.get("/admin/observe").json()["cursor"]
    for _ in range(3):
        runtime.complete(prompt="secret " * 10, max_tokens=4).raise_for_status()
    answer = runtime.admin.get("/admin/observe", params={"since": start})
    assert "secret" not in answer.text
    document = from_json(ObserveDocument, answer.json())
    assert [r.outcome for r in document.requests] == ["finished"] * 3
    assert [r.output_tokens for r in document.requests] == [4] * 3
    first, second, _ = document.requests
    assert len(first.prefix_hashes) == 70 // 16
    assert first.prefix_hashes == second.prefix_hashes
    assert first.first_token is not None and first.end is not None and first.first_scheduled is not None
    assert first.arrival <= first.first_scheduled <= first.first_token <= first.end
    assert second.cached_tokens > 0  # the same prompt again
    assert len(document.steps) == 12
    assert document.step_model is not None
    later = from_json(ObserveDocument, runtime.admin.get("/admin/observe", params={"since": document.cursor}).json())
    assert (later.requests, later.steps, later.truncated) == ((), (), False)
    runtime.complete(max_tokens=1).raise_for_status()
    news = from_json(ObserveDocument, runtime.admin.get("/admin/observe", params={"since": document.cursor}).json())
    assert (len(news.requests), len(news.steps)) == (1, 1)


def test_observe_shows_what_is_unfinished(start_runtime) -> None:
    runtime = start_runtime(model=SLOW)
    with runtime.stream(max_tokens=1000) as response:
        chunks = events(response)
        next(chunks)
        document = from_json(ObserveDocument, runtime.admin.get("/admin/observe").json())
        assert [(r.outcome, r.end) for r in document.requests] == [("unfinished", None)]
        assert document.requests[0].output_tokens >= 1


@pytest.mark.parametrize("since", ["-1", "x"])
def test_a_bad_cursor(shared_runtime: RuntimeProcess, since: str) -> None:
    answer = shared_runtime.admin.get("/admin/observe", params={"since": since})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "since"


def test_drain_by_request(start_runtime) -> None:
    runtime = start_runtime("--drain-propagation", "10ms", "--drain-timeout", "60s", model=SLOW)
    with runtime.stream(max_tokens=20) as response:
        chunks = events(response)
        next(chunks)
        answer = runtime.admin.post("/admin/drain")
        assert answer.status_code == 202
        assert answer.json()["inFlight"] == 1
        assert runtime.http.get("/health/ready").status_code == 503
        refused = eventually(lambda: (a := runtime.complete(max_tokens=1)).status_code == 503 and a, "new work is refused")
        assert refused.headers["retry-after"]
        assert list(chunks)[-1] == "[DONE]"
    assert runtime.process.poll() is None
