"""`paceline local` without a stack: manifests with mistakes, logs as files, and what is said when nothing is up."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from paceline_cli.local_apply import parse_manifests, pruned
from paceline_cli.local_logs import find_streams
from paceline_cli.local_stack import _launch, _stop
from paceline_cli.local_view import pod_trouble, services_view, table_view
from paceline_local.errors import LocalError
from paceline_local.garbage import orphans
from paceline_local.leftovers import is_up, lock_stack
from paceline_local.manifests import age
from paceline_local.processes import marked
from paceline_local.state import MARKER, StateDir
from paceline_operator import names

GOOD = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n"


def test_a_look_at_the_lock_is_not_taken_for_a_stack(tmp_path):
    state = StateDir(tmp_path)
    looking, looked = threading.Event(), threading.Event()

    def look():
        with lock_stack(state):  # what `is_up` does
            looking.set()
            looked.wait(10)

    thread = threading.Thread(target=look)
    thread.start()
    looking.wait(10)
    with pytest.raises(LocalError, match="already up"), lock_stack(state):
        pass
    threading.Timer(0.2, looked.set).start()
    with lock_stack(state, patience=30):
        assert looked.is_set()
    thread.join()


def test_an_up_that_came_too_late_leaves_the_other_stack_alone(tmp_path):
    state = StateDir(tmp_path)
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    child = subprocess.Popen(command, env=os.environ | {MARKER: str(tmp_path)}, stdout=subprocess.PIPE)
    child.stdout.readline()  # until then its environment is ours
    try:
        with lock_stack(state):
            _stop(state, None)
            assert child.poll() is None
        _stop(state, None)
        assert child.wait(10) == -signal.SIGTERM
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_down_in_the_first_moment_stops_what_up_has_just_started(tmp_path):
    state = StateDir(tmp_path / "home")
    supervisor = _launch(state, operator=False)
    try:
        assert is_up(state)  # before it has even read its command line
        assert paceline("down", home=state.home).stdout == "down\n"
        assert supervisor.wait(30) is not None
        assert not state.home.exists()
        assert marked(MARKER, str(state.home)) == []
    finally:
        supervisor.kill()
        supervisor.wait()


def test_documents_lists_and_empty_parts():
    item = "{apiVersion: apps/v1, kind: Deployment, metadata: {name: b}}"
    text = f"---\n{GOOD}---\n---\napiVersion: v1\nkind: List\nitems:\n- {item}\n"
    assert [d.name for d in parse_manifests(text, "f.yaml")] == ["configmap/a", "deployment.apps/b"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", r"f\.yaml, line 1: not YAML"),
        ("a: 1\na: 2\n", r"f\.yaml, line 2: not YAML: key 'a' is there twice"),
        ("", r"f\.yaml has no manifests"),
        ("- 1\n", r"f\.yaml, document 1: not a manifest but list"),
        (GOOD + "---\nkind: X\nmetadata: {name: b}\n", r"f\.yaml, document 2: apiVersion is missing"),
        ("apiVersion: v1\nkind: X\nmetadata: {labels: {a: b}}\n", r"metadata\.name is missing"),
        ("apiVersion: v1\nkind: X\nmetadata: {name: 5}\n", r"metadata\.name is missing or isn't text"),
        ("apiVersion: v1\nkind: X\nmetadata: [a]\n", r"metadata\.name"),
        ("apiVersion: 1\nkind: X\nmetadata: {name: a}\n", r"document 1: apiVersion isn't text"),
        ("apiVersion: v1\nkind: [X]\nmetadata: {name: a}\n", r"document 1: kind isn't text"),
        ("a: !!python/object/apply:os.system ['true']\n", r"f\.yaml, line 1: not YAML"),
        ("a: !!binary aGVsbG8=\n", r"f\.yaml, line 1: not YAML"),
        ("a: !!set {b, c}\n", r"f\.yaml, line 1: not YAML"),
        ("a: &a [*a]\n", r"f\.yaml: not a manifest: nested deeper than 100 levels, or contains itself"),
        ("a: " + "[" * 3000 + "]" * 3000, r"f\.yaml: not a manifest: nested deeper than 100 levels"),
        ("a: .nan\n", r"f\.yaml: not a manifest: nan is no number in JSON"),
        ("? [a, b]\n: 1\n", r"f\.yaml, line 1: not YAML: a key must be text"),
        (
            "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 9)}]\n" for i in range(9)),
            "more than 200000 values",
        ),
    ],
)
def test_bad_manifests_name_file_and_place(text, said):
    with pytest.raises(LocalError, match=said):
        parse_manifests(text, "f.yaml")


def test_keys_and_times_are_text_as_in_json():
    text = GOOD + "data: {1: a, true: b, ~: c, 1.5: 2020-01-01}\n"
    assert parse_manifests(text, "f.yaml")[0].manifest["data"] == {"1": "a", "true": "b", "null": "c", "1.5": "2020-01-01"}


def test_fields_that_the_server_dropped_are_found():
    sent = {"metadata": {"name": "a"}, "spec": {"a": 1, "list": [{"x": 1, "tpyo": 2}], "empty": {}, "b": {"c": 2}}}
    kept = {"metadata": {"name": "a", "uid": "u"}, "spec": {"a": 1, "list": [{"x": 1}], "b": {}}}
    assert pruned(sent, kept) == ["spec.list[0].tpyo", "spec.b.c"]
    assert pruned(sent, sent) == []


def paceline(*arguments, home):
    command = [sys.executable, "-m", "paceline_cli", "local", *arguments, "--home", str(home)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("get",), 2, "no stack is up in"),
        (("apply", "-f", "/no/such/file.yaml"), 2, "error: /no/such/file.yaml can't be read: No such file or directory"),
        (("logs", "web"), 2, "no pod of 'web'"),
        (("delete",), 2, "give either KIND and NAME, or -f FILE"),
        (("status",), 1, "not up"),
        (("down",), 0, "nothing was up"),
    ],
)
def test_without_a_stack_every_command_says_so_in_one_line(tmp_path, arguments, code, said):
    done = paceline(*arguments, home=tmp_path / "home")
    assert (done.returncode, len((done.stdout + done.stderr).strip().splitlines())) == (code, 1)
    assert said in (done.stdout + done.stderr)


def test_a_folder_of_somebody_else_is_neither_used_nor_cleaned(tmp_path):
    mine = tmp_path / "logs" / "precious.log"
    mine.parent.mkdir()
    mine.write_text("not yours")
    up, down = paceline("up", home=tmp_path), paceline("down", home=tmp_path)
    assert (up.returncode, down.returncode) == (2, 0)
    assert "isn't a stack's folder (it holds 'logs'): choose an empty or a new one" in up.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["logs", "precious.log"]


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf"])
def test_a_timeout_is_a_time(tmp_path, seconds):
    done = paceline("up", "--timeout", seconds, home=tmp_path / "home")
    assert (done.returncode, (tmp_path / "home").exists()) == (2, False)
    assert "--timeout" in done.stderr


@pytest.mark.parametrize("group", [(), ("local",)])
def test_a_group_alone_shows_its_help(group):
    done = subprocess.run([sys.executable, "-m", "paceline_cli", *group], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: ") and "\n  -h, --help" in done.stdout


def test_conditions_stay_readable_on_a_narrow_terminal():
    conditions = [
        {"type": "SpecValid", "status": "False", "reason": "Invalid", "message": "spec.bogus: 1 (unknown field): remove it"},
        {"type": "MetricsAvailable", "status": "Unknown", "reason": "NoPods", "message": "no pod runs yet"},
    ]
    meta = {"namespace": "default", "name": "a", "creationTimestamp": "2026-01-01T00:00:00Z"}
    service = {"metadata": meta, "spec": {}, "status": {"conditions": conditions}}
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(services_view([service], [], {}, now=1767225605.0))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines[0] == "default/a  not Ready  0/1 pods  5s"
    assert "  MetricsAvailable  Unknown  NoPods   no pod runs yet" in lines
    assert all(len(line) <= 60 for line in lines)


def test_what_belongs_to_a_service_whose_name_is_no_label():
    name = "llama-3.1-8b"
    meta = {"namespace": "default", "name": name, "creationTimestamp": "2026-01-01T00:00:00Z"}
    pod = {"metadata": {"namespace": "default", "name": "p", "labels": names.labels(name)}, "spec": {}}
    addresses = {f"default/{names.base_name(name)}": "127.9.128.16:8000"}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(services_view([{"metadata": meta, "spec": {}}], [pod], addresses, now=1767225605.0))
    text = console.export_text()
    assert "127.9.128.16:8000" in text
    assert "p: not started yet" in text


def test_the_command_line_is_quick_to_import():
    modules = ", ".join(f"paceline_cli.local{name}" for name in ("", "_stack", "_apply", "_get", "_logs"))
    code = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"aiohttp", "kubernetes", "kopf", "torch", "cryptography", "jsonschema"} & set(loaded)


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = StateDir(tmp_path / "home")
    found.create()
    for pod in ("default_web-abcde12345-x1y2z_u1", "default_web-abcde12345-aaaaa_u2", "other_web-abcde12345-bbbbb_u3"):
        folder = found.pods / pod / "logs" / "runtime"
        folder.mkdir(parents=True)
        (folder / "0.log").write_text("first run\n")
        (folder / "1.log").write_text("".join(f"line {i}\n" for i in range(5)))
    found.log("operator").write_text("reconciled\n")
    return found


def labels(streams):
    return [stream.label for stream in streams]


def test_logs_by_service_pod_container_and_own_process(state):
    both = ["web-abcde12345-aaaaa/runtime", "web-abcde12345-x1y2z/runtime"]
    assert labels(find_streams(state, "web", "default", None, back=0)) == both
    assert labels(find_streams(state, "infsvc/web", "default", "runtime", back=0)) == both
    assert labels(find_streams(state, "web-abcde12345-x1y2z", "default", None, back=0)) == both[1:]
    assert labels(find_streams(state, "operator", "default", None, back=0)) == ["operator"]
    (previous,) = find_streams(state, "web", "other", None, back=1)
    assert previous.newest().read_text() == "first run\n"
    with pytest.raises(LocalError, match="there are logs of: web-abcde12345-aaaaa, web-abcde12345-x1y2z, operator"):
        find_streams(state, "web-abcde", "default", None, back=0)


def test_logs_prints_the_tail_with_prefixes(state):
    done = paceline("logs", "web", "--tail", "1", home=state.home)
    assert done.stdout.splitlines() == [f"web-abcde12345-{s}/runtime: line 4" for s in ("aaaaa", "x1y2z")]


@pytest.mark.parametrize(
    ("name", "first"), [("web", "web-abcde12345-bbbbb/runtime: line 0"), ("web-abcde12345-bbbbb", "line 0")]
)
def test_who_follows_a_service_sees_whose_line_it_is(state, name, first):
    command = [sys.executable, "-m", "paceline_cli", "local", "logs", name, "-f", "-n", "other", "--home", str(state.home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        try:
            assert follower.stdout.readline() == first + "\n"
        finally:
            follower.kill()


def test_a_scratch_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    state = StateDir(tmp_path / "home")
    state.scratch.symlink_to(tmp_path)
    with pytest.raises(LocalError, match="belongs to somebody else"):
        state.create()


def test_tables_keep_names_whole():
    columns = [{"name": "Name"}, {"name": "IP", "priority": 1}]
    row = {"cells": ["a-very-long-name", None], "object": {"metadata": {"namespace": "x"}}}
    other = {"cells": ["b", "1"], "object": {"metadata": {"namespace": "y"}}}
    assert table_view({"columnDefinitions": columns, "rows": [row]}, wide=False) == "NAME\na-very-long-name"
    assert table_view({"columnDefinitions": columns, "rows": [row, other]}, wide=True).splitlines()[1].split() == [
        "x",
        "a-very-long-name",
    ]
    assert table_view({"columnDefinitions": columns, "rows": []}, wide=False) == "nothing found"


def test_why_a_pod_is_not_ready():
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 2s"}}
    log = {"terminated": {"exitCode": 2, "message": "Traceback …\nerror: no model file"}}
    pod = {"status": {"containerStatuses": [{"name": "c", "ready": False, "state": waiting, "lastState": log}]}}
    assert pod_trouble(pod) == "CrashLoopBackOff: back-off 2s: ended with exit code 2: error: no model file"
    assert pod_trouble({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}) is None
    unplaced = {
        "type": "PodScheduled",
        "status": "False",
        "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
    }
    assert "nvidia.com/gpu" in pod_trouble({"status": {"conditions": [unplaced]}})


def test_orphans_are_those_whose_owners_are_all_gone():
    def owned(name, *uids):
        return {"metadata": {"name": name, "ownerReferences": [{"uid": uid} for uid in uids]}}

    objects = [owned("a", "gone"), owned("b", "gone", "alive"), owned("c"), owned("d", "alive")]
    assert [o["metadata"]["name"] for o in orphans(objects, {"alive"})] == ["a"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (200000, "2d")]
)
def test_ages_as_kubectl_prints_them(seconds, shown):
    assert age("2026-01-01T00:00:00Z", 1767225600.0 + seconds) == shown
