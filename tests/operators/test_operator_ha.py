"""Two operators as processes on one API server: one acts, the other follows when it is killed, paused or ends."""

import contextlib
import json
import signal

import pytest
from operator_process import BOTH, Operator

from patience import eventually

SERVERS = BOTH
DURATION = 4  # seconds: the default of 9 would only make the test longer


class Replica(Operator):
    """One of several operators; `log` is its own."""

    def __init__(self, api, log):
        self.log = log
        election = {"PACELINE_LEADER_ELECTION": "true", "PACELINE_LEASE_DURATION": str(DURATION)}
        super().__init__(api, log, **election, PACELINE_OPERATOR_NAMESPACE=api.namespace)

    @property
    def leads(self):
        return self.log.exists() and "leads as" in self.log.read_text()

    @property
    def waits(self):
        return self.log.exists() and "waits for its Lease" in self.log.read_text()

    def writes(self):
        """Return the calls that change something other than the Lease."""
        lease = self.calls("Lease")
        return {
            verb: count - lease.get(verb, 0)
            for verb, count in self.calls().items()
            if verb != "GET" and count - lease.get(verb, 0)
        }


@pytest.fixture
def replicas(api, tmp_path):
    found = []

    def start(name):
        found.append(Replica(api, tmp_path / f"{name}.log"))
        return found[-1]

    yield start
    for replica in found:
        with contextlib.suppress(ProcessLookupError):
            replica.signal(signal.SIGCONT)
        if replica.running:
            replica.kill()
        print(replica.log.name, replica.log.read_text()[-3000:])


def knobs_are(api, name, seqs):
    found = api.get("ConfigMap", f"{name}-knobs")
    return found is not None and json.loads(found["data"]["knobs.json"])["knobs"]["maxNumSeqs"] == seqs


def lease(api):
    return api.get("Lease", "paceline-operator")


def versions(api, name):
    found = {kind: child["metadata"]["resourceVersion"] for kind, child in api.children(name).items()}
    return found | {
        "service": api.get("InferenceService", name)["metadata"]["resourceVersion"],
        "events": len(api.events(name)),
    }


def set_seqs(api, name, seqs):
    api.merge("InferenceService", name, {"spec": {"batching": {"maxNumSeqs": seqs}}})
    eventually(lambda: knobs_are(api, name, seqs), f"maxNumSeqs {seqs} arrives")


def test_one_acts_and_the_other_follows(api, replicas):
    first = replicas("first")
    eventually(lambda: first.leads, "the first leads")
    second = replicas("second")
    eventually(lambda: second.waits, "the second waits")
    assert second.answers("/readyz")  # a replica that waits serves admission
    api.service("ha", batching={"maxNumSeqs": 3})
    api.complete("ha")
    assert second.writes() == {}
    before = lease(api)["spec"]["leaseTransitions"]

    first.signal(signal.SIGSTOP)
    set_seqs(api, "ha", 4)  # the second has followed
    assert second.leads
    fence = lease(api)["spec"]["leaseTransitions"]
    assert fence == before + 1
    eventually(lambda: api.get("InferenceService", "ha")["status"]["observedGeneration"] == 2, "the status is written")

    settled = versions(api, "ha")
    first.signal(signal.SIGCONT)
    assert first.wait() != 0
    assert "error: another replica leads now" in first.log.read_text()
    assert versions(api, "ha") == settled
    assert lease(api)["spec"]["leaseTransitions"] == fence

    third = replicas("third")
    eventually(lambda: third.waits, "the third waits")
    second.kill()
    set_seqs(api, "ha", 5)
    assert third.leads

    fourth = replicas("fourth")
    eventually(lambda: fourth.waits, "the fourth waits")
    assert third.stop() == 0
    assert "gave the Lease back" in third.log.read_text()
    set_seqs(api, "ha", 6)
    assert fourth.leads
    assert fourth.stop() == 0
    assert lease(api)["spec"].get("holderIdentity", "") == ""


def test_a_candidate_ends_at_once_when_asked(api, replicas):
    first = replicas("leader")
    eventually(lambda: first.leads, "the first leads")
    second = replicas("candidate")
    eventually(lambda: second.waits, "the second waits")
    assert second.stop() == 0
    assert first.running
