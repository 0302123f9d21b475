"""Traces: one span per sequence, under the client's own, with its causes; nothing is loaded unless asked for."""

from __future__ import annotations

import builtins
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from serving_process import eventually

from paceline_core.wire import RequestRecord
from paceline_runtime.settings import SettingsError
from paceline_runtime.tracing import Tracing, open_tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def record(**changes: object) -> RequestRecord:
    fields = {"outcome": "finished", "first_scheduled": 10.5, "first_token": 11.0, "end": 12.0, "max_tokens": 8, **changes}
    return RequestRecord(
        "r-1", 10.0, 20, 5, epoch=3, end_epoch=3, parts={"slot": 0.5, "decode": 1.5}, delayed_by={"r-0": 0.1}, **fields
    )  # type: ignore[arg-type]


def spans_of(*calls: tuple[RequestRecord, str]) -> list:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter), "smol")
    for one, parent in calls:
        tracing.record(one, parent, 12.5)
    tracing.close()
    return list(exporter.get_finished_spans())


def test_a_record_becomes_a_span() -> None:
    (span,) = spans_of((record(), PARENT))
    assert (span.start_time, span.end_time) == (10_000_000_000, 12_500_000_000)
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert span.attributes["gen_ai.latency.time_to_first_token"] == 1.0
    assert span.attributes["gen_ai.usage.completion_tokens"] == 5
    assert span.attributes["paceline.latency.slot"] == 0.5
    assert span.attributes["paceline.delayed_by"] == ("r-0",)
    assert [(event.name, event.timestamp) for event in span.events] == [("first_token", 11_000_000_000)]
    assert span.status.is_unset


@pytest.mark.parametrize("parent", ["", "garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_without_a_usable_parent_the_span_is_a_root(parent: str) -> None:
    (span,) = spans_of((record(), parent))
    assert span.parent is None


def test_what_did_not_finish_is_an_error() -> None:
    (span,) = spans_of((record(outcome="aborted", reason="client", first_token=None), ""))
    assert (span.status.is_ok, span.status.description, span.events) == (False, "client", ())


def test_a_missing_extra_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SettingsError, match=r"pip install 'paceline\[otel\]'"):
        open_tracing("http://localhost:1/v1/traces", "m")


@pytest.mark.parametrize("endpoint", ["collector", "collector:4318", "ftp://collector", "http://"])
def test_what_is_no_address_is_refused_at_once(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="is no address"):
        open_tracing(endpoint, "m")


def test_nothing_is_loaded_unless_asked_for() -> None:
    code = "import sys, paceline_runtime.server; sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_a_server_sends_its_traces(start_runtime) -> None:
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        runtime = start_runtime("--otlp-traces-endpoint", url, "--drain-propagation", "1ms")
        body = {"prompt": "very secret", "max_tokens": 2}
        headers = {"traceparent": PARENT, "X-Request-Id": "traced"}
        runtime.http.post("/v1/completions", json=body, headers=headers).raise_for_status()
        runtime.process.terminate()
        assert runtime.process.wait(60) == 0  # what is left is sent at the end
        eventually(lambda: bodies, "a trace came")
        collector.shutdown()
    sent = b"".join(bodies)
    assert b"llm_request" in sent and b"traced" in sent and bytes.fromhex(PARENT.split("-")[1]) in sent
    assert b"secret" not in sent
