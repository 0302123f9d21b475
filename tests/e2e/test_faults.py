"""Every kind of fault in a manifest is told in words, at the object, and leaves nothing half-made."""

import pytest
from kubernetes import client
from stacks import eventually, manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# a fault in the spec → words that must be in what the user sees
REFUSED = {
    "unknown-field": ({"batchings": {"maxNumSeqs": 4}}, ["batchings"]),
    "wrong-type": ({"replicas": "two"}, ["replicas"]),
    "out-of-bounds": ({"batching": {"maxNumSeqs": 0}}, ["maxNumSeqs"]),
    "unknown-strategy": ({"batching": {"strategy": "psychic"}}, ["strategy", "continuous"]),
    "budget-below-slots": ({"batching": {"maxNumSeqs": 64, "maxNumBatchedTokens": 8}}, ["maxNumBatchedTokens", "64"]),
    "bad-duration": ({"slo": {"ttft": "5"}}, ["ttft"]),
    "unknown-scheme": ({"model": {"uri": "ftp://somewhere/model"}}, ["uri", "ftp"]),
}


def words(stack, document):
    """What the user sees: the API server's refusal, or the object's conditions."""
    try:
        fleet = stack.apply(document)
    except client.ApiException as refusal:
        if refusal.status not in (400, 422):
            raise
        return refusal.body
    condition = eventually(lambda: fleet.conditions().get("SpecValid"), "SpecValid")
    assert condition["status"] == "False", condition
    return condition["message"]


@pytest.mark.parametrize("fault", sorted(REFUSED))
def test_a_bad_field_is_named(stack, fault):
    change, expected = REFUSED[fault]
    document = manifest(f"bad-{fault}", stack.namespace, **change)
    seen = words(stack, document)
    assert all(word in seen for word in expected), seen
    assert stack.leftovers(document["metadata"]["name"]) == []


@pytest.fixture
def broken_files(tmp_path):
    corrupt = tmp_path / "corrupt.gguf"
    corrupt.write_bytes(b"GGUF" + b"\xff" * 64)
    return {"missing": "file:///nowhere/model.gguf", "corrupt": f"file://{corrupt}"}


@pytest.mark.parametrize("fault", ["missing", "corrupt"])
def test_a_model_that_cannot_load_is_told(local_stack, broken_files, fault):
    name = f"model-{fault}"
    fleet = local_stack.apply(manifest(name, local_stack.namespace, model={"uri": broken_files[fault]}))
    uri = broken_files[fault].removeprefix("file://")
    message = eventually(lambda: _says(fleet, uri), "a condition that names the file")
    assert fleet.conditions()["Ready"]["status"] == "False", message
    assert uri in local_stack.paceline("local", "get").stdout.replace("\n", "")
    local_stack.delete(name)
    eventually(lambda: not local_stack.leftovers(name), "nothing left")


def _says(fleet, text):
    return next((c["message"] for c in fleet.conditions().values() if text in c.get("message", "")), None)


def test_a_second_up_says_that_it_is_up(local_stack):
    again = local_stack.paceline("local", "up", check=False)
    assert again.returncode == 2
    assert "already" in again.stderr
    assert len(again.stderr.strip().splitlines()) == 1
