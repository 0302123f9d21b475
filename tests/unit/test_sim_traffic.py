"""Traffic for the twin: what is read, what is made, and how wrong files are told."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, quantiles

import pytest

from paceline_core.errors import FormatError
from paceline_core.wire import Gauges, ObserveDocument, RequestRecord, to_json
from paceline_sim import Trace, TraceRequest, read_trace, trace_of_records
from paceline_sim.generate import Lengths, Prefixes, bursty, poisson

CSV = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:50.9951690,91,16
"""


def write(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_of_dates(tmp_path):
    trace = read_trace(write(tmp_path, CSV))
    assert [(r.prompt_len, r.output_len) for r in trace.requests] == [(374, 44), (396, 109), (91, 16)]
    assert [r.arrival for r in trace.requests] == pytest.approx([0, 4.314579, 4.314579], abs=1e-6)


def test_csv_of_seconds_with_other_columns_and_a_byte_order_mark(tmp_path):
    text = "\ufeffid,ContextTokens,TIMESTAMP,GeneratedTokens\na,5,10.5,6\nb,7,12,8\n"
    assert [(r.arrival, r.prompt_len, r.output_len) for r in read_trace(write(tmp_path, text)).requests] == [
        (0.0, 5, 6),
        (1.5, 7, 8),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        ("time,in,out\n1,2,3\n", "row 1: no column TIMESTAMP"),
        (CSV.replace("396,109", "-3,109"), "row 3: ContextTokens is '-3'"),
        (CSV.replace("396,109", "x,109"), "row 3: ContextTokens is 'x'"),
        (CSV.replace("396,109", "396,0"), "row 3: GeneratedTokens is '0'"),
        (CSV.replace("396,109", "396,1.5"), "row 3: GeneratedTokens is '1.5'"),
        (CSV.replace("396,109", "396"), "row 3: GeneratedTokens is None"),
        (CSV.replace("396,109", "99999999999,1"), "row 3: ContextTokens is '99999999999'"),
        (CSV.replace("18:15:50.9951690,91", "18:15:49,91"), "row 4: its time is 1.99517 s before the row above"),
        (CSV.replace("2023-11-16 18:15:50.9951690,396", "yesterday,396"), "row 3: TIMESTAMP is 'yesterday'"),
        (CSV.replace("2023-11-16 18:15:50.9951690,396", "nan,396"), "row 3: TIMESTAMP is 'nan'"),
        ('{"time": 0}', "row 1: no field timestamp"),
        ('{"timestamp": 0, "input_length": 5}', "row 1: no field output_length"),
        ('{"timestamp": 0, "input_length": "5", "output_length": 1}', "row 1: input_length is '5'"),
        ('{"timestamp": 0, "input_length": true, "output_length": 1}', "row 1: input_length is True"),
        ('{"timestamp": 0, "input_length": 5, "output_length": -1}', "row 1: output_length is -1"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, "a"]}', "row 1: hash_ids is [1, 'a']"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}\n\n{"input_length', "row 3: not JSON"),
        ('{"timestamp": ' + "[" * 9999, "row 1: not JSON"),
        ('{"timestamp": ' + "9" * 9999 + "}", "row 1: not JSON"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}\n[1]', "row 2: expected a JSON object, got list"),
        ("[1]", "document 1: ObserveDocument must be a JSON object"),
        ('{"instance": "a"}', "document 1: ObserveDocument lacks the fields cursor, now"),
    ],
)
def test_what_is_wrong_is_named_with_file_row_and_field(tmp_path, text, says):
    with pytest.raises(FormatError) as caught:
        read_trace(write(tmp_path, text))
    assert says in str(caught.value)
    assert str(caught.value).startswith("trace.csv: ")


def test_files_that_cant_be_read(tmp_path):
    with pytest.raises(FormatError, match="No such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(FormatError, match="directory"):
        read_trace(tmp_path)
    binary = tmp_path / "trace.bin"
    binary.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(FormatError, match="not UTF-8"):
        read_trace(binary)


def test_jsonl_shares_prefixes_by_hash_ids(tmp_path):
    lines = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 7, "hash_ids": [5, 6, 9]},
        {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [5, 6, 10], "priority": 2},
        {"timestamp": 2500, "input_length": 40, "output_length": 1},
    ]
    trace = read_trace(write(tmp_path, "\n".join(map(json.dumps, lines)), "trace.jsonl"))
    first, second, third = (r.to_request(i, 16) for i, r in enumerate(trace.requests))
    assert [r.arrival for r in (first, second, third)] == [0.0, 0.5, 1.5]
    assert second.priority == 2
    assert len(first.prefix_hashes) == 1100 // 16
    assert first.prefix_hashes[:64] == second.prefix_hashes[:64]  # two pieces of 512 tokens are 64 blocks of 16
    assert not set(first.prefix_hashes[64:]) & set(second.prefix_hashes[64:])
    assert len(set(first.prefix_hashes)) == len(first.prefix_hashes)
    assert third.prefix_hashes == ()


