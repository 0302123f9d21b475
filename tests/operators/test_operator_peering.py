"""Another project's kopf operator on the cluster announces itself with our priority: ours goes on all the same.

kopf's own peering, on by default, pauses operators that find a peer of equal priority. Ours has the Lease for that.
"""

from datetime import UTC, datetime, timedelta

import pytest
from operator_kit import loose_crd
from operator_process import Operator

from patience import eventually

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture
def peer(api):
    """A peer of kopf's default priority that stays alive for an hour, in kopf's default peering."""
    crd = loose_crd("KopfPeering", "kopf.dev", "kopfpeerings", version="v1")
    api.call("POST", CRDS, crd)
    until = datetime.now(UTC) + timedelta(minutes=1)
    peer = {"priority": 0, "lifetime": 3600, "lastseen": until.isoformat()}
    body = {"apiVersion": "kopf.dev/v1", "kind": "KopfPeering", "metadata": {"name": "default"}, "status": {"other@1": peer}}
    path = f"/apis/kopf.dev/v1/namespaces/{api.namespace}/kopfpeerings"
    eventually(lambda: api.call("GET", path), "the CRD is served")
    api.call("POST", path, body)
    return f"{path}/default"


def test_a_peer_of_equal_priority_freezes_nothing(api, peer, tmp_path):
    operator = Operator(api, tmp_path / "operator.log")
    try:
        eventually(operator.ready, "the operator has started")
        api.service("watched", batching={"maxNumSeqs": 3})  # after the list at the start: only a watch tells of it
        api.complete("watched")
        assert set(api.call("GET", peer)["status"]) == {"other@1"}  # and nobody was told to pause in our favour
        assert operator.stop() == 0
    finally:
        if operator.running:
            operator.kill()
        print((tmp_path / "operator.log").read_text()[-3000:])
