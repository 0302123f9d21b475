"""The Lab's server: the page and its answers, to good and bad requests."""

import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from paceline_cli.__main__ import cli
from paceline_cli.lab_server import LabServer, Pod


@pytest.fixture
def serve():
    servers = []

    def start(server):
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server.server_port

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def lab(serve):
    return serve(LabServer(0, None))


def ask(port, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def run(port, document):
    answer, content = ask(port, "POST", "/lab/api/run", json.dumps(document))
    return answer.status, json.loads(content)


def test_the_page_and_its_files(lab):
    answer, page = ask(lab, "GET", "/lab/")
    assert answer.status == 200
    assert answer.getheader("Content-Type").startswith("text/html")
    assert "default-src 'self'" in answer.getheader("Content-Security-Policy")
    for name in ("lab.css", "lab.js"):
        assert name in page.decode()
        assert ask(lab, "GET", f"/lab/{name}")[0].status == 200
    assert ask(lab, "GET", "/")[0].getheader("Location") == "/lab/"


def test_nothing_else_is_served(lab):
    for path in ("/lab/../lab_server.py", "/lab/assets.py", "/lab/%2e%2e/x", "/etc/passwd", "/lab/api/x", "/other"):
        assert ask(lab, "GET", path)[0].status == 404, path


def test_a_scenario_is_played(lab):
    status, scene = run(lab, {"strategy": "static", "lengths": [8, 2, 2, 2, 6, 4, 4, 4]})
    assert status == 200
    assert scene["figures"]["duration"] == 14
    presets = json.loads(ask(lab, "GET", "/lab/api/presets")[1])
    assert {"varied", "even", "stream", "long-prompt"} <= {preset["id"] for preset in presets}


def test_bad_scenarios_are_refused(lab):
    assert run(lab, {"slots": 0}) == (400, {"error": "slots: 0 is out of bounds, expected 1 to 32 slots"})
    assert run(lab, {"lengths": [99], "kvBlocks": 1})[0] == 400
    assert ask(lab, "POST", "/lab/api/run", "{")[0].status == 400
    assert ask(lab, "POST", "/lab/api/run", b"\xff\xfe")[0].status == 400
    assert ask(lab, "POST", "/lab/api/run", "[" * 60_000)[0].status == 400
    assert ask(lab, "POST", "/lab/api/run", "x" * 70_000)[0].status == 413
    assert ask(lab, "POST", "/lab/api/run", iter([b"x"]), {"Transfer-Encoding": "chunked"})[0].status == 413
    assert ask(lab, "POST", "/lab/", "{}")[0].status == 404
    assert run(lab, {})[0] == 200


def test_another_host_name_is_refused(lab):
    answer, content = ask(lab, "GET", "/lab/", headers={"Host": "evil.example"})
    assert answer.status == 403
    assert b"127.0.0.1" in content
    assert ask(lab, "GET", "/lab/", headers={"Host": f"localhost:{lab}"})[0].status == 200


class AdminPort(BaseHTTPRequestHandler):
    def do_GET(self):
        allowed = self.headers.get("Authorization") == "Bearer secret"
        body = json.dumps({"path": self.path}).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_pod_is_asked_with_its_token(serve, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    pod = serve(ThreadingHTTPServer(("127.0.0.1", 0), AdminPort))
    lab = serve(LabServer(0, Pod(f"http://127.0.0.1:{pod}", token)))
    assert json.loads(ask(lab, "GET", "/lab/api/timeline?since=7")[1]) == {"path": "/admin/timeline?since=7"}
    assert json.loads(ask(lab, "GET", "/lab/api/observe")[1]) == {"path": "/admin/observe?since=0"}
    assert json.loads(ask(lab, "GET", "/lab/api/live")[1])["needsToken"] is False
    assert ask(lab, "GET", "/lab/api/timeline?since=-1")[0].status == 400
    token.write_text("secret\nolder\n")  # while it is rotated
    assert ask(lab, "GET", "/lab/api/timeline")[0].status == 200
    token.write_text("wrong")
    assert ask(lab, "GET", "/lab/api/timeline")[0].status == 401
    token.write_text("schlüssel→")
    answer, content = ask(lab, "GET", "/lab/api/timeline")
    assert (answer.status, b"schl" in content) == (502, False)
    token.unlink()
    assert ask(lab, "GET", "/lab/api/timeline")[0].status == 502


def test_a_pod_that_is_gone_or_was_not_given(serve, lab):
    answer, content = ask(lab, "GET", "/lab/api/timeline")
    assert answer.status == 404
    assert b"--live URL" in content
    silent = serve(LabServer(0, Pod("http://127.0.0.1:9", None)))
    assert ask(silent, "GET", "/lab/api/observe")[0].status == 502


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--live", "localhost"], "is no address of an admin port"),
        (["--live", "ftp://127.0.0.1:9000"], "is no address of an admin port"),
        (["--live", "http://127.0.0.1:port"], "is no address of an admin port"),
        (["--token-file", __file__], "--token-file needs --live"),
    ],
)
def test_bad_options_are_refused(arguments, words):
    result = CliRunner().invoke(cli, ["lab", *arguments])
    assert result.exit_code == 2
    assert words in result.output


def test_a_taken_port_is_named(lab):
    result = CliRunner().invoke(cli, ["lab", "--port", str(lab)])
    assert result.exit_code == 1
    assert f"port {lab} can't be used" in result.output
