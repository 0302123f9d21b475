"""A whole local stack without the operator: Deployments become processes, Services answer, and everything recovers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from paceline_local.client import ApiClient
from paceline_local.errors import ApiUnavailable
from paceline_local.processes import marked
from paceline_local.resources import CONFIG_MAPS, EVENTS, PODS, REPLICA_SETS, SERVICES, Resource
from paceline_local.state import MARKER, StateDir

HERE = Path(__file__).parent
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Stack:
    """`paceline local` as a user types it."""

    def __init__(self, home: Path, assets: str | None) -> None:
        self.state = StateDir(home)
        self._env = {k: v for k, v in os.environ.items() if k not in {"KUBEBUILDER_ASSETS", "KUBECONFIG"}}
        self._env |= {"PACELINE_HOME": str(home)} | ({"KUBEBUILDER_ASSETS": assets} if assets else {})

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "paceline_cli", "local", *arguments]
        return subprocess.run(command, env=self._env, input=stdin, capture_output=True, text=True, timeout=150, check=False)

    def ok(self, *arguments: str, stdin: str | None = None) -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def apply(self, *manifests: dict) -> str:
        return self.ok("apply", "-f", "-", stdin=yaml.safe_dump_all(manifests))

    def objects(self, resource: Resource) -> list[dict]:
        """Return the objects of a kind, read directly: a process of the command line per look would take the time."""

        async def read() -> list[dict]:
            async with ApiClient.from_kubeconfig(self.state.kubeconfig) as client:
                return (await client.list(resource, "default")).items

        return asyncio.run(read())

    def processes(self) -> list[int]:
        return [process.pid for process, _ in marked(MARKER, str(self.state.home))]

    def child(self, name: str) -> int:
        return json.loads(self.state.status.read_text())["children"][name]["pid"]

    def health(self, name: str) -> str:
        return json.loads(self.state.status.read_text())["children"][name]["health"]

    def _try(self, done: Callable[[], object]) -> object:
        try:
            return done()
        except ApiUnavailable:  # the API server is away: we are the ones who kill it
            return False

    def until(self, done: Callable[[], object], what: str) -> None:
        """Wait for something that must come; the limit only keeps a failure from hanging."""
        deadline = time.monotonic() + 60
        while not self._try(done):
            assert time.monotonic() < deadline, (
                f"{what}\n{self.run('get', 'pods').stdout}\n{self.run('get', 'events').stdout}"
            )
            time.sleep(0.1)


def answer(url: str) -> str:
    with NO_PROXY.open(url, timeout=10) as response:
        return response.read().decode()


def web(name: str, replicas: int = 2, version: str = "v1", **container: object) -> dict:
    main = {
        "name": "web",
        "image": "ignored",
        "command": ["python", str(HERE / "local_web.py")],
        "ports": [{"name": "http", "containerPort": 8000}],
        "volumeMounts": [{"name": "config", "mountPath": "/etc/web"}],
        "env": [
            {"name": "VERSION", "value": version},
            {"name": "CONFIG", "value": "/etc/web"},
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1},
    } | container
    spec = {
        "terminationGracePeriodSeconds": 10,
        "volumes": [{"name": "config", "configMap": {"name": "config", "optional": True}}],
        "containers": [main],
    }
    template = {"metadata": {"labels": {"app": name}}, "spec": spec}
    selector = {"matchLabels": {"app": name}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "selector": selector, "template": template},
    }


def service(name: str) -> dict:
    spec = {"selector": {"app": name}, "ports": [{"port": 8080, "targetPort": "http"}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def config(greeting: str) -> dict:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "config"}, "data": {"greeting": greeting}}


def pods_of(stack: Stack, name: str) -> list[dict]:
    return [p for p in stack.objects(PODS) if p["metadata"]["labels"].get("app") == name]


def waiting_reason(stack: Stack, name: str) -> str:
    states = [s for p in pods_of(stack, name) for s in p.get("status", {}).get("containerStatuses", [])]
    return next((s["state"]["waiting"]["reason"] for s in states if "waiting" in s["state"]), "")


def url_of(stack: Stack, name: str) -> str:
    """Return the Service's URL once it answers."""
    found: list[str] = []

    def answers() -> bool:
        for item in stack.objects(SERVICES):
            address = item["metadata"].get("annotations", {}).get("paceline.io/local-address")
            if item["metadata"]["name"] == name and address:
                try:
                    answer(f"http://{address}:8080/")
                except OSError:
                    return False
                found.append(f"http://{address}:8080")
        return bool(found)

    stack.until(answers, f"service {name} never answered")
    return found[0]


def rolled_out(stack: Stack, name: str, version: str, replicas: int = 2) -> bool:
    pods = pods_of(stack, name)
    ready = [
        p for p in pods if any(c["type"] == "Ready" and c["status"] == "True" for c in p["status"].get("conditions", []))
    ]
    current = [p for p in ready if p["spec"]["containers"][0]["env"][0]["value"] == version]
    return len(pods) == len(current) == replicas


