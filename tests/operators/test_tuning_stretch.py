"""How far back traffic is of one kind: through bursts and calm, and not beyond a shift."""

import pytest

from paceline_core.wire import RequestRecord
from paceline_operator.tuning.ledger import PodLedger
from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.sampling import samples_of, traffic_of
from paceline_operator.tuning.state import State
from paceline_operator.tuning.stretch import Stretch, stretch_of
from paceline_operator.tuning.traffic import follow, is_due, load_ahead, looked
from paceline_sim.generate import Lengths, bursty

INTERVAL, MOST = 30.0, 960.0
CHAT = {50: 120, 95: 600, 100: 1500}, {50: 80, 95: 260, 100: 400}
RAG = {50: 1800, 95: 4000, 100: 6000}, {50: 120, 95: 300, 100: 500}
AGENT = {50: 2500, 95: 6000, 100: 9000}, {50: 150, 95: 450, 100: 700}
MIXED = {50: 150, 80: 400, 90: 4000, 100: 9000}, {50: 80, 95: 250, 100: 400}  # chat with a long prompt now and then
BRIEF = {50: 120, 95: 600, 100: 1500}, {50: 30, 95: 90, 100: 140}  # chat's prompts, shorter answers


def came(kind, begin, seconds, *, rate=1.0, burst=3.0, seed=0, runs=20.0):
    """Records of traffic of a kind; each request runs for some seconds."""
    prompts, outputs = (Lengths(points, least=8) for points in kind)
    trace = bursty(rate, seconds, prompts, outputs, burst=burst, every=300.0, seed=seed)
    end, found = begin + seconds, []
    for number, r in enumerate(trace.requests):
        ended = r.arrival + begin + runs <= end
        found.append(
            RequestRecord(
                f"{begin}-{seed}-{number}", r.arrival + begin, r.prompt_len, r.output_len if ended else 1,
                "finished" if ended else "unfinished", 0, 0, end=r.arrival + begin + runs if ended else None,
            )
        )  # fmt: skip
    return found


def told(records, now, **options):
    return stretch_of(records, now, options.pop("most", MOST), INTERVAL, **options)


@pytest.mark.parametrize("kind", [CHAT, RAG, MIXED])
def test_bursts_are_part_of_the_traffic_they_come_in(kind):
    whole = 0
    for seed in range(20):
        found = told(records := came(kind, 0.0, 900.0, seed=seed), 900.0)
        whole += found.requests > 0.95 * len(records)
        assert found.requests >= 30
    assert whole >= 19


@pytest.mark.parametrize(("before", "after"), [(CHAT, RAG), (RAG, CHAT), (CHAT, BRIEF)])
def test_a_shift_ends_the_stretch(before, after):
    for seed in range(10):
        records = [*came(before, 0.0, 600.0, seed=seed), *came(after, 600.0, 200.0, seed=seed + 100)]
        began = told(records, 800.0).began
        assert 530.0 <= began <= 665.0, (seed, began)  # to a block of forty


def test_a_shift_is_seen_within_a_minute_of_traffic():
    records = [*came(CHAT, 0.0, 600.0), *came(RAG, 600.0, 60.0, burst=1.0)]
    found = told(records, 660.0)
    assert found.began > 560.0 and found.requests < 100


@pytest.mark.parametrize(("before", "after"), [(CHAT, RAG), (RAG, CHAT)])
def test_a_shift_is_found_where_it_is_as_soon_as_there_is_something_of_the_new_traffic(before, after):
    """Of a mixture of both, which neither is, knobs would be chosen that suit neither."""
    for seed in range(20):
        records = [*came(before, 0.0, 600.0, seed=seed), *came(after, 600.0, 30.0, burst=1.0, seed=seed + 100)]
        began = told(records, 630.0).began
        assert began > 580.0, (seed, began)


def test_of_several_shifts_the_last_counts():
    records = [*came(CHAT, 0.0, 300.0), *came(RAG, 300.0, 300.0), *came(CHAT, 600.0, 100.0, burst=1.0)]
    assert told(records, 700.0).began == pytest.approx(600.0, abs=20.0)


def test_what_has_not_ended_yet_makes_no_shift():
    records = came(CHAT, 0.0, 600.0, runs=90.0)  # the last ninety seconds' requests have one token each so far
    assert told(records, 600.0).requests > 0.95 * len(records)


def test_one_giant_request_and_one_length_for_all_are_no_shift():
    records = came(CHAT, 0.0, 600.0)
    records[-5] = RequestRecord("giant", records[-5].arrival, 1_000_000, 1, "unfinished", 0, 0)
    assert told(records, 600.0).requests > 0.95 * len(records)
    alike = [RequestRecord(f"r{i}", float(i), 100, 10, "finished", 0, 0) for i in range(300)]
    assert told(alike, 300.0).requests == 300
    longer = [RequestRecord(f"l{i}", 300.0 + i, 130, 10, "finished", 0, 0) for i in range(80)]
    assert told([*alike, *longer], 380.0).began == 300.0


def test_its_rate_is_of_the_last_minutes_and_made_up_for_silent_pods():
    records = [*came(CHAT, 0.0, 600.0, burst=1.0), *came(CHAT, 600.0, 300.0, rate=3.0, burst=1.0, seed=1)]
    assert told(records, 900.0).rate == pytest.approx(3.0, rel=0.15)
    assert told(records, 900.0, share=2.0).rate == pytest.approx(6.0, rel=0.15)
    assert told([], 900.0).rate == 0.0 and told([], 900.0).requests == 0


