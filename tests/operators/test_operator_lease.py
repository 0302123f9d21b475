"""Leader election: pure rules on made-up seconds, and candidates on a real API server."""

import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from kubernetes import client, config

from embedded import embedded_server
from paceline_operator.errors import LeaseError
from paceline_operator.leader import Elected, Election
from paceline_operator.lease import Record, Times, View, claim, release, renewal
from paceline_operator.metrics import Metrics
from paceline_operator.transport import Answer

NOW = datetime(2030, 1, 1, tzinfo=UTC)
FAST = Times(duration=4.0, deadline=3.0, retry=0.1)  # seconds that a busy machine keeps


def record(holder="a", transitions=5, duration=9.0, renewed="t1", version="7"):
    return Record(holder, transitions, duration, renewed, version)


def test_a_lease_that_keeps_changing_stays_taken_whatever_its_times_say():
    view = View(record(renewed="1970-01-01T00:00:00Z"), 100.0)  # the holder's clock is wrong by decades
    assert not view.is_free("b", 9.0, 108.9)
    view = view.updated(record(renewed="1970-01-01T00:00:02Z"), 108.0)
    assert not view.is_free("b", 9.0, 116.0)
    view = view.updated(record(renewed="1970-01-01T00:00:02Z"), 116.0)  # looked, no change
    assert view.is_free("b", 9.0, 117.0)


def test_a_candidate_that_comes_new_waits_a_whole_duration_whatever_the_lease_says():
    view = View(record(renewed="1970-01-01T00:00:00Z"), 50.0)
    assert not view.is_free("b", 9.0, 58.9)
    assert view.is_free("b", 9.0, 59.0)


def test_the_longer_duration_counts():
    assert not View(record(duration=60), 0.0).is_free("b", 9.0, 59.0)
    assert not View(record(duration=1), 0.0).is_free("b", 9.0, 8.0)


@pytest.mark.parametrize("found", [Record(), record(holder="")])
def test_a_released_or_missing_lease_is_free_at_once(found):
    assert View(found, 0.0).is_free("b", 9.0, 0.0)


def test_every_acquisition_raises_the_number_also_over_a_release_or_a_deletion():
    first = claim(Record(), "a", 9.0, NOW)
    given_back = release({"spec": first}, NOW)
    second = claim(Record("", given_back["leaseTransitions"], 1, "t", "8"), "a", 9.0, NOW)
    anew = claim(Record(), "b", 9.0, NOW + timedelta(seconds=60))
    assert first["leaseTransitions"] < second["leaseTransitions"] < anew["leaseTransitions"] < 2**31
    assert renewal({"spec": second}, NOW)["leaseTransitions"] == second["leaseTransitions"]


def test_a_holder_gives_up_before_a_candidate_may_start():
    times = Times()
    # connect + answer of one call may pass between the holder's last check and the write's arrival
    assert times.deadline + 3.0 <= times.duration
    assert times.duration + times.retry < 15 - 3


