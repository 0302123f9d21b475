"""The admission webhook on a real API server, which asks it by itself, and what becomes of manifests once nobody answers."""

import contextlib
import copy
import json
import socket

import pytest
from kubernetes import client
from operator_kit import MINIMAL
from operator_process import REAL, Operator
from test_operator_webhook import BAD

from patience import eventually

SERVERS = REAL

CONFIGS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


def hook(name, port, policy, resources, **selector):
    return {
        "name": name,
        "clientConfig": {"url": f"https://127.0.0.1:{port}/validate"},
        "rules": [
            {
                "apiGroups": ["paceline.io"],
                "apiVersions": ["v1alpha1"],
                "operations": ["CREATE", "UPDATE"],
                "resources": resources,
            }
        ],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "failurePolicy": policy,
        "timeoutSeconds": 10,
        **selector,
    }


@pytest.fixture(params=["Fail"])
def guarded(api, tmp_path, request):
    """An operator with its webhook, which the API server asks about this test's namespace and classes only. `params` are the
    policies for when it doesn't answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    name = api.namespace
    labels = {"metadata": {"labels": {"guard": name}}}
    api.call("PATCH", f"/api/v1/namespaces/{name}", labels, "application/merge-patch+json")
    selector = {"matchLabels": {"guard": name}}
    hooks = [
        hook("services.paceline.io", port, request.param, ["inferenceservices"], namespaceSelector=selector),
        hook("classes.paceline.io", port, request.param, ["inferenceclasses"], objectSelector=selector),
    ]
    api.call("POST", CONFIGS, {"metadata": {"name": name}, "webhooks": hooks})
    operator = Operator(
        api,
        tmp_path / "operator.log",
        PACELINE_WEBHOOK_PORT=str(port),
        PACELINE_WEBHOOK_HOST="127.0.0.1",
        PACELINE_WEBHOOK_NAMES="127.0.0.1",
        PACELINE_WEBHOOK_CONFIG=name,
        PACELINE_OPERATOR_NAMESPACE=name,
    )
    yield operator
    api.call("DELETE", f"{CONFIGS}/{name}")
    with contextlib.suppress(client.ApiException):
        api.call("DELETE", f"/apis/paceline.io/v1alpha1/inferenceclasses/{name}")
    operator.kill()
    print((tmp_path / "operator.log").read_text()[-4000:])


def refused(api):
    """Return what the webhook itself says about a bad manifest, None if it isn't asked, or not trusted."""
    found = dry_run(api, BAD)
    return found if found and "problems" in found["message"] else None


def dry_run(api, spec):
    item = {"apiVersion": "paceline.io/v1alpha1", "kind": "InferenceService", "metadata": {"name": "dry"}, "spec": spec}
    try:
        api.call("POST", api.path("InferenceService") + "?dryRun=All", item)
    except client.ApiException as error:
        return json.loads(error.body or error.reason)
    return None


def test_the_api_server_refuses_what_the_operator_could_not_use(api, guarded):
    eventually(lambda: guarded.answers("/readyz"), "it serves")

    found = eventually(lambda: refused(api), "the API server trusts the webhook and asks it")
    assert found["code"] == 422
    assert {cause["field"] for cause in found["details"]["causes"]} >= {"spec.image", "spec.env[0].name"}
    assert "'evil' (image isn't allowed)" in found["message"]
    assert dry_run(api, MINIMAL) is None

    meta = {"name": api.namespace, "labels": {"guard": api.namespace}}
    classes = "/apis/paceline.io/v1alpha1/inferenceclasses"
    item = {"apiVersion": "paceline.io/v1alpha1", "kind": "InferenceClass", "metadata": meta}
    with pytest.raises(client.ApiException, match="min ≤ max"):
        api.call("POST", classes, item | {"spec": {"limits": {"knobs": {"maxNumSeqs": {"min": 9, "max": 3}}}}})
    api.call("POST", classes, item | {"spec": {"limits": {"maxReplicas": 2}}})
    limited = copy.deepcopy(MINIMAL) | {"className": api.namespace, "replicas": 3}
    assert "at most 2" in dry_run(api, limited)["message"]
    assert dry_run(api, limited | {"replicas": 2}) is None

    # the certificate is lost: whoever notices makes another, and the API server learns whom to trust then
    api.delete("Secret", "paceline-webhook")
    eventually(lambda: api.get("Secret", "paceline-webhook"), "it is made anew")
    eventually(lambda: refused(api), "the API server trusts the new one")


def stopped(operator, api):
    """Wait until the webhook is asked, then end the operator as a rollout or a drained node does."""
    eventually(lambda: refused(api), "the webhook is asked")
    assert operator.stop() == 0


@pytest.mark.parametrize("guarded", ["Fail"], indirect=True)
def test_while_a_failing_webhook_is_away_nothing_new_comes_in_and_all_else_goes_on(api, guarded):
    eventually(lambda: refused(api), "the webhook is asked")
    api.service("closed")
    api.complete("closed")
    stopped(guarded, api)
    found = dry_run(api, MINIMAL)
    assert "services.paceline.io" in found["message"]  # whoever reads it knows what to look at
    with pytest.raises(client.ApiException):
        api.merge("InferenceService", "closed", {"spec": {"replicas": 1}})
    api.merge("InferenceService", "closed", {"status": {"replicas": 0}}, "/status")  # autoscalers and status go on
    api.delete("InferenceService", "closed")  # and deletion asks nobody
    assert api.get("InferenceService", "closed") is None
    guarded.start()
    eventually(lambda: refused(api), "it is asked again, with the certificate that it had")
    assert dry_run(api, MINIMAL) is None


@pytest.mark.parametrize("guarded", ["Ignore"], indirect=True)
def test_what_comes_in_while_an_ignored_webhook_is_away_is_told_in_the_status(api, guarded):
    stopped(guarded, api)
    api.service("open", **{name: value for name, value in BAD.items() if name != "model"})
    guarded.start()
    eventually(lambda: api.condition("open", "SpecValid").get("status") == "False", "the operator says what it can't use")
    assert "image isn't allowed" in api.condition("open", "SpecValid")["message"]
    assert api.children("open") == {}
    eventually(lambda: refused(api), "the webhook is asked again")
