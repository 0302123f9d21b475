"""The table of metrics: complete, consistent, and what docs and exposition say."""

from __future__ import annotations

from pathlib import Path

from paceline_runtime.metric_reference import main, render
from paceline_runtime.metric_table import METRICS, metric
from paceline_runtime.metrics import RuntimeMetrics

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"

# what vLLM v1 exposes without optional features, by its own metrics code; dashboards and gateways rely on these
VLLM = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
    "vllm:request_success_total", "vllm:iteration_tokens_total", "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds", "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds", "vllm:request_inference_time_seconds", "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds", "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens", "vllm:request_params_n", "vllm:request_params_max_tokens",
    "vllm:cache_config_info",
}  # fmt: skip


def test_vllms_names_are_all_there() -> None:
    assert {spec.exposed_name for spec in METRICS} >= VLLM


def test_names_and_attributes_are_unique_and_histograms_have_rising_buckets() -> None:
    assert len({spec.name for spec in METRICS}) == len({spec.attribute for spec in METRICS}) == len(METRICS)
    for spec in METRICS:
        assert (spec.kind == "histogram") == bool(spec.buckets), spec.name
        assert list(spec.buckets) == sorted(set(spec.buckets))
    assert metric("ttft").name == "vllm:time_to_first_token_seconds"


def test_what_has_no_labels_of_its_own_is_exposed_from_the_start() -> None:
    text = RuntimeMetrics("m").render().decode()
    for spec in METRICS:
        if not spec.labels:
            suffix = "_count" if spec.kind == "histogram" else ""
            assert f'{spec.exposed_name}{suffix}{{engine="0",model_name="m"}} 0.0' in text, spec.name


def test_how_requests_may_end_is_exposed_from_the_start() -> None:
    """What an alert asks the rate of must be there before it first happens."""
    text = RuntimeMetrics("m").render().decode()
    for outcome in ("finished", "aborted", "refused", "rejected", "failed"):
        assert f'paceline_requests_total{{engine="0",model_name="m",outcome="{outcome}"}} 0.0' in text
    for spec in METRICS:
        assert not spec.known or len(spec.labels) == 1, spec.name
        assert all(value in spec.text for value in spec.known), spec.name


def test_the_reference_is_up_to_date(tmp_path: Path, capsys) -> None:
    assert DOCS.read_text(encoding="utf-8") == render()
    assert main(["--check", str(DOCS)]) == 0
    assert main(["--check", str(tmp_path / "missing.md")]) == 1
    assert "make metrics-reference" in capsys.readouterr().err
    assert main([str(tmp_path / "new.md")]) == 0
    assert main(["--check", str(tmp_path / "new.md")]) == 0
