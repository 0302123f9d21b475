"""The ring of request records: the newest are there, whole and in order, whatever their sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline_core.wire import RequestRecord
from paceline_runtime.record_ring import RequestRing


def _record(number: int, hashes: int) -> RequestRecord:
    return RequestRecord(
        f"r{number}", 1.5 * number, 7, 3, "finished", 0, 1, first_token=2.25, prefix_hashes=tuple(range(hashes)),
        parts={"decode": 0.5, "slot": 0.25}, delayed_by={"r0": 0.125},
    )  # fmt: skip


@given(st.lists(st.integers(0, 60), max_size=80), st.integers(300, 2000), st.integers(1, 12), st.integers(0, 80))
def test_the_newest_records_come_back_as_they_were(sizes: list[int], size: int, most: int, cursor: int) -> None:
    ring = RequestRing(size, most)
    records = {number: _record(number, hashes) for number, hashes in enumerate(sizes, 1)}
    for number, record in records.items():
        ring.append(number, record)
    kept = dict(ring.after(0))
    assert len(kept) <= most
    assert kept == {n: r for n, r in records.items() if n > ring.lost_until}  # none is missing in between
    assert list(ring.after(cursor)) == [(n, r) for n, r in kept.items() if n > cursor]


def test_a_ring_is_full_before_it_forgets() -> None:
    ring = RequestRing(20_000, 1000)
    for number in range(1, 500):
        ring.append(number, _record(number, 10))
    kept = list(ring.after(0))
    assert kept[-1][0] == 499
    assert len(kept) > 20_000 // 400  # such a record takes some 250 bytes


def test_a_record_larger_than_the_ring_is_lost_and_so_are_those_before_it() -> None:
    ring = RequestRing(400, 10)
    ring.append(1, _record(1, 0))
    ring.append(2, _record(2, 5000))
    ring.append(3, _record(3, 0))
    assert [number for number, _ in ring.after(0)] == [3]
    assert ring.lost_until == 2
