"""`paceline bench` against a small server of our own: its figures, its report, and what it says when it can't."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from paceline_cli.__main__ import cli
from paceline_cli.bench_figures import measure
from paceline_cli.bench_traffic import Server, prompts_of
from paceline_cli.load import Outcome
from paceline_core.errors import FormatError
from paceline_sim import Slo, Trace, TraceRequest


class Completions(BaseHTTPRequestHandler):
    """Two tokens per word of the prompt; every fifth completion is refused if `refuse` is set."""

    protocol_version = "HTTP/1.1"
    refuse = False
    usage = True
    seen: list
    active = most = 0
    lock = threading.Lock()

    def do_GET(self):
        self._json({"data": [{"id": "tiny"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((body, self.headers.get("Authorization")))
        usage = {"prompt_tokens": 2 * len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
        if not body.get("stream"):
            return self._json({"usage": usage if self.usage else None})
        if self.refuse and len(self.seen) % 5 == 0:
            return self._json({"error": "busy"}, 429)
        with self.lock:
            type(self).active += 1
            type(self).most = max(self.most, self.active)
        events = [{"choices": [{"text": "x"}]}] * body["max_tokens"] + [{"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        with self.lock:
            type(self).active -= 1
        return self._send(text.encode(), "text/event-stream", 200)

    def _json(self, document, status=200):
        self._send(json.dumps(document).encode(), "application/json", status)

    def _send(self, body, kind, status):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class PatientServer(ThreadingHTTPServer):
    request_queue_size = 128  # a load connects all at once, and with the default of 5 some would be refused


@pytest.fixture
def start():
    servers = []

    def begin(**settings):
        handler = type("Handler", (Completions,), {"seen": [], **settings})
        server = PatientServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}", handler

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


def invoke(*arguments, **environment):
    return CliRunner(env=environment).invoke(cli, ["bench", *map(str, arguments)])


def test_a_load_is_measured_and_reported(start, tmp_path):
    url, handler = start()
    report, plot = tmp_path / "report.html", tmp_path / "plot.svg"
    result = invoke("--url", url, "--requests", 20, "--slo", "ttft=60s", "--report", report, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert "tiny at" in result.output
    assert "(100.0%" in result.output
    page = report.read_text()
    assert page.count("<svg") == 1
    assert "20 requests in" in page
    assert "<svg" in plot.read_text()
    loads = [body for body, _ in handler.seen if body.get("stream")]
    assert len(loads) == 20
    assert all(body["ignore_eos"] and body["model"] == "tiny" for body in loads)


def test_json_figures_and_a_closed_loop(start):
    url, handler = start()
    result = invoke("--url", url + "/v1/", "--requests", 30, "--closed", 3, "--json", OPENAI_API_KEY="k1")
    figures = json.loads(result.output)
    assert figures["requests"] == 30
    assert figures["failed"] == 0
    assert figures["output_tokens"] == sum(body["max_tokens"] for body, _ in handler.seen if body.get("stream"))
    assert 1 <= figures["most_in_flight"] <= 3
    assert {key for _, key in handler.seen} == {"Bearer k1"}


def test_failures_are_counted_named_and_exit_1(start):
    url, _ = start(refuse=True)
    result = CliRunner().invoke(cli, ["bench", "--url", url, "--requests", "20"], standalone_mode=False)
    assert result.return_value == 1  # which the entry point makes the exit code
    assert "failed: HTTP 429" in result.output


def test_made_up_traffic_has_its_lengths(start):
    url, handler = start()
    result = invoke("--url", url, "--generate", "rate=50,duration=1s,prompt=64,output=5", "--json")
    figures = json.loads(result.output)
    assert figures["output_tokens"] == 5 * figures["requests"]
    prompts = [len(body["prompt"].split()) for body, _ in handler.seen if body.get("stream")]
    assert set(prompts) == {32}  # two tokens a word


def test_prompts_share_what_the_trace_shares():
    shared = TraceRequest(0.0, 100, 5, prefix_hashes=(7, 8), hash_tokens=16)
    trace = Trace((shared, shared, TraceRequest(0.0, 100, 5)))
    first, second, other = (request.prompt.split() for request in prompts_of(trace, 2.0, 0))
    assert len(first) == len(other) == 50
    assert first[:16] == second[:16]
    assert first[16:] != second[16:]
    assert other[:16] != first[:16]


def test_figures():
    outcomes = [
        Outcome(0.0, 1.0, 3.0, 5, "", 10, 3.0, (0.5,) * 4),
        Outcome(1.0, 1.5, 5.0, 30, "", 20, 5.0, ()),
        Outcome(2.0, None, 2.5, 0, "HTTP 500"),
    ]
    figures = measure(outcomes, Slo(ttft=0.7))
    assert (figures.requests, figures.failed, figures.duration, figures.most_in_flight) == (3, 1, 5.0, 3)
    assert (figures.output_rate, figures.total_rate) == (7.0, 13.0)
    assert figures.attainment == pytest.approx(1 / 3)
    assert figures.goodput == pytest.approx(0.2)
    assert (figures.ttft.p50, figures.ttft.p99, figures.tpot.p50) == (0.5, 1.0, pytest.approx(3.5 / 29))
    assert figures.errors == {"HTTP 500": 1}


def test_a_server_that_counts_no_tokens_is_refused(start):
    url, _ = start(usage=False)
    with pytest.raises(FormatError, match="prompt_tokens"):
        Server.ask(url, None, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give one of --requests"),
        (["--requests", "3", "--load", "2"], "--load needs"),
        (["--requests", "3", "--plot", "x.pdf"], ".png or .svg"),
        (["--requests", "3", "--report", "/nowhere/at/all.html"], "no such folder"),
        (["--requests", "3"], "can't be asked"),
        (["--generate", "rate=fast"], "rate=fast"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is_sent(arguments, words):
    result = invoke("--url", "http://127.0.0.1:9", *arguments)
    assert result.exit_code != 0
    assert words in f"{result.output}{result.exception}"