def test_without_an_election_everything_may_act_and_nothing_is_fenced():
    assert (Elected().fence(), Elected().may_act()) == (0, True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with embedded_server(tmp_path_factory.mktemp("lease")) as found:
        yield found


class Clock:
    """Seconds that pass as the real ones do, and more when asked to."""

    def __init__(self):
        self.extra = 0.0

    def __call__(self):
        return time.monotonic() + self.extra


@pytest.fixture
def candidates(server, request):
    made = []

    def make(identity, clock=None, times=FAST):
        configuration = client.Configuration()
        configuration.retries = False
        config.load_kube_config(str(server.kubeconfig), client_configuration=configuration)
        name = "lease-" + request.node.name.replace("_", "-")[-40:]
        found = Election(configuration, "default", name, Metrics(), identity=identity, times=times, clock=clock or Clock())
        made.append(found)
        return found

    yield make
    for found in made:
        found.stop()


def waits(candidate):
    """Let a candidate try on a thread; return an event that is set when it leads."""
    leads = threading.Event()
    threading.Thread(target=lambda: candidate.acquire() and leads.set(), daemon=True).start()
    return leads


def eventually(check):
    deadline = time.monotonic() + 20
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def follows(candidate, clock):
    """Let a candidate try, and its patience pass once it has seen the Lease; return once it leads."""
    leads = waits(candidate)
    eventually(lambda: candidate._view is not None)
    clock.extra += FAST.duration
    assert leads.wait(20)


def test_one_leads_and_a_clean_exit_hands_over_at_once(candidates):
    first, second = candidates("a"), candidates("b")
    assert first.acquire()
    first.hold(lambda: None)
    leads = waits(second)
    assert not leads.wait(1.5 * FAST.duration)
    assert first.may_act() and not second.may_act()
    first.release()
    assert leads.wait(10)
    assert second.fence() > first.fence()
    assert second.may_act() and not first.may_act()


def test_a_leader_that_stops_renewing_is_followed_and_refuses_to_act_before_that(candidates):
    clock, patience = Clock(), Clock()
    first, second = candidates("a", clock), candidates("b", patience)
    assert first.acquire()  # and never renews: as if it was paused
    clock.extra = FAST.deadline
    assert not first.may_act()
    follows(second, patience)
    assert second.fence() == first.fence() + 1


def test_a_paused_leader_that_wakes_up_learns_that_it_was_followed(candidates):
    patience = Clock()
    first, second = candidates("a"), candidates("b", patience)
    assert first.acquire()
    follows(second, patience)
    lost = threading.Event()
    first.hold(lost.set)
    assert lost.wait(20)
    assert not first.may_act()
    first.stop()


def test_somebody_who_annotates_the_lease_does_not_end_the_leadership(candidates, server):
    first, lost = candidates("a"), threading.Event()
    assert first.acquire()
    first.hold(lost.set)
    before = first._lease["metadata"]["resourceVersion"]
    api = client.CoordinationV1Api(config.new_client_from_config(config_file=str(server.kubeconfig)))
    api.patch_namespaced_lease(first._name, "default", {"metadata": {"annotations": {"note": "x"}}})
    eventually(lambda: "annotations" in first._lease["metadata"])  # a conflict, a look, and on it goes
    now = first._lease["metadata"]["resourceVersion"]
    eventually(lambda: first._lease["metadata"]["resourceVersion"] not in (before, now))
    assert first.may_act() and not lost.is_set()
    first.release()


def test_a_lease_that_is_deleted_ends_the_leadership_and_the_next_number_is_higher(candidates, server):
    first, lost = candidates("a"), threading.Event()
    assert first.acquire()
    first.hold(lost.set)
    api = client.CoordinationV1Api(config.new_client_from_config(config_file=str(server.kubeconfig)))
    threading.Event().wait(1.1)  # numbers of new Leases are seconds
    api.delete_namespaced_lease(first._name, "default")
    assert lost.wait(20)
    second = candidates("b")
    assert second.acquire()
    assert second.fence() > first.fence()
    first.stop()


def test_a_server_that_is_away_longer_than_the_deadline_ends_the_leadership(candidates):
    clock = Clock()
    first, lost = candidates("a", clock), threading.Event()
    assert first.acquire()
    first._send = lambda *_: Answer(0, "connection refused")
    first.hold(lost.set)
    assert not lost.wait(0.5)
    clock.extra = FAST.deadline
    assert lost.wait(20)
    assert not first.may_act()
    first.stop()


def test_a_candidate_can_be_told_to_stop(candidates):
    first, second = candidates("a"), candidates("b")
    assert first.acquire()
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(second.acquire()))
    thread.start()
    second.stop()
    thread.join(10)
    assert outcome == [False]


def test_a_lease_that_is_refused_to_us_is_one_clear_error(candidates):
    first = candidates("a")
    first._send = lambda *_: Answer(403, "leases is forbidden")
    with pytest.raises(LeaseError, match="grant the operator"):
        first.acquire()
