"""Calls to the API server against a scripted one: retries, refusals, what an apply says and what it never asks for."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest
from kubernetes import client
from kubernetes.config import ConfigException
from operator_fakes import ALL_APIS
from operator_kit import service, settings

from paceline_operator import cluster as cluster_module
from paceline_operator.cluster import KINDS, Cluster, load_configuration
from paceline_operator.errors import ApiRefused, ApiUnavailable, SettingsError
from paceline_operator.metrics import Metrics
from paceline_operator.names import POSTED
from paceline_operator.ownership import claimed
from paceline_operator.render import render


class Script(BaseHTTPRequestHandler):
    """Answers from `server.answers` (status, body, headers), the last one for ever, and records requests."""

    def _serve(self):
        length = int(self.headers.get("Content-Length", 0))
        self.server.requests.append((self.command, self.path, dict(self.headers), self.rfile.read(length)))
        answers = self.server.answers
        status, data, headers = answers.pop(0) if len(answers) > 1 else answers[0]
        text = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(text)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PATCH = do_POST = do_DELETE = _serve

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    found = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    found.requests, found.answers = [], [(200, {}, {})]
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def api(server, metrics, monkeypatch):
    monkeypatch.setattr(cluster_module, "_FIRST_BACKOFF", 0.001)
    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{server.server_port}"
    configuration.retries = False
    found = Cluster(configuration, metrics, threads=2)
    yield found
    found.close()


def child(kind="Deployment"):
    return next(c for c in render(service(), settings(), ALL_APIS) if c["kind"] == kind)


async def test_an_apply_is_forced_for_one_field_manager(api, server):
    server.answers = [(200, {"metadata": {"name": "chat"}}, {})]
    assert await api.apply(child()) == {"metadata": {"name": "chat"}}
    ((verb, path, headers, data),) = server.requests
    assert verb == "PATCH"
    assert path == "/apis/apps/v1/namespaces/team-a/deployments/chat?fieldManager=paceline-operator&force=true"
    assert headers["Content-Type"] == "application/apply-patch+yaml"
    assert json.loads(data) == child()


@pytest.mark.parametrize("status", [429, 500, 503, 409, 408])
async def test_a_passing_trouble_is_tried_again(api, server, metrics, status):
    server.answers = [(status, {"message": "later"}, {}), (status, {"message": "later"}, {}), (200, {"kind": "Pod"}, {})]
    assert await api.get("Pod", "a", "b") == {"kind": "Pod"}
    assert len(server.requests) == 3
    assert metrics.api_calls.labels("GET", "Pod", str(status))._value.get() == 2


async def test_a_lasting_trouble_ends_with_its_words(api, server):
    server.answers = [(503, {"message": "etcd is gone"}, {"Retry-After": "0"})]
    with pytest.raises(ApiUnavailable, match="etcd is gone"):
        await api.get("Pod", "a", "b")
    assert len(server.requests) == 5


@pytest.mark.parametrize("text", ["Bad Gateway", [], None])
async def test_json_that_is_no_object_is_a_passing_trouble(api, server, text):
    server.answers = [(200, text, {}), (200, {"kind": "Deployment"}, {})]
    assert await api.get("Deployment", "a", "b") == {"kind": "Deployment"}


async def test_a_token_that_can_not_be_read_for_a_moment_is_a_passing_trouble(api, server):
    def refresh(configuration):
        configuration.refresh_api_key_hook = None
        raise ConfigException("Token file exists but empty.")

    server.answers = [(200, {"kind": "Deployment"}, {})]
    api._client.configuration.api_key = {"BearerToken": "x", "authorization": "x"}  # its name differs between versions
    api._client.configuration.refresh_api_key_hook = refresh
    assert await api.get("Deployment", "a", "b") == {"kind": "Deployment"}


async def test_a_body_that_is_no_json_is_a_passing_trouble(api, server):
    server.answers = [(200, b"<html>proxy</html>", {}), (200, {"kind": "Pod"}, {})]
    assert await api.get("Pod", "a", "b") == {"kind": "Pod"}


@pytest.mark.parametrize("status", [400, 401, 403, 422])
async def test_a_refusal_is_told_at_once(api, server, status):
    server.answers = [(status, {"message": "no, because"}, {})]
    with pytest.raises(ApiRefused, match="no, because") as raised:
        await api.apply(child())
    assert raised.value.status == status
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "message", ["failed to create typed patch object: .spec.foo", "failed to convert new object to proper"]
)
async def test_what_old_servers_call_their_own_error_is_a_refusal(api, server, message):
    server.answers = [(500, {"message": message}, {})]
    with pytest.raises(ApiRefused, match=message):
        await api.apply(child())
    assert len(server.requests) == 1


async def test_a_server_that_is_not_there_is_unavailable(monkeypatch, metrics):
    monkeypatch.setattr(cluster_module, "_FIRST_BACKOFF", 0.001)
    configuration = client.Configuration()
    configuration.host, configuration.retries = "http://127.0.0.1:9", False
    api = Cluster(configuration, metrics, threads=1)
    with pytest.raises(ApiUnavailable):
        await api.get("Pod", "a", "b")
    assert metrics.api_calls.labels("GET", "Pod", "0")._value.get() == 5
    api.close()


async def test_what_is_not_there_is_none(api, server):
    server.answers = [(404, {"message": "not found"}, {})]
    assert await api.get("Pod", "a", "b") is None
    assert await api.patch_status("a", "b", "7", {}) is None
    with pytest.raises(ApiUnavailable, match="kubectl apply -f crds/"):
        await api.services(None)
    with pytest.raises(ApiUnavailable):
        await api.apply(child())


async def test_a_status_is_written_only_over_what_it_was_made_from(api, server):
    server.answers = [(409, {"message": "the object has been modified"}, {})]
    with pytest.raises(ApiUnavailable, match="b has changed meanwhile"):
        await api.patch_status("a", "b", "7", {"replicas": 1})
    (request,) = server.requests  # asking again can't help
    assert json.loads(request[3]) == {"metadata": {"resourceVersion": "7"}, "status": {"replicas": 1}}


async def test_lists_are_of_our_label(api, server):
    server.answers = [(200, {"items": [{"metadata": {"name": "x"}}]}, {})]
    assert await api.children("Deployment", None) == [{"kind": "Deployment", "metadata": {"name": "x"}}]
    await api.children("Pod", "a")
    paths = [unquote(path) for _, path, _, _ in server.requests]
    assert paths == [
        "/apis/apps/v1/deployments?labelSelector=paceline.io/service&limit=250",
        "/api/v1/namespaces/a/pods?labelSelector=paceline.io/service&limit=250",
    ]


def listed(*names, place=""):
    items = [{"metadata": {"name": name, "managedFields": [{"manager": "x"}]}} for name in names]
    return 200, {"metadata": {"continue": place}, "items": items}, {}


async def test_a_long_list_is_read_in_pages_and_without_its_bulk(api, server):
    server.answers = [listed("a", "b", place="more"), listed("c")]
    assert [item["metadata"] for item in await api.services(None)] == [{"name": "a"}, {"name": "b"}, {"name": "c"}]
    assert [path.partition("?")[2] for _, path, _, _ in server.requests] == ["limit=250", "limit=250&continue=more"]


async def test_a_list_whose_place_is_forgotten_begins_anew(api, server):
    server.answers = [
        listed("a", place="more"),
        (410, {"message": "The provided continue parameter is too old"}, {}),
        listed("b"),
    ]
    assert [item["metadata"]["name"] for item in await api.services(None)] == ["b"]
    assert len(server.requests) == 3


def discovery(**served):
    """Answers of a server with these group versions (`policy_v1`) and their plurals."""
    ways = [name.replace("__", ".").replace("_", "/") for name in served]
    versions = [{"versions": [{"groupVersion": way}]} for way in ways]
    plurals = {way: [{"name": plural} for plural in found] for way, found in zip(ways, served.values(), strict=True)}
    return [(200, {"groups": versions}, {}), *((200, {"resources": plurals[way]}, {}) for way in sorted(ways))]


@pytest.mark.parametrize(
    ("served", "chosen"),
    [
        ({"policy_v1beta1": ["poddisruptionbudgets"]}, "policy/v1beta1"),
        ({"policy_v1": ["poddisruptionbudgets"], "policy_v1beta1": ["poddisruptionbudgets"]}, "policy/v1"),
        ({"policy_v1": ["poddisruptionbudgets"]}, "policy/v1"),
    ],
)
async def test_the_versions_of_kinds_are_discovered(api, server, served, chosen):
    server.answers = discovery(**served)
    assert await api.discover()
    assert api.apis["PodDisruptionBudget"] == chosen
    assert "ScaledObject" not in api.apis
    await api.get("PodDisruptionBudget", "a", "b")
    assert f"/apis/{chosen}/namespaces/a/poddisruptionbudgets/b" in server.requests[-1][1]


async def test_a_group_alone_is_no_kind_and_what_stays_the_same_is_no_news(api, server):
    server.answers = discovery(keda__sh_v1alpha1=["scaledjobs"]) + discovery(keda__sh_v1alpha1=["scaledobjects"]) * 2
    await api.discover()
    assert "ScaledObject" not in api.apis
    assert await api.discover()
    assert api.apis["ScaledObject"] == "keda.sh/v1alpha1"
    assert not await api.discover()


async def test_a_child_is_created_only_where_there_is_none(api, server):
    server.answers = [(201, {"metadata": {"name": "chat"}}, {}), (409, {"message": "modified"}, {})]
    assert await api.create(child()) == {"metadata": {"name": "chat"}}
    assert await api.create(child()) is None
    assert [json.loads(request[3])["metadata"]["resourceVersion"] for request in server.requests] == ["1", "1"]


async def test_a_server_that_takes_no_condition_gets_posts_from_then_on(api, server):
    """Kubernetes 1.20 about Services: one refusal tells it, for this kind alone."""
    refusal = {"message": "resourceVersion should not be set on objects to be created"}
    made = (201, {"metadata": {"name": "chat"}}, {})
    server.answers = [(500, refusal, {}), made, (409, {"message": "already exists"}, {}), made]
    assert await api.create(child("Service")) == {"metadata": {"name": "chat"}}
    assert await api.create(child("Service")) is None
    assert await api.create(child()) == {"metadata": {"name": "chat"}}
    assert [request[0] for request in server.requests] == ["PATCH", "POST", "POST", "PATCH"]
    posted = json.loads(server.requests[1][3])["metadata"]
    assert (posted["annotations"][POSTED], "resourceVersion" in posted) == ("true", False)
    assert server.requests[1][1] == "/api/v1/namespaces/team-a/services?fieldManager=paceline-operator"


async def test_what_was_not_posted_is_claimed_without_a_call(api, server):
    await api.claim(child("Service"))
    assert server.requests == []


async def test_a_claim_is_of_the_version_that_was_read(api, server, monkeypatch):
    live = child("Service")
    live["metadata"] |= {"uid": "u", "annotations": {POSTED: "true"}, "resourceVersion": "7"}
    server.answers = [(200, {**live, "metadata": live["metadata"] | {"resourceVersion": "8"}}, {})]
    await api.claim(live)
    patch = json.loads(server.requests[-1][3])["metadata"]
    assert (patch["resourceVersion"], patch["annotations"]) == ("8", {POSTED: None})
    server.answers = [(200, {**live, "metadata": live["metadata"] | {"uid": "another"}}, {})]
    before = len(server.requests)
    await api.claim(live)
    assert [request[0] for request in server.requests[before:]] == ["GET"]


async def test_a_deletion_is_of_this_very_object(api, server):
    live = {"kind": "Deployment", "metadata": {"name": "chat", "namespace": "a", "uid": "u"}}
    server.answers = [(200, {}, {}), (404, {"message": "gone"}, {}), (409, {"message": "uid differs"}, {})]
    for _ in range(3):
        await api.delete(live)
    assert json.loads(server.requests[0][3])["preconditions"] == {"uid": "u"}


def test_secrets_are_not_among_the_kinds_that_are_read():
    assert "Secret" not in KINDS


async def test_an_event_that_is_there_is_counted_up(api, server):
    event = {"metadata": {"name": "chat.1", "namespace": "a"}, "lastTimestamp": "later", "count": 1}
    event |= {"message": "again", "type": "Normal"}
    server.answers = [(409, {"message": "exists"}, {}), (200, {"count": 3}, {}), (200, {}, {})]
    await api.create_event(event)
    verbs = [(verb, path) for verb, path, _, _ in server.requests]
    assert verbs == [
        ("POST", "/api/v1/namespaces/a/events"),
        ("GET", "/api/v1/namespaces/a/events/chat.1"),
        ("PATCH", "/api/v1/namespaces/a/events/chat.1"),
    ]
    assert json.loads(server.requests[-1][3]) == {
        "count": 4,
        "lastTimestamp": "later",
        "message": "again",
        "type": "Normal",
    }


def test_without_a_server_to_talk_to_the_message_says_what_to_set(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="KUBECONFIG"):
        load_configuration()


def entry(operation, fields, manager="paceline-operator", **more):
    return {"manager": manager, "operation": operation, "apiVersion": "v1", "fieldsV1": fields} | more


def test_what_a_manager_wrote_counts_as_applied_by_it():
    port = 'k:{"port":1}'
    posted = entry("Update", {"f:spec": {"f:type": {}, "f:ports": {".": {}, port: {"f:name": {}}}}})
    applied = entry("Apply", {"f:spec": {"f:ports": {port: {"f:port": {}}}, "f:selector": {}}})
    theirs, status = entry("Update", {"f:x": {}}, "kubectl"), entry("Update", {"f:status": {}}, subresource="status")
    *others, mine = claimed([posted, theirs, applied, status], "paceline-operator")
    assert others == [theirs, status]
    assert mine["operation"] == "Apply"
    ports = {".": {}, port: {"f:name": {}, "f:port": {}}}
    assert mine["fieldsV1"] == {"f:spec": {"f:type": {}, "f:ports": ports, "f:selector": {}}}
    assert claimed([theirs], "paceline-operator") == [theirs]
