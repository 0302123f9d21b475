"""What only the embedded server promises: who may come in, what survives a kill, how it refuses to start, kubectl."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from servers import Api, config_map, deployment, eventually, widget_crd

from embedded import Embedded, command, embedded_server, start

MAPS = "/api/v1/namespaces/default/configmaps"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    with embedded_server(tmp_path_factory.mktemp("embedded")) as server:
        yield server


@pytest.fixture
def client(server: Embedded) -> Iterator[httpx.Client]:
    api = Api(server.kubeconfig, real=False)
    with api.http as client:
        yield client


def test_secrets_on_disk_are_private(server: Embedded) -> None:
    assert stat.S_IMODE(server.state.stat().st_mode) == 0o700
    for path in server.state.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_the_kubeconfig_is_complete(server: Embedded) -> None:
    document = yaml.safe_load(server.kubeconfig.read_text())
    assert document["clusters"][0]["cluster"]["server"] == f"https://127.0.0.1:{server.port}"
    assert set(document["clusters"][0]["cluster"]) == {"server", "certificate-authority-data"}
    assert document["current-context"] == document["contexts"][0]["name"]
    assert len(document["users"][0]["user"]["token"]) >= 32


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic dXNlcjpwYXNz", b"Bearer \xff\xfe"])
@pytest.mark.parametrize("path", ["/api/v1/secrets", "/version", "/healthz", "/"])
def test_nothing_is_served_without_the_token(client: httpx.Client, header: str | bytes, path: str) -> None:
    answer = client.get(path, headers={"Authorization": header})
    assert (answer.status_code, answer.json()["reason"]) == (401, "Unauthorized")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:443", "10.0.0.1", "localhost.evil.example", "127.0.0.1.nip.io"]
)
def test_other_names_are_refused(client: httpx.Client, host: str) -> None:
    assert client.get("/version", headers={"Host": host}).status_code == 403


def test_loopback_names_are_served(client: httpx.Client, server: Embedded) -> None:
    for host in (f"127.0.0.1:{server.port}", f"localhost:{server.port}", "localhost"):
        assert client.get("/version", headers={"Host": host}).status_code == 200
    assert client.get("/readyz").text == "ok"


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "https://localhost"])
def test_web_pages_are_refused(client: httpx.Client, origin: str) -> None:
    assert client.post(MAPS, json=config_map("a"), headers={"Origin": origin}).status_code == 403


def test_plain_http_is_not_spoken(server: Embedded) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{server.port}/version", trust_env=False)


def test_the_certificate_is_checked(server: Embedded) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://127.0.0.1:{server.port}/version", trust_env=False)


def test_a_large_body_is_refused(client: httpx.Client) -> None:
    answer = client.post(MAPS, json=config_map("a", {"x": "y" * (4 << 20)}))
    assert (answer.status_code, answer.json()["reason"]) == (413, "RequestEntityTooLarge")


def fails_to_start(state: Path, *arguments: str) -> str:
    """Run the server where it must not start; return its one line."""
    done = subprocess.run(command(state, *arguments), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", "[" * 5000 + "]" * 5000),
        ("application/json", "{"),
        ("application/yaml", "a: " + "[" * 5000 + "]" * 5000),
        ("application/yaml", "a: &a [*a]"),
        ("application/yaml", "a: !!binary aGk="),
        ("application/yaml", "a: 1\n---\nb: 1\n"),
    ],
)
def test_what_does_not_parse_is_the_clients_fault(client: httpx.Client, kind: str, body: str) -> None:
    path = "/api/v1/namespaces/default/configmaps"
    posted = client.post(path, content=body, headers={"Content-Type": kind})
    apply = {"Content-Type": "application/apply-patch+yaml"}
    applied = client.patch(f"{path}/x", params={"fieldManager": "t"}, content=body, headers=apply)
    for answer in (posted, applied):
        assert (answer.status_code, answer.json()["kind"]) == (400, "Status"), answer.text


def test_a_disk_without_room_is_told_in_a_line_and_the_server_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with embedded_server(tmp_path / "state") as server, Api(server.kubeconfig, real=False).http as client:
        process = server.process.pid
        full = (server.state / "journal.jsonl").stat().st_size  # the server's log, which is shorter, still has room
        limits = resource.prlimit(process, resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))
        refused = client.post(MAPS, json=config_map("refused"))
        resource.prlimit(process, resource.RLIMIT_FSIZE, limits)
        assert client.post(MAPS, json=config_map("kept")).status_code == 201
        assert client.get(f"{MAPS}/refused").status_code == 404
    assert (refused.status_code, refused.json()["reason"]) == (500, "InternalError")
    assert "File too large" in refused.json()["message"]
    told = capfd.readouterr().err
    assert f"POST {MAPS} failed" in told and "Traceback" not in told


def test_a_second_server_on_the_same_state_is_refused(server: Embedded) -> None:
    text = fails_to_start(server.state)
    assert text == f"error: another server uses the state folder {server.state}: stop it or give another --state\n"


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = fails_to_start(tmp_path / "state", "--port", str(port))
    assert text.startswith(f"error: can't listen on 127.0.0.1:{port} (")
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "isn't a loopback address"),
        (["--host", "example.com"], "isn't a loopback address"),
        (["--port", "99999"], "isn't a port"),
    ],
)
def test_bad_addresses_are_refused(tmp_path: Path, arguments: list[str], words: str) -> None:
    text = fails_to_start(tmp_path / "state", *arguments)
    assert text.startswith("error: ")
    assert words in text
    assert not (tmp_path / "state").exists()


def test_a_state_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = fails_to_start(tmp_path / "file" / "state")
    assert text.startswith("error: the state folder")
    assert text.count("\n") == 1


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    start(tmp_path).stop()
    journal = tmp_path / "journal.jsonl"
    journal.write_text("nonsense\n" + journal.read_text())
    assert "is damaged" in fails_to_start(tmp_path)


def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    server = start(tmp_path)
    api = Api(server.kubeconfig, real=False)
    api.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", widget_crd("k.paceline.dev")).ok()
    body = {"apiVersion": "k.paceline.dev/v1", "kind": "Widget", "metadata": {"name": "w"}, "spec": {"size": 1}}
    widget = api.post("/apis/k.paceline.dev/v1/namespaces/default/widgets", body).ok()
    for number in range(50):
        api.post(MAPS, config_map(f"m{number}", {"n": str(number)})).ok()
    for number in range(0, 50, 2):
        api.delete(f"{MAPS}/m{number}").ok()
    last = api.patch(f"{MAPS}/m1", {"data": {"n": "changed"}})
    before, kubeconfig = api.get(MAPS).ok(), server.kubeconfig.read_text()
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    api.http.close()

    with embedded_server(tmp_path, "--port", str(server.port)) as again:
        assert again.kubeconfig.read_text() == kubeconfig  # clients go on with what they have
        api = Api(again.kubeconfig, real=False)
        after = api.get(MAPS).ok()
        assert after["items"] == before["items"]
        assert after["metadata"]["resourceVersion"] == last.version
        assert api.get("/apis/k.paceline.dev/v1/namespaces/default/widgets/w").ok() == widget
        with api.watching(MAPS, resourceVersion=last.version) as events:  # a client that was up to date goes on
            api.post(MAPS, config_map("new")).ok()
            assert next(events)[0] == "ADDED"
        with api.watching(MAPS, resourceVersion=str(int(last.version) - 1)) as events:  # one that wasn't lists again
            kind, status = next(events)
            assert (kind, status["code"]) == ("ERROR", 410)
        assert int(api.post(MAPS, config_map("newer")).version) > int(last.version)
        api.http.close()


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    server = start(tmp_path)
    api = Api(server.kubeconfig, real=False)
    kept = api.post(MAPS, config_map("kept")).ok()
    server.stop(signal.SIGKILL)
    api.http.close()
    line = json.dumps({"rev": 99, "key": ["configmaps", "default", "torn"], "object": config_map("torn")})
    with (tmp_path / "journal.jsonl").open("a") as journal:
        journal.write(line[:-10])
    with embedded_server(tmp_path) as again:
        api = Api(again.kubeconfig, real=False)
        assert [item["metadata"]["name"] for item in api.get(MAPS).ok()["items"]] == ["kept"]
        assert api.get(f"{MAPS}/kept").ok() == kept
        api.http.close()


def test_collection_goes_on_after_a_kill(tmp_path: Path) -> None:
    server = start(tmp_path)
    api = Api(server.kubeconfig, real=False)
    owner = api.post(MAPS, config_map("owner", finalizers=["x.dev/y"])).ok()
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    api.post(MAPS, config_map("child", ownerReferences=[{**reference, "blockOwnerDeletion": True}])).ok()
    server.stop(signal.SIGKILL)
    api.http.close()
    with embedded_server(tmp_path) as again:
        api = Api(again.kubeconfig, real=False)
        api.delete(f"{MAPS}/owner", {"propagationPolicy": "Background"}).ok()
        api.patch(f"{MAPS}/owner", {"metadata": {"finalizers": None}}).ok()
        eventually(lambda: api.gone(f"{MAPS}/child"))
        api.http.close()


def test_sigterm_ends_it_quietly_with_open_watches(tmp_path: Path) -> None:
    server = start(tmp_path)
    api = Api(server.kubeconfig, real=False)
    version = api.get(MAPS).version
    with api.watching(MAPS, resourceVersion=version), api.watching(MAPS):
        assert server.stop(signal.SIGTERM) == 0
    api.http.close()


def test_sigterm_right_after_the_start_is_heard(tmp_path: Path) -> None:
    assert start(tmp_path).stop(signal.SIGTERM) == 0


@pytest.fixture(scope="module")
def kubectl(server: Embedded, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run kubectl against the server and return what it printed."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("no kubectl on PATH")
    home = tmp_path_factory.mktemp("home")
    environment = {**os.environ, "KUBECONFIG": str(server.kubeconfig), "HOME": str(home)}
    version = subprocess.run([program, "version", "--client"], env=environment, capture_output=True, check=False)
    if version.returncode != 0:
        pytest.skip(f"kubectl doesn't run: {version.stderr!r}")

    def run(*arguments: str, code: int = 0, editor: str = "", **objects: Any) -> str:
        done = subprocess.run(
            [program, *arguments],
            input=yaml.safe_dump_all(objects.get("manifests", [])),
            env={**environment, "EDITOR": editor},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done
        return done.stdout + done.stderr

    return run


def widget(name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "ctl.paceline.dev/v1", "kind": "Widget", "metadata": {"name": name}, "spec": {"size": 1, **spec}}


@pytest.fixture(scope="module")
def crd(kubectl: Callable[..., str]) -> None:
    assert "created" in kubectl("apply", "-f", "-", manifests=[widget_crd("ctl.paceline.dev")])
    kubectl("wait", "--for=condition=Established", "crd/widgets.ctl.paceline.dev", "--timeout=20s")


@pytest.mark.parametrize("side", [[], ["--server-side"]])
def test_kubectl_applies(kubectl: Callable[..., str], crd: None, side: list[str]) -> None:
    name = "ssa" if side else "csa"
    items = [widget(name), config_map(name, {"x": "1", "y": "2"}), deployment(name, replicas=0)]
    first = kubectl("apply", *side, "-f", "-", manifests=items)
    assert first.count("created" if not side else "serverside-applied") == 3
    if not side:
        assert kubectl("apply", "-f", "-", manifests=items).count("unchanged") == 3
    items[0]["spec"]["size"] = 2
    del items[1]["data"]["y"]
    items[2]["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": "B", "value": "2"}]
    kubectl("apply", *side, "-f", "-", manifests=items)
    stored = json.loads(kubectl("get", f"widget/{name}", f"cm/{name}", f"deploy/{name}", "-o", "json"))["items"]
    assert stored[0]["spec"]["size"] == 2
    assert stored[1]["data"] == {"x": "1"}
    assert stored[2]["spec"]["template"]["spec"]["containers"][0]["env"] == [{"name": "B", "value": "2"}]
    kubectl("delete", f"widget/{name}", f"cm/{name}", f"deploy/{name}")
    assert "NotFound" in kubectl("get", f"widget/{name}", code=1)


def test_kubectl_shows_what_is_wrong(kubectl: Callable[..., str], crd: None) -> None:
    text = kubectl("apply", "-f", "-", manifests=[widget("bad", size=1000)], code=1)
    assert "spec.size: Invalid value: 1000: spec.size in body should be less than or equal to 100" in text
    text = kubectl("apply", "-f", "-", manifests=[widget("bad", typo=1)], code=1)
    assert 'unknown field "spec.typo"' in text


def test_kubectl_reads(kubectl: Callable[..., str], crd: None) -> None:
    kubectl("apply", "-f", "-", manifests=[widget("w", size=7), deployment("d", replicas=0)])
    lines = kubectl("get", "wd").splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "PHASE", "AGE"]
    assert lines[1].split()[:2] == ["w", "7"]
    assert "LEVEL" in kubectl("get", "wd", "-o", "wide")
    assert kubectl("get", "deploy").splitlines()[0].split() == ["NAME", "READY", "UP-TO-DATE", "AVAILABLE", "AGE"]
    assert "widget.ctl.paceline.dev/w" in kubectl("get", "wd", "-o", "name")
    assert "Size:" in kubectl("describe", "wd", "w")
    assert "StrategyType:" in kubectl("describe", "deploy", "d")
    assert "maximum" in kubectl("explain", "widget.spec.size") or "size" in kubectl("explain", "widget.spec")
    assert "ctl.paceline.dev/v1" in kubectl("api-versions")
    assert "No resources found" in kubectl("get", "pods")
    assert "default" in kubectl("get", "ns")


def test_kubectl_changes(kubectl: Callable[..., str], crd: None) -> None:
    kubectl("apply", "-f", "-", manifests=[widget("e"), deployment("e", replicas=0)])
    kubectl("scale", "deploy/e", "--replicas=2")
    kubectl("scale", "widget/e", "--replicas=3")
    kubectl("rollout", "restart", "deploy/e")
    kubectl("patch", "widget", "e", "--type=merge", "-p", '{"spec":{"mode":"static"}}')
    container = [{"name": "main", "env": [{"name": "C", "value": "3"}]}]
    kubectl("patch", "deploy", "e", "-p", json.dumps({"spec": {"template": {"spec": {"containers": container}}}}))
    kubectl("label", "widget", "e", "a=b")
    kubectl("annotate", "deploy", "e", "a=b")
    kubectl("edit", "widget", "e", editor="sed -i s/size:.1/size:\\ 5/")
    kubectl("edit", "deploy", "e", editor="sed -i s/HistoryLimit:.10/HistoryLimit:\\ 3/")
    one, two = json.loads(kubectl("get", "widget/e", "deploy/e", "-o", "json"))["items"]
    assert one["spec"] == {"size": 5, "replicas": 3, "mode": "static", "level": "low"}
    assert one["metadata"]["labels"] == {"a": "b"}
    assert two["spec"]["replicas"] == 2
    assert two["spec"]["revisionHistoryLimit"] == 3
    template = two["spec"]["template"]
    assert {e["name"] for e in template["spec"]["containers"][0]["env"]} == {"A", "C"}
    assert "kubectl.kubernetes.io/restartedAt" in template["metadata"]["annotations"]
    kubectl("delete", "widget,deploy", "--all", "--wait")
    assert "No resources found" in kubectl("get", "widget,deploy")


def test_kubectl_waits_and_watches(kubectl: Callable[..., str], crd: None) -> None:
    kubectl("apply", "-f", "-", manifests=[widget("v")])
    kubectl("patch", "widget", "v", "--subresource=status", "--type=merge", "-p", '{"status":{"phase":"Ready"}}')
    kubectl("wait", "widget/v", "--for=jsonpath={.status.phase}=Ready", "--timeout=20s")
    assert "Ready" in kubectl("get", "widget", "v", "--watch", "--request-timeout=1s")
    assert kubectl("auth", "can-i", "create", "pods").strip() == "yes"
    kubectl("delete", "widget", "v")