def test_blocks_that_dont_divide_a_piece_share_only_what_is_alike():
    one, two = (TraceRequest(0, 100, 1, prefix_hashes=(1, last), hash_tokens=50).to_request(0, 20) for last in (2, 3))
    # blocks end at 20, 40, 60, …: the third reaches into the second piece
    assert one.prefix_hashes[:2] == two.prefix_hashes[:2]
    assert one.prefix_hashes[2] != two.prefix_hashes[2]
    assert len(one.prefix_hashes) == 5


def record(name: str, arrival: float, output: int, outcome: str = "finished") -> RequestRecord:
    return RequestRecord(name, arrival, 10, output, outcome, 0, 0, prefix_hashes=(1, 2))


def test_what_the_runtime_saw_is_a_trace(tmp_path):
    pages = [
        ObserveDocument("i", 1, 9.0, 0, 0, Gauges(), requests=(record("b", 5.0, 2, "unfinished"), record("a", 3.0, 4))),
        ObserveDocument("i", 2, 9.0, 0, 0, Gauges(), requests=(record("b", 5.0, 6), record("c", 4.0, 0, "refused"))),
    ]
    lines = "\n".join(json.dumps(to_json(page)) for page in pages)
    for text in (lines, json.dumps([to_json(page) for page in pages])):
        trace = read_trace(write(tmp_path, text, "observe.json"))
        assert [(r.arrival, r.output_len) for r in trace.requests] == [(0.0, 4), (2.0, 6)]  # b once, as it ended
        assert trace.left_out == 1
        assert trace.requests[0].prefix_hashes == (1, 2)
    with pytest.raises(FormatError, match="no request"):
        trace_of_records([record("c", 4.0, 0, "refused")])


def test_scaling_and_cutting():
    trace = Trace(tuple(TraceRequest(float(t), 1, 1) for t in (0, 2, 4, 6)))
    assert trace.rate == 0.5
    assert trace.scaled(2.0).rate == 1.0
    assert [r.arrival for r in trace.window(2.0, 4.0).requests] == [0.0, 2.0]
    with pytest.raises(FormatError, match="no request arrives from 7 s to its end"):
        trace.window(7.0, float("inf"))
    with pytest.raises(FormatError, match="load is 0"):
        trace.scaled(0)


def test_made_traffic_has_the_rate_and_lengths_that_were_asked_for():
    lengths = Lengths({50: 400, 95: 1500, 100: 4000}, least=10)
    trace = poisson(20.0, 500.0, lengths, Lengths({100: 7}, least=7), seed=3)
    assert trace.rate == pytest.approx(20, rel=0.05)
    prompts = [r.prompt_len for r in trace.requests]
    cuts = quantiles(prompts, n=100)
    assert cuts[49] == pytest.approx(400, rel=0.05)
    assert cuts[94] == pytest.approx(1500, rel=0.08)
    assert min(prompts) >= 10
    assert max(prompts) <= 4000
    assert {r.output_len for r in trace.requests} == {7}
    gaps = [b.arrival - a.arrival for a, b in zip(trace.requests, trace.requests[1:], strict=False)]
    assert mean(gap**2 for gap in gaps) == pytest.approx(2 * mean(gaps) ** 2, rel=0.1)  # exponential


def test_the_same_seed_gives_the_same_traffic():
    def make(seed):
        return bursty(5.0, 60.0, Lengths({100: 50}), Lengths({100: 50}), burst=4, every=20, seed=seed)

    assert make(1) == make(1) != make(2)


def test_bursts_come_when_they_are_due_and_keep_the_mean_rate():
    trace = bursty(10.0, 1000.0, Lengths({100: 5}), Lengths({100: 5}), burst=5.0, every=100.0, share=0.1, seed=1)
    inside = sum(r.arrival % 100 < 10 for r in trace.requests)
    assert trace.rate == pytest.approx(10, rel=0.05)
    assert inside / len(trace.requests) == pytest.approx(0.5, rel=0.1)


def test_made_prefixes_are_shared_within_their_group():
    prefixes = Prefixes(groups=2, tokens=64)
    trace = poisson(10.0, 20.0, Lengths({100: 20}), Lengths({100: 5}), prefixes=prefixes)
    requests = [r.to_request(i, 16) for i, r in enumerate(trace.requests)]
    assert len({r.prefix_hashes[:4] for r in requests}) == 2
    assert all(r.prompt_len > 64 for r in requests)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Lengths({50: 4}), "the 100th"),
        (lambda: Lengths({50: 9, 100: 4}), "grow with the percentile"),
        (lambda: Lengths({0: 1, 100: 4}), "above 0"),
        (lambda: poisson(0.0, 10.0, Lengths({100: 5}), Lengths({100: 5})), "must all be above 0"),
        (lambda: bursty(1.0, 10.0, Lengths({100: 5}), Lengths({100: 5}), burst=11, every=1), "1 ≤ burst ≤ 10"),
        (lambda: poisson(1e-9, 1.0, Lengths({100: 5}), Lengths({100: 5})), "no request"),
    ],
)
def test_traffic_that_cant_be_made(make, says):
    with pytest.raises(FormatError, match=says):
        make()