def test_a_burst_is_no_trend_and_growth_is():
    ahead = [load_ahead(told(came(CHAT, 0.0, 900.0, seed=seed), 900.0)) for seed in range(20)]
    assert sorted(ahead)[-3] == 1.5  # in 18 of 20 at least
    rising = [r for part in range(9) for r in came(CHAT, 100.0 * part, 100.0, rate=1.0 + part / 4, burst=1.0, seed=part)]
    assert load_ahead(told(rising, 900.0)) > 1.6


def test_the_first_looks_at_new_traffic_are_put_right_and_renew_nothing():
    records = came(CHAT, 0.0, 3000.0)  # begins with a burst: the first minute's rate is twice the mean
    state, begun = State(begun=(1.0, 2.0, 3.0)), []
    for look in range(1, 100):
        now = look * INTERVAL
        state = follow(state, told([r for r in records if r.arrival <= now], now), now, INTERVAL)
        begun.append(len(state.begun))
    assert set(begun) == {3} and state.shift[0] == pytest.approx(1.0, rel=0.3)
    later = [*records, *came(RAG, 3000.0, 600.0, seed=1)]
    for look in range(100, 120):
        now = look * INTERVAL
        state = follow(state, told([r for r in later if r.arrival <= now], now), now, INTERVAL)
    assert state.begun == ()


def followed(records, looks, state=None):
    """The state after so many looks at what had come by then, an interval apart."""
    state = state or State(begun=(1.0, 2.0, 3.0))
    for look in range(1, looks):
        now = look * INTERVAL
        state = follow(state, told([r for r in records if r.arrival <= now], now), now, INTERVAL)
    return state


@pytest.mark.parametrize("seed", range(5))
def test_other_lengths_at_another_rate_renew_the_changes_though_neither_alone_would(seed):
    before, new = came(RAG, 0.0, 3000.0, rate=1.8, seed=seed), came(AGENT, 3000.0, 900.0, seed=seed)
    assert followed([*before, *new], 130).begun == ()
    slower = came(RAG, 3000.0, 900.0, rate=1.3, seed=seed)
    assert len(followed([*before, *slower], 130).begun) == 3


def seen(attainment):
    return Stretch(0.0, 500, 1.0, 1.0, 120.0, 600.0, 80.0, attainment)


def test_a_service_that_does_much_worse_than_at_the_last_search_is_looked_at_at_once():
    state = looked(State(), seen(0.80), 100.0, 95.0)
    later = State.from_json({**state.to_json(), "next_search": 5000.0})
    assert not is_due(later, seen(0.70), 130.0, 95.0) and is_due(later, seen(0.60), 130.0, 95.0)
    assert not is_due(looked(later, seen(0.60), 130.0, 95.0), seen(0.60), 129.0, 95.0)


# what the twin is given of it


def ledger(name, records):
    pod = PodLedger(name)
    pod._records = {r.request_id: r for r in records}
    return pod


def test_traffic_is_of_one_pod_as_long_as_it_has_enough_and_else_of_several():
    pods = [ledger(f"pod-{seed}", came(CHAT, 0.0, 900.0, seed=seed)) for seed in range(3)]
    (alone,) = traffic_of(pods, since=0.0, lately=600.0, block_size=16)
    assert len(alone) == 480 and alone[-1].arrival - alone[0].arrival > 420.0
    few = traffic_of(pods, since=800.0, lately=600.0, block_size=16)
    assert len(few) == 3 and sum(map(len, few)) == sum(r.arrival >= 800.0 for pod in pods for r in pod.records)
    assert traffic_of(pods, since=899.0, lately=600.0, block_size=16) == ()


def test_where_requests_come_fast_all_of_the_last_minutes_are_traffic_up_to_a_limit():
    """480 of them would be a moment without any of the bursts."""
    for rate, least, most in ((3.0, 750, 1050), (9.0, 1440, 1440)):
        (sample,) = traffic_of([ledger("pod", came(CHAT, 0.0, 900.0, rate=rate))], since=0.0, lately=600.0, block_size=16)
        assert least <= len(sample) <= most
    (newer,) = traffic_of([ledger("pod", came(CHAT, 0.0, 900.0, rate=3.0))], since=750.0, lately=600.0, block_size=16)
    assert len(newer) < 480  # nothing from before the stretch


def test_the_twin_is_checked_from_a_quiet_moment_on():
    """A hundred requests at once that take a minute, then calm: the check begins before or after them, not among them."""
    crowd = [RequestRecord(f"c{i}", 100.0 + i / 100, 100, 10, "finished", 0, 0, end=160.0) for i in range(100)]
    calm = [RequestRecord(f"q{i}", 2.0 * i, 100, 10, "finished", 0, 0, end=2.0 * i + 1) for i in range(50)]
    after = [RequestRecord(f"a{i}", 200.0 + 2 * i, 100, 10, "finished", 0, 0, end=201.0 + 2 * i) for i in range(50)]
    pod = ledger("pod", [*calm, *crowd, *after])
    for since in (100.5, 150.0, 210.0):
        (sample,) = samples_of([pod], Objective(1.0, 0.05), since=since, now=300.0, epochs={"pod": 0}, block_size=16)
        assert all(r.arrival > 0 or r.output == 10 for r in sample)  # nobody is taken over half-way
        assert sum(r.counted for r in sample) == sum(r.arrival >= since for r in [*crowd, *after][-160:])