class Clients(threading.Thread):
    """Asks a URL again and again, a new connection each time, and remembers answers and failures."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url, self._stop_now = url, threading.Event()
        self.answers: list[str] = []
        self.failures: list[str] = []

    def run(self) -> None:
        while not self._stop_now.wait(0.005):
            try:
                self.answers.append(answer(self._url))
            except OSError as error:
                self.failures.append(repr(error))

    def __enter__(self) -> Clients:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_now.set()
        self.join()

    def more(self, stack: Stack, count: int = 20) -> None:
        target = len(self.answers) + count
        stack.until(lambda: len(self.answers) >= target, "the clients got no more answers")


ASSETS = os.environ.get("KUBEBUILDER_ASSETS")
PLANES = [
    pytest.param(None, id="embedded"),
    pytest.param(
        ASSETS,
        id="real",
        marks=[pytest.mark.realcontrolplane, pytest.mark.skipif(not ASSETS, reason="KUBEBUILDER_ASSETS is not set")],
    ),
]


@pytest.fixture(scope="module", params=PLANES)
def stack(request, tmp_path_factory):
    found = Stack(tmp_path_factory.mktemp("stack") / "home", request.param)
    try:
        found.ok("up", "--no-operator")
        yield found
    finally:
        found.run("down")
    assert found.processes() == [], "'down' left processes"
    assert not found.state.scratch.exists() and not found.state.home.exists(), "'down' left files"


@pytest.fixture
def served(stack):
    stack.apply(config("hello"), web("web"), service("web"))
    stack.until(lambda: rolled_out(stack, "web", "v1"), "web never became ready")
    return url_of(stack, "web")


def test_a_second_up_is_refused(stack):
    again = stack.run("up")
    assert again.returncode == 2 and again.stderr.startswith("error: already up in")
    assert len(again.stderr.splitlines()) == 1


def test_config_reaches_running_pods_without_a_restart(stack, served):
    before = {p["metadata"]["name"] for p in pods_of(stack, "web")}
    assert answer(f"{served}/config") == "hello"
    assert "configmap/config configured" in stack.apply(config("goodbye"))
    stack.until(lambda: {answer(f"{served}/config") for _ in range(6)} == {"goodbye"}, "the new content never came")
    assert {p["metadata"]["name"] for p in pods_of(stack, "web")} == before


def test_a_rolling_update_loses_no_request(stack, served):
    with Clients(served) as clients:
        clients.more(stack)
        stack.apply(web("web", version="v2"))
        stack.until(lambda: rolled_out(stack, "web", "v2"), "the update never ended")
        clients.more(stack)
    assert clients.failures == []
    assert {a.split()[0] for a in clients.answers} == {"v1", "v2"}
    stack.apply(web("web", version="v1"))
    stack.until(lambda: rolled_out(stack, "web", "v1"), "the way back never ended")


@pytest.mark.parametrize("victim", ["apiserver", "node"])
def test_killing_a_part_of_the_stack_disturbs_no_request(stack, served, victim):
    before = {p["metadata"]["name"]: p["status"]["containerStatuses"][0]["restartCount"] for p in pods_of(stack, "web")}
    pid = stack.child(victim)
    with Clients(served) as clients:
        clients.more(stack)
        os.kill(pid, signal.SIGKILL)
        stack.until(lambda: stack.child(victim) not in (None, pid), f"{victim} was never started again")
        stack.until(lambda: stack.health(victim) == "ready", f"{victim} never got ready again")
        clients.more(stack)
    assert clients.failures == []
    stack.apply(web("web", replicas=3))
    stack.until(lambda: rolled_out(stack, "web", "v1", 3), "it doesn't scale any more")
    stack.apply(web("web", replicas=2))
    stack.until(lambda: rolled_out(stack, "web", "v1", 2), "it doesn't scale any more")
    after = {p["metadata"]["name"]: p["status"]["containerStatuses"][0]["restartCount"] for p in pods_of(stack, "web")}
    assert all(before[name] == count for name, count in after.items() if name in before), "a pod was restarted"


def test_a_killed_pod_process_is_started_again_and_others_answer_meanwhile(stack, served):
    _, name, pid = answer(served).split()
    os.kill(int(pid), signal.SIGKILL)

    def restarted() -> bool:
        (status,) = (p["status"]["containerStatuses"][0] for p in pods_of(stack, "web") if p["metadata"]["name"] == name)
        return status["restartCount"] == 1 and status["ready"] and status["lastState"]["terminated"]["exitCode"] == 137

    stack.until(restarted, "the pod never came back")
    assert answer(served).startswith("v1 ")


def test_a_failing_liveness_probe_restarts_the_container(stack):
    probe = {"httpGet": {"path": "/live", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
    startup = probe | {"failureThreshold": 60}
    stack.apply(web("sick", replicas=1, livenessProbe=probe, startupProbe=startup), service("sick"))
    url = url_of(stack, "sick")
    first = answer(f"{url}/sick").split()[2]

    def healed() -> bool:
        try:
            return answer(url).split()[2] != first
        except OSError:
            return False

    stack.until(healed, "the container was never restarted")
    assert any("failed liveness probe" in event["message"] for event in stack.objects(EVENTS))
    stack.ok("delete", "deployment/sick")


@pytest.mark.parametrize(
    ("name", "container", "reason", "said"),
    [
        ("no-command", {"command": None}, "CreateContainerError", "images are ignored locally"),
        ("no-program", {"command": ["no-such-program"]}, "CreateContainerError", "'no-such-program' not found"),
        (
            "no-config",
            {"envFrom": [{"configMapRef": {"name": "absent"}}]},
            "CreateContainerConfigError",
            'configmap "absent" not found',
        ),
        (
            "crash",
            {
                "command": ["sh", "-c", "echo error: no model file >&2; exit 2"],
                "terminationMessagePolicy": "FallbackToLogsOnError",
            },
            "CrashLoopBackOff",
            "error: no model file",
        ),
    ],
)
def test_what_cannot_run_says_why(stack, name, container, reason, said):
    stack.apply(web(name, replicas=1, **container))
    stack.until(lambda: waiting_reason(stack, name) == reason, f"{name} never showed {reason}")
    assert said in json.dumps(pods_of(stack, name)[0]["status"]["containerStatuses"]).replace('\\"', '"')
    stack.ok("delete", "deployment", name)
    stack.until(lambda: not pods_of(stack, name), f"pods of {name} stay")


def test_init_containers_run_first_and_a_pod_may_end(stack):
    mounts = [{"name": "work", "mountPath": "/scratch"}]
    init = {"name": "first", "command": ["sh", "-c", "echo prepared > /scratch/file"], "volumeMounts": mounts}
    main = {"name": "main", "command": ["cat", "/scratch/file"], "volumeMounts": mounts}
    spec = {
        "restartPolicy": "Never",
        "initContainers": [init],
        "containers": [main],
        "volumes": [{"name": "work", "emptyDir": {}}],
    }
    for container in (init, main):
        container["image"] = "ignored"
    stack.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "job", "labels": {"app": "job"}}, "spec": spec})
    stack.until(lambda: [p["status"].get("phase") for p in pods_of(stack, "job")] == ["Succeeded"], "the pod never ended")
    assert stack.ok("logs", "job", "-c", "main") == "prepared\n"
    stack.ok("delete", "pod", "job")
    assert pods_of(stack, "job") == []


def test_a_pod_that_asks_for_a_gpu_is_unschedulable(stack):
    stack.apply(web("gpu", replicas=1, resources={"limits": {"nvidia.com/gpu": "1"}}))
    message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    stack.until(lambda: message in json.dumps([p.get("status") for p in pods_of(stack, "gpu")]), "the refusal never showed")
    stack.until(lambda: any(e["reason"] == "FailedScheduling" for e in stack.objects(EVENTS)), "no event")
    stack.ok("delete", "deployment", "gpu")
    stack.until(lambda: not pods_of(stack, "gpu"), "the pod stays")


def test_apply_changes_nothing_if_one_document_is_wrong(stack):
    bad = web("half") | {"spec": {"replicas": "many"}}
    done = stack.run("apply", "-f", "-", stdin=yaml.safe_dump_all([config("half"), bad]))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "stdin, document 2: deployment.apps/half" in done.stderr and done.stdout == ""
    assert [c["data"]["greeting"] for c in stack.objects(CONFIG_MAPS) if c["metadata"]["name"] == "config"] != ["half"]


def test_deleting_everything_leaves_nothing(stack, served):
    processes = set(stack.processes())
    pods = {int(answer(served).split()[2]) for _ in range(20)}
    assert len(pods) == 2 and pods <= processes
    stack.ok("delete", "-f", "-", stdin=yaml.safe_dump_all([config(""), web("web"), service("web")]))
    stack.until(lambda: not pods & set(stack.processes()), "processes of the pods stay")
    stack.until(lambda: not stack.objects(PODS) and not stack.objects(REPLICA_SETS), "objects stay")
    stack.until(lambda: not list(stack.state.pods.glob("*_*")), "folders stay")
    with pytest.raises(urllib.error.URLError):
        answer(served)


def test_the_next_up_cleans_after_a_killed_supervisor(stack):
    stack.apply(config("hello"), web("web"), service("web"))
    url = url_of(stack, "web")
    old = set(stack.processes())
    os.kill(json.loads(stack.state.status.read_text())["pid"], signal.SIGKILL)
    assert answer(url).startswith("v1"), "the data path needs no supervisor"
    stack.ok("up", "--no-operator")
    assert not old & set(stack.processes())
    stack.until(lambda: rolled_out(stack, "web", "v1"), "objects or pods didn't survive")
    assert answer(url_of(stack, "web")).startswith("v1")
