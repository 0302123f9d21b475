"""Writes the Grafana dashboards of the chart: `python charts/dashboards.py` (part of `make crds`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana import Dashboard, Panel, grafana

FOLDER = Path(__file__).parent / "paceline" / "files" / "dashboards"
POD = 'namespace=~"$namespace",model_name=~"$model"'
ONE = POD + ',pod=~"$pod"'
TUNED = 'namespace=~"$namespace"'
NAMED = "{{namespace}}/{{name}}"


def quantiles(metric: str, labels: str) -> dict[str, str]:
    """Return p50, p95 and p99 of a histogram over the dashboard's interval."""
    rate = f"sum by (le) (rate({metric}_bucket{{{labels}}}[$__rate_interval]))"
    return {f"p{q}": f"histogram_quantile(0.{q}, {rate})" for q in (50, 95, 99)}


def p95(metric: str, labels: str, by: str) -> dict[str, str]:
    """Return the 95th percentile of a histogram for each value of a label."""
    rate = f"sum by (le, {by}) (rate({metric}_bucket{{{labels}}}[$__rate_interval]))"
    return {f"{{{{{by}}}}}": f"histogram_quantile(0.95, {rate})"}


def rate(metric: str, labels: str, by: str) -> dict[str, str]:
    """Return the rate of a counter for each value of a label."""
    return {f"{{{{{by}}}}}": f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"}


def gauge(metric: str, labels: str, by: str, how: str = "sum") -> dict[str, str]:
    """Return a gauge for each value of a label."""
    return {f"{{{{{by}}}}}": f"{how} by ({by}) ({metric}{{{labels}}})"}


def utilisation(labels: str, by: str) -> dict[str, str]:
    """Return the share of slots that did useful work."""

    def total(metric: str) -> str:
        return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"

    return {f"{{{{{by}}}}}": f"{total('paceline_slot_steps_busy_total')} / {total('paceline_slot_steps_total')}"}


def stat(title: str, query: str, unit: str = "short", text: str = "") -> Panel:
    """Return a panel of one number."""
    return Panel(title, {"": query}, unit, text, kind="stat")


FLEET = Dashboard(
    "paceline-fleet",
    "Paceline / Fleet",
    "All services: what they deliver, who is short of what, and how the operator does.",
    {
        "Now": (
            stat("InferenceServices", "max(paceline_operator_services)"),
            stat("Engines that take requests", f"sum(paceline_engine_ready{{{POD}}})"),
            stat("Output", f"sum(rate(vllm:generation_tokens_total{{{POD}}}[$__rate_interval]))", "tok/s"),
            stat("Requests waiting", f"sum(vllm:num_requests_waiting{{{POD}}})"),
        ),
        "Delivered": (
            Panel("Output tokens", rate("vllm:generation_tokens_total", POD, "model_name"), "tok/s"),
            Panel("Requests by outcome", rate("paceline_requests_total", POD, "outcome"), "reqps", stack=True),
            Panel("Time to first token, p95", p95("vllm:time_to_first_token_seconds", POD, "model_name"), "s"),
            Panel("Time between tokens, p95", p95("vllm:inter_token_latency_seconds", POD, "model_name"), "s"),
        ),
        "Short of what": (
            Panel("Waiting for a slot", gauge("vllm:num_requests_waiting", POD, "model_name")),
            Panel("Running", gauge("vllm:num_requests_running", POD, "model_name")),
            Panel("Slots busy", utilisation(POD, "model_name"), "percentunit", "Share of offered slots that did work."),
            Panel("KV cache, fullest pod", gauge("vllm:kv_cache_usage_perc", POD, "model_name", "max"), "percentunit"),
            Panel("Preemptions", rate("vllm:num_preemptions_total", POD, "model_name"), "ops"),
            Panel("Engine restarts", rate("paceline_engine_restarts_total", POD, "model_name"), "ops"),
        ),
        "Operator": (
            Panel("Passes by outcome", rate("paceline_operator_reconciles_total", "", "outcome"), "ops", stack=True),
            Panel("Duration of a pass", quantiles("paceline_operator_reconcile_seconds", ""), "s"),
            Panel("Services that wait for a pass", {"waiting": "sum(paceline_operator_queue_length)"}),
            Panel("Calls to the API server", rate("paceline_operator_api_calls_total", "", "verb"), "reqps", stack=True),
            Panel(
                "Calls that failed",
                rate("paceline_operator_api_calls_total", 'code!~"2..|404"', "code"),
                "reqps",
                "Code 0: no answer at all.",
            ),
            Panel("Drift corrected", rate("paceline_operator_drift_corrected_total", "", "kind"), "ops"),
        ),
    },
)

SERVICE = Dashboard(
    "paceline-service",
    "Paceline / Service",
    "One service, pod by pod: where the time of its requests goes.",
    {
        "Latency": (
            Panel("Time to first token", quantiles("vllm:time_to_first_token_seconds", ONE), "s"),
            Panel("Time between tokens", quantiles("vllm:inter_token_latency_seconds", ONE), "s"),
            Panel("Whole request", quantiles("vllm:e2e_request_latency_seconds", ONE), "s"),
            Panel(
                "Where the time goes",
                {
                    "{{part}}": f"sum by (part) (rate(paceline_request_part_seconds_sum{{{ONE}}}[$__rate_interval]))"
                    " / ignoring(part) group_left "
                    f"sum(rate(vllm:e2e_request_latency_seconds_count{{{ONE}}}[$__rate_interval]))"
                },
                "s",
                "Mean per request by cause: slot, KV and budget are waits, prefill and output are work.",
                stack=True,
            ),
        ),
        "Load": (
            Panel("Requests by outcome", rate("paceline_requests_total", ONE, "outcome"), "reqps", stack=True),
            Panel("Running", gauge("vllm:num_requests_running", ONE, "pod")),
            Panel("Waiting", gauge("vllm:num_requests_waiting", ONE, "pod")),
            Panel(
                "Tokens",
                {
                    "prompt": f"sum(rate(vllm:prompt_tokens_total{{{ONE}}}[$__rate_interval]))",
                    "output": f"sum(rate(vllm:generation_tokens_total{{{ONE}}}[$__rate_interval]))",
                },
                "tok/s",
            ),
        ),
        "Engine": (
            Panel("Slots busy", utilisation(ONE, "pod"), "percentunit"),
            Panel("KV cache in use", gauge("vllm:kv_cache_usage_perc", ONE, "pod", "max"), "percentunit"),
            Panel("Step time", quantiles("paceline_step_seconds", ONE), "s"),
            Panel("Steps", rate("paceline_steps_total", ONE, "pod"), "ops"),
            Panel("Preemptions", rate("vllm:num_preemptions_total", ONE, "pod"), "ops"),
            Panel(
                "Prefix cache hits",
                {
                    "{{pod}}": f"sum by (pod) (rate(vllm:prefix_cache_hits_total{{{ONE}}}[$__rate_interval]))"
                    f" / sum by (pod) (rate(vllm:prefix_cache_queries_total{{{ONE}}}[$__rate_interval]))"
                },
                "percentunit",
            ),
        ),
        "State": (
            Panel("Takes requests", gauge("paceline_engine_ready", ONE, "pod", "max"), "bool"),
            Panel("Strategy in force", {"{{pod}}: {{strategy}}": f"paceline_strategy{{{ONE}}} == 1"}),
            Panel("Knob revision", gauge("paceline_knob_revision", ONE, "pod", "max")),
            Panel("Engine restarts", rate("paceline_engine_restarts_total", ONE, "pod"), "ops"),
        ),
    },
    ("namespace", "model", "pod"),
)

TUNER = Dashboard(
    "paceline-tuner",
    "Paceline / Tuner",
    "What changed, when, and what it did to latency and throughput: each step of the epoch is a change in force.",
    {
        "Changes": (
            Panel("Knob epoch", gauge("paceline_knob_epoch", ONE, "pod", "max"), text="Rises when a change is in force."),
            Panel("Knob changes sent", rate("paceline_operator_knob_patches_total", "", "outcome"), "ops", stack=True),
            Panel("Strategy in force", {"{{strategy}}": f"sum by (strategy) (paceline_strategy{{{ONE}}})"}, stack=True),
        ),
        "Effect": (
            Panel("Time to first token, p95", p95("vllm:time_to_first_token_seconds", ONE, "pod"), "s"),
            Panel("Time between tokens, p95", p95("vllm:inter_token_latency_seconds", ONE, "pod"), "s"),
            Panel("Output tokens", rate("vllm:generation_tokens_total", ONE, "pod"), "tok/s"),
            Panel("Slots busy", utilisation(ONE, "pod"), "percentunit"),
        ),
        "Tuned services": (
            Panel("Requests within the objective", {NAMED: f"paceline_tuner_slo_attainment{{{TUNED}}}"}, "percentunit"),
            Panel("Goodput", {NAMED: f"paceline_tuner_goodput{{{TUNED}}}"}, "reqps"),
            Panel("Phase", {NAMED + ": {{phase}}": f"paceline_tuner_phase{{{TUNED}}} == 1"}),
            Panel(
                "Decisions",
                {"{{kind}} {{reason}}": "sum by (kind, reason) (rate(paceline_tuner_decisions_total[$__rate_interval]))"},
                "ops",
                stack=True,
            ),
            Panel("Steps of changes", rate("paceline_tuner_events_total", "", "reason"), "ops", stack=True),
            Panel("Pods by what they tell", {"{{health}}": "sum by (health) (paceline_tuner_pods)"}, stack=True),
        ),
        "Can the model be trusted": (
            Panel("Error of the twin", {NAMED: f"paceline_tuner_twin_error{{{TUNED}}}"}, "percentunit"),
            Panel(
                "Error of the step-time model",
                gauge("paceline_step_model_residual", ONE, "pod", "max"),
                "percentunit",
                "The tuner freezes where its twin doesn't reproduce what is measured.",
            ),
            Panel("Steps that it has seen", gauge("paceline_step_model_steps", ONE, "pod", "max")),
        ),
    },
    ("namespace", "model", "pod"),
)


def files() -> dict[str, str]:
    """Return the text of each file by its name."""
    boards = {"fleet": FLEET, "service": SERVICE, "tuner": TUNER}
    return {f"{name}.json": json.dumps(grafana(board), indent=1) + "\n" for name, board in boards.items()}


def main() -> int:
    """Write the files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
