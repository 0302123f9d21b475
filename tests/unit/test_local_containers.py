"""Back-off, probes, container and pod states: the rules, without processes."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from paceline_local.backoff import BackOff
from paceline_local.container import resolve_command
from paceline_local.container_record import Record, load_record, newest_log, save_record, tail, trim_log
from paceline_local.container_state import ContainerState, Termination, Waiting, container_status, exit_of, should_restart
from paceline_local.errors import LocalError
from paceline_local.manifests import condition, timestamp
from paceline_local.pod_status import Placement, phase_of, pod_status, unschedulable_status
from paceline_local.probes import ProbeRules, ProbeTracker, Target, ask, rules_of
from paceline_local.processes import ProcessId, identify

NOW = 1_700_000_000.0
HERE = ProcessId(1234, 5)


def test_back_off_grows_to_its_limit_and_a_long_run_forgives():
    state, delays = BackOff(), []
    for _ in range(9):
        state = state.ended(1.0)
        delays.append(state.delay)
    assert delays == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert state.ended(60.0).delay == 0
    assert BackOff(failures=5000).delay == 60, "no overflow, however long it crashes"


def test_probe_thresholds_count_successive_answers():
    tracker = ProbeTracker(ProbeRules(success_threshold=2, failure_threshold=3))
    verdicts = []
    for ok in (True, False, True, True, False, False, True, False, False, False):
        tracker = tracker.observe(ok)
        verdicts.append(tracker.verdict)
    assert verdicts == [None, None, None, True, True, True, True, True, True, False]


def test_probe_defaults_are_kubernetes_own():
    assert rules_of({}) == ProbeRules(0, 10, 1, 1, 3)
    assert rules_of({"periodSeconds": 2, "failureThreshold": 9}).failure_threshold == 9


@pytest.fixture
async def probe_server():
    async def handle(request: web.Request) -> web.Response:
        seen.append(dict(request.headers))
        return web.Response(status=int(request.query.get("status", "200")), text="loading the model")

    seen: list[dict[str, str]] = []
    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield runner.addresses[0][1], seen
    await runner.cleanup()


async def test_the_three_kinds_of_probes(probe_server, tmp_path):
    port, seen = probe_server
    target = Target("127.0.0.1", {"http": port}, dict(os.environ), tmp_path)
    async with aiohttp.ClientSession() as session:
        header = {"name": "X-Probe", "value": "1"}
        good = await ask(session, {"httpGet": {"path": "/ok", "port": "http", "httpHeaders": [header]}}, target, 5)
        bad = await ask(session, {"httpGet": {"path": "/ok?status=503", "port": port}}, target, 5)
        nobody = await ask(session, {"httpGet": {"port": 1}}, target, 5)
        unnamed = await ask(session, {"httpGet": {"port": "admin"}}, target, 5)
        tcp = await ask(session, {"tcpSocket": {"port": port}}, target, 5)
        no_tcp = await ask(session, {"tcpSocket": {"port": 1}}, target, 5)
        command = await ask(session, {"exec": {"command": ["sh", "-c", "exit 0"]}}, target, 5)
        failing = await ask(session, {"exec": {"command": ["sh", "-c", "echo broken; exit 3"]}}, target, 5)
        missing = await ask(session, {"exec": {"command": ["no-such-command"]}}, target, 5)
    assert good.ok and tcp.ok and command.ok and seen[0]["X-Probe"] == "1"
    assert bad.message == "HTTP probe failed with statuscode: 503: loading the model"
    assert not nobody.ok and not no_tcp.ok and not missing.ok
    assert "named port" in unnamed.message and failing.message == "broken"


async def test_a_probe_that_hangs_is_ended_with_all_its_processes(tmp_path):
    target = Target("127.0.0.1", {}, dict(os.environ), tmp_path)
    script = f"sleep 60 & echo $! > {tmp_path}/child; wait"
    answer = await ask(None, {"exec": {"command": ["sh", "-c", script]}}, target, 0.5)  # type: ignore[arg-type]
    assert not answer.ok and "no answer within" in answer.message
    child = identify(int((tmp_path / "child").read_text()))
    for _ in range(100):
        if child is None or not child.alive:
            return
        await asyncio.sleep(0.05)
    pytest.fail("the probe's child process still runs")


def test_commands_are_found_or_the_message_says_what_images_mean(tmp_path):
    program = tmp_path / "tool"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    env = {"PATH": str(tmp_path)}
    assert resolve_command(["tool", "-x"], env, tmp_path) == [str(program), "-x"]
    assert resolve_command(["./tool"], env, tmp_path) == [str(program)]
    assert resolve_command([str(program)], {}, tmp_path) == [str(program)]
    for command in ([], ["nothing"], ["/no/where"]):
        with pytest.raises(LocalError, match="images are ignored locally"):
            resolve_command(command, env, tmp_path)


@pytest.mark.parametrize(
    ("code", "shown"),
    [(0, (0, "Completed")), (2, (2, "Error")), (-9, (137, "Error")), (None, (137, "ContainerStatusUnknown"))],
)
def test_exit_codes(code, shown):
    end = exit_of(code, "", NOW, NOW + 1)
    assert (end.exit_code, end.reason) == shown


def test_a_signal_is_named():
    assert exit_of(-15, "", NOW, NOW).message == "ended by SIGTERM"


@pytest.mark.parametrize(
    ("policy", "code", "again"),
    [("Always", 0, True), ("Always", 1, True), ("OnFailure", 0, False), ("OnFailure", 1, True), ("Never", 1, False)],
)
def test_restart_policies(policy, code, again):
    assert should_restart(policy, code) is again


def crashed(code=2, message="error: no such file"):
    return (
        ContainerState()
        .running(HERE, NOW, started=True, ready=True)
        .terminated(Termination(code, "Error", message, NOW, NOW + 1))
    )


def test_a_crash_shows_as_terminated_then_waiting_then_running_with_one_more_restart():
    state = crashed()
    ended = container_status({"name": "c", "image": "i"}, state, "u")
    assert ended["state"]["terminated"]["exitCode"] == 2 and ended["lastState"] == {} and not ended["ready"]
    waiting = container_status({"name": "c"}, state.waits(Waiting("CrashLoopBackOff", "back-off 1s")), "u")
    assert waiting["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert waiting["lastState"]["terminated"]["message"] == "error: no such file" and waiting["restartCount"] == 0
    running = container_status({"name": "c"}, state.running(HERE, NOW + 2, started=True, ready=False), "u")
    assert running["restartCount"] == 1 and running["state"]["running"]["startedAt"] == timestamp(NOW + 2)


RUNNING = ContainerState().running(HERE, NOW, started=True, ready=True)
DONE = RUNNING.terminated(Termination(0, "Completed", "", NOW, NOW))


@pytest.mark.parametrize(
    ("init", "main", "policy", "phase"),
    [
        ({}, {"a": RUNNING, "b": ContainerState()}, "Always", "Pending"),
        ({}, {"a": RUNNING}, "Always", "Running"),
        ({}, {"a": crashed().waits(Waiting("CrashLoopBackOff"))}, "Always", "Running"),
        ({}, {"a": DONE}, "Always", "Running"),
        ({}, {"a": DONE}, "Never", "Succeeded"),
        ({}, {"a": crashed()}, "Never", "Failed"),
        ({}, {"a": crashed()}, "OnFailure", "Running"),
        ({"i": crashed()}, {"a": ContainerState()}, "Never", "Failed"),
        ({"i": RUNNING}, {"a": ContainerState()}, "Always", "Pending"),
    ],
)
def test_phases(init, main, policy, phase):
    assert phase_of(init, main, policy) == phase


def test_conditions_follow_the_containers_and_keep_their_times():
    pod = {"metadata": {"uid": "u"}, "spec": {"containers": [{"name": "a"}, {"name": "b"}]}}
    place = Placement("127.64.0.16", "127.64.0.1", NOW)
    unready = replace(RUNNING, ready=False)
    first = pod_status(pod, {}, {"a": RUNNING, "b": unready}, place, NOW)
    pod["status"] = first
    assert condition(pod, "Ready")["message"] == "containers with unready status: [b]"
    second = pod_status(pod, {}, {"a": RUNNING, "b": RUNNING}, place, NOW + 5)
    times = {c["type"]: (c["status"], c["lastTransitionTime"]) for c in second["conditions"]}
    assert times["Ready"] == ("True", timestamp(NOW + 5)) and times["PodScheduled"] == ("True", timestamp(NOW))


def test_readiness_gates_hold_a_pod_back_and_foreign_conditions_stay():
    gate = {"type": "example.com/gate", "status": "False"}
    pod = {
        "metadata": {"uid": "u"},
        "spec": {"containers": [{"name": "a"}], "readinessGates": [{"conditionType": gate["type"]}]},
    }
    place = Placement("127.64.0.16", "127.64.0.1", NOW)
    pod["status"] = {"conditions": [gate]}
    status = pod_status(pod, {}, {"a": RUNNING}, place, NOW)
    assert condition({"status": status}, "Ready")["reason"] == "ReadinessGatesNotReady" and gate in status["conditions"]
    gate["status"] = "True"
    assert condition({"status": pod_status(pod, {}, {"a": RUNNING}, place, NOW)}, "Ready")["status"] == "True"


def test_unschedulable_pods_say_so_where_kubectl_looks():
    status = unschedulable_status(
        {"metadata": {}, "spec": {}}, "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", NOW
    )
    (scheduled,) = status["conditions"]
    assert (scheduled["status"], scheduled["reason"]) == ("False", "Unschedulable") and status["phase"] == "Pending"


# records and logs


def test_a_record_survives_the_agent_and_a_dead_process_shows_as_unknown(tmp_path):
    path = tmp_path / "containers" / "c.json"
    me = identify(os.getpid())
    save_record(path, Record(RUNNING.running(me, NOW, started=True, ready=True), failures=3, run=7))
    found = load_record(path, NOW)
    assert found.state.process == me and found.state.ready and (found.failures, found.run) == (3, 7)
    save_record(path, Record(RUNNING.running(ProcessId(me.pid, me.started - 1), NOW, started=True, ready=True), 0, 7))
    lost = load_record(path, NOW + 9).state  # same pid, other start time: a different process
    assert lost.process is None and lost.ended.reason == "ContainerStatusUnknown" and not lost.ready
    assert load_record(tmp_path / "none.json", NOW) == Record()
    path.write_text('{"version": 0}')
    assert load_record(path, NOW) == Record()


def test_log_tail_and_trimming(tmp_path):
    log = tmp_path / "0.log"
    log.write_text("".join(f"line {i}\n" for i in range(1000)) + "error: the end\n")
    assert tail(log).endswith("error: the end") and len(tail(log)) <= 2048
    trim_log(log)
    assert log.stat().st_size > 0
    with log.open("ab") as file:
        file.truncate(11 * 2**20)
    trim_log(log)
    assert log.stat().st_size == 0 and (tmp_path / "0.log.old").stat().st_size == 11 * 2**20
    (tmp_path / "10.log").write_text("")
    assert newest_log(tmp_path) == tmp_path / "10.log" and newest_log(tmp_path, back=1) == log
    assert newest_log(tmp_path, back=2) is None
