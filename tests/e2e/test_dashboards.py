"""A real Prometheus scrapes a working runtime and operator, and every panel of every dashboard shows something."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import yaml
from stacks import eventually

from embedded import embedded_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus (Debian's package) isn't installed"),
]
ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "paceline"
BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((CHART / "files" / "dashboards").glob("*.json"))}
# the runtime's model of a step: a millisecond and little more, so that hundreds of requests end in seconds
STEP_MODEL = {"constant": 0.001, "decodeTokens": 0.0001, "prefillTokens": 0.00001, "contextTokens": 0, "prefillAttention": 0}
# what a healthy fleet doesn't have: those panels show nothing then, and that is right
QUIET = {"Calls that failed", "Drift corrected", "Knob changes sent"}
# services that are tuned have pods that tell something, which this test has none of
UNTUNED = {
    "Requests within the objective", "Goodput", "Phase", "Decisions", "Steps of changes", "Pods by what they tell",
    "Error of the twin",
}  # fmt: skip
WINDOW = "20s"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def start(log, *command, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "KUBE"))}
    with log.open("wb") as out:
        return subprocess.Popen([str(part) for part in command], stdout=out, stderr=out, env=clean | environment)


@pytest.fixture(scope="module")
def processes():
    started = []
    yield started
    for process in reversed(started):
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def runtime(processes, tmp_path_factory):
    folder, port, admin = tmp_path_factory.mktemp("runtime"), free_port(), free_port()
    (folder / "model.json").write_text(json.dumps(STEP_MODEL))
    (folder / "token").write_text("a-token\n")
    flags = ["--host", "127.0.0.1", "--port", port, "--admin-port", admin, "--admin-token-file", folder / "token"]
    flags += ["--device", "clock", "--step-model", folder / "model.json", "--served-model-name", "chat"]
    processes.append(start(folder / "log", sys.executable, "-m", "paceline_runtime", *flags))
    url = f"http://127.0.0.1:{port}"
    eventually(lambda: httpx.get(f"{url}/health/ready", trust_env=False).status_code == 200, "the runtime is ready")
    return url


@pytest.fixture(scope="module")
def operator(processes, tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("operator"), free_port()
    with embedded_server(folder / "api") as server:
        for path in (ROOT / "crds").glob("*.yaml"):
            _create(server.kubeconfig, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", path.read_text())
        environment = {
            "KUBECONFIG": str(server.kubeconfig),
            "PACELINE_OPERATOR_KEY": "k" * 48,
            "PACELINE_RUNTIME_IMAGE": "example/runtime:1",
            "PACELINE_METRICS_PORT": str(port),
            "PACELINE_METRICS_HOST": "127.0.0.1",
        }
        processes.append(start(folder / "log", sys.executable, "-m", "paceline_operator", **environment))
        url = f"http://127.0.0.1:{port}/metrics"
        eventually(lambda: httpx.get(url, trust_env=False).status_code == 200, "the operator serves metrics")
        yield server.kubeconfig, url


def _create(kubeconfig, path, text):
    from bench.fleet_plane import Client

    with Client(kubeconfig) as client:
        return client.call("POST", path, yaml.safe_load(text))


@pytest.fixture(scope="module")
def prometheus(processes, runtime, operator, tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    labels = {"namespace": "team-a", "pod": "chat-0"}
    targets = {"runtime": (runtime, labels), "operator": (operator[1].removesuffix("/metrics"), {"pod": "operator-0"})}
    jobs = [
        {"job_name": name, "static_configs": [{"targets": [url.removeprefix("http://")], "labels": given}]}
        for name, (url, given) in targets.items()
    ]
    config = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "scrape_configs": jobs}
    config["rule_files"] = [str(CHART / "files" / "alerts.yaml")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    flags += [f"--web.listen-address=127.0.0.1:{port}"]
    processes.append(start(folder / "log", "prometheus", *flags))
    url = f"http://127.0.0.1:{port}"
    eventually(lambda: httpx.get(f"{url}/-/ready", trust_env=False).status_code == 200, "Prometheus is ready")
    return url


@pytest.fixture(scope="module")
def load(runtime, operator, prometheus):
    """Requests for the runtime and edits for the operator, for as long as the tests run."""
    stop = threading.Event()

    def ask():
        with httpx.Client(trust_env=False, timeout=30) as http:
            while not stop.is_set():
                http.post(f"{runtime}/v1/completions", json={"model": "chat", "prompt": "one two " * 20, "max_tokens": 20})

    def edit():
        number = 0
        while not stop.wait(0.5):
            number += 1
            body = {"metadata": {"name": f"s{number}", "namespace": "default"}, "spec": {"model": {"uri": "hf://a/b"}}}
            body |= {"apiVersion": "paceline.io/v1alpha1", "kind": "InferenceService"}
            _create(operator[0], "/apis/paceline.io/v1alpha1/namespaces/default/inferenceservices", json.dumps(body))

    threads = [threading.Thread(target=target, daemon=True) for target in (ask, ask, ask, edit)]
    for thread in threads:
        thread.start()
    time.sleep(12)  # a dozen scrapes, so that rates over the window exist
    yield
    stop.set()
    for thread in threads:
        thread.join(40)


def ask(url, query):
    """Return the series of an instant query; the dashboard's variables stand for everything."""
    query = query.replace("$__rate_interval", WINDOW)
    query = re.sub(r'"\$(namespace|model|pod)"', '".*"', query)
    assert "$" not in query, query
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, trust_env=False).json()
    assert answer["status"] == "success", (query, answer)
    return answer["data"]["result"]


PANELS = [
    (name, panel["title"], target["expr"])
    for name, board in BOARDS.items()
    for panel in board["panels"]
    for target in panel.get("targets", [])
]


@pytest.mark.parametrize(("name", "title", "query"), PANELS, ids=[f"{n}-{t}-{i}" for i, (n, t, _) in enumerate(PANELS)])
def test_a_panel_shows_something(prometheus, load, name, title, query):
    if title in QUIET | UNTUNED:
        ask(prometheus, query)
    else:
        eventually(lambda: ask(prometheus, query), f"{name}: {title} has data", timeout=30)


def test_the_variables_have_values(prometheus, load):
    for board in BOARDS.values():
        for variable in board["templating"]["list"]:
            if definition := variable.get("definition"):
                series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", definition).groups()
                assert {item["metric"][label] for item in ask(prometheus, series)}


def test_no_alert_is_active_in_a_healthy_fleet(prometheus, load):
    rules = httpx.get(f"{prometheus}/api/v1/rules", trust_env=False).json()["data"]["groups"]
    states = {rule["name"]: (rule["state"], rule["health"]) for group in rules for rule in group["rules"]}
    assert len(states) >= 16
    assert {name: state for name, state in states.items() if state != ("inactive", "ok")} == {}
