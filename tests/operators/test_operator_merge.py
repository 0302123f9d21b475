"""Overlays, drift and status patches: pure functions over JSON, each with the law that it has to keep."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_fakes import ALL_APIS
from operator_kit import FULL, service, settings

from paceline_operator.drift import drift, is_owned_by, project
from paceline_operator.names import APPLIED
from paceline_operator.overlay import overlay
from paceline_operator.render import render
from paceline_operator.status import merge_patch

scalars = st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2)
documents = st.dictionaries(
    st.sampled_from("abcd"),
    st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    ),
    max_size=4,
)


def apply_merge_patch(target, patch):
    """RFC 7386, as the API server applies it."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = apply_merge_patch(result.get(key), value)
    return result


@given(documents, documents)
def test_a_merge_patch_turns_the_old_status_into_the_new(old, new):
    assert apply_merge_patch(old, merge_patch(old, new)) == new


@given(documents)
def test_nothing_to_patch_gives_an_empty_patch(document):
    assert merge_patch(document, copy.deepcopy(document)) == {}


@given(documents, documents)
def test_an_overlay_says_all_that_its_top_says(base, top):
    merged = overlay(base, top)
    assert overlay(merged, top) == merged
    assert set(merged) == set(base) | set(top)


def test_an_overlay_leaves_its_input_alone():
    base, top = {"a": {"b": [1]}}, {"a": {"c": 2, "b": None}}
    assert overlay(base, top) == {"a": {"c": 2}}
    assert (base, top) == ({"a": {"b": [1]}}, {"a": {"c": 2, "b": None}})


def test_an_overlay_of_a_list_with_a_nameless_item_replaces_it():
    assert overlay([{"name": "a"}], [{"image": "x"}], "containers") == [{"image": "x"}]


def child(kind="Deployment"):
    return next(c for c in render(service(FULL), settings(), ALL_APIS) if c["kind"] == kind)


def live(desired):
    """What a server makes of it: defaults, foreign fields, its own metadata, quantities in its own form."""
    found = copy.deepcopy(desired)
    found["metadata"] |= {"uid": "u", "resourceVersion": "7", "managedFields": [{}]}
    found["metadata"]["labels"]["foreign"] = "label"
    if found["kind"] == "Deployment":
        pod = found["spec"]["template"]["spec"]
        pod["dnsPolicy"] = "ClusterFirst"
        pod["containers"].append({"name": "injected", "image": "mesh"})
        pod["containers"][0]["env"].append({"name": "INJECTED", "value": "1"})
        pod["containers"][0]["imagePullPolicy"] = "Always"
        pod["containers"][0]["resources"]["limits"]["cpu"] = "8000m"
        pod["volumes"].reverse()
        found["status"] = {"replicas": 1}
    return found


@pytest.mark.parametrize("kind", ["Deployment", "Service", "ConfigMap", "ServiceAccount", "PodDisruptionBudget"])
def test_what_the_server_and_others_add_is_no_drift(kind):
    assert drift(child(kind), live(child(kind))) is None


def test_another_api_version_of_the_same_object_is_no_drift():
    desired = child("PodDisruptionBudget")
    assert drift(desired, live(desired) | {"apiVersion": "policy/v1beta1"}) is None


def changed(path, value):
    found = live(child())
    *parents, last = path
    target = found
    for part in parents:
        target = target[part]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return found


TEMPLATE = ("spec", "template", "spec")
DRIFTS = [
    (("spec", "replicas"), 9),
    (("spec", "replicas"), True),
    ((*TEMPLATE, "containers", 0, "image"), "other"),
    ((*TEMPLATE, "containers", 0, "args"), []),
    ((*TEMPLATE, "containers", 0, "env", 0), None),
    ((*TEMPLATE, "containers", 0, "resources", "limits", "memory"), "1Gi"),
    ((*TEMPLATE, "containers", 0), None),
    ((*TEMPLATE, "volumes"), None),
    ((*TEMPLATE, "automountServiceAccountToken"), None),
    (("metadata", "labels", "app.kubernetes.io/managed-by"), "helm"),
    (("metadata", "ownerReferences"), None),
    (("metadata", "annotations", APPLIED), "older"),
    (("metadata", "annotations"), None),
]


@pytest.mark.parametrize(("path", "value"), DRIFTS, ids=[f"{path[-1]}={value}" for path, value in DRIFTS])
def test_each_change_of_our_fields_is_drift(path, value):
    assert drift(child(), changed(path, value)) is not None


def test_the_projection_is_the_servers_form_of_our_fields():
    desired = child()
    server = live(desired)
    server["spec"]["template"]["spec"]["containers"][0]["args"] = ["normalised"]
    projected = project(desired, server)
    assert projected["spec"]["template"]["spec"]["containers"][0]["args"] == ["normalised"]
    assert "status" not in projected
    assert "foreign" not in projected["metadata"]["labels"]


def test_only_a_controller_owns():
    owned = {"metadata": {"ownerReferences": [{"uid": "a", "controller": True}, {"uid": "b"}]}}
    assert is_owned_by(owned, "a")
    assert not is_owned_by(owned, "b")
    assert not is_owned_by({"metadata": {}}, "a")
