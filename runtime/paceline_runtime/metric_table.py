"""Every metric of a server in one table: what `/metrics` exposes and `docs/metrics.md` lists are both made from it.

The `vllm:` names and buckets are those of vLLM v1, so that its dashboards, autoscalers and gateways work unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["LABELS", "METRICS", "MetricSpec", "metric"]

LABELS = ("model_name", "engine")  # of every metric

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
_COUNT = (1, 2, 5, 10, 20)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_PART = (0.001, 0.01, 0.1, 0.5, 1, 5, 15, 60)  # few: there are as many histograms as parts


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: `attribute` is its name in the code, `labels` come after `LABELS`, counters get `_total` on the wire.

    `known` are values of its one label that are exposed from the start, with 0: Prometheus doesn't see the first rise of a
    series that begins with it, so an alert on failures would miss the failures of one engine's death.
    """

    attribute: str
    name: str
    kind: Literal["gauge", "counter", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    known: tuple[str, ...] = ()

    @property
    def exposed_name(self) -> str:
        """The name on the wire."""
        return self.name + ("_total" if self.kind == "counter" else "")


_CONFIG = ("block_size", "num_gpu_blocks", "enable_prefix_caching", "gpu_memory_utilization")

METRICS: tuple[MetricSpec, ...] = (
    # -- vLLM's names ---------------------------------------------------------------------------------------------------
    MetricSpec("running", "vllm:num_requests_running", "gauge", "Sequences in the running batch."),
    MetricSpec("waiting", "vllm:num_requests_waiting", "gauge", "Sequences that wait for a slot."),
    MetricSpec("kv_usage", "vllm:kv_cache_usage_perc", "gauge", "Share of KV blocks in use (1 = all)."),
    MetricSpec("prefix_queries", "vllm:prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache."),
    MetricSpec("prefix_hits", "vllm:prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache."),
    MetricSpec("preemptions", "vllm:num_preemptions", "counter", "Sequences that lost their KV and were recomputed."),
    MetricSpec("prompt_tokens", "vllm:prompt_tokens", "counter", "Prompt tokens of requests that began to run."),
    MetricSpec("generation_tokens", "vllm:generation_tokens", "counter", "Tokens generated."),
    MetricSpec("success", "vllm:request_success", "counter", "Sequences that ended, by why: stop, length, abort or error.",
               ("finished_reason",), known=("stop", "length", "abort", "error")),
    MetricSpec("iteration_tokens", "vllm:iteration_tokens_total", "histogram", "Tokens computed by one step.",
               buckets=_ITERATION),
    MetricSpec("ttft", "vllm:time_to_first_token_seconds", "histogram", "From arrival to the first token.", buckets=_TTFT),
    MetricSpec("itl", "vllm:inter_token_latency_seconds", "histogram", "Between two tokens of a sequence.", buckets=_ITL),
    MetricSpec("tpot", "vllm:request_time_per_output_token_seconds", "histogram",
               "Mean time per token after the first, one value per sequence.", buckets=_ITL),
    MetricSpec("e2e", "vllm:e2e_request_latency_seconds", "histogram",
               "From arrival to the result (static and dynamic: of the batch).", buckets=_LATENCY),
    MetricSpec("queue_time", "vllm:request_queue_time_seconds", "histogram", "From arrival to the first step.",
               buckets=_LATENCY),
    MetricSpec("prefill_time", "vllm:request_prefill_time_seconds", "histogram", "From the first step to the first token.",
               buckets=_LATENCY),
    MetricSpec("decode_time", "vllm:request_decode_time_seconds", "histogram", "From the first token to the last.",
               buckets=_LATENCY),
    MetricSpec("inference_time", "vllm:request_inference_time_seconds", "histogram", "From the first step to the last one.",
               buckets=_LATENCY),
    MetricSpec("request_prompt", "vllm:request_prompt_tokens", "histogram", "Prompt tokens of a sequence.", buckets=_TOKENS),
    MetricSpec("request_output", "vllm:request_generation_tokens", "histogram", "Tokens that a sequence generated.",
               buckets=_TOKENS),
    MetricSpec("request_most", "vllm:request_max_num_generation_tokens", "histogram",
               "Most tokens that one sequence of a request generated (each sequence is counted).", buckets=_TOKENS),
    MetricSpec("params_max_tokens", "vllm:request_params_max_tokens", "histogram", "Tokens that a sequence was allowed.",
               buckets=_TOKENS),
    MetricSpec("params_n", "vllm:request_params_n", "histogram", "Choices asked for by a request.", buckets=_COUNT),
    MetricSpec("draft_checks", "vllm:spec_decode_num_drafts", "counter", "Times that a step checked drafts of a sequence."),
    MetricSpec("draft_tokens", "vllm:spec_decode_num_draft_tokens", "counter", "Tokens guessed ahead (`speculative`)."),
    MetricSpec("accepted_drafts", "vllm:spec_decode_num_accepted_tokens", "counter", "Guessed tokens that were right."),
    MetricSpec("accepted_by_place", "vllm:spec_decode_num_accepted_tokens_per_pos", "counter",
               "Guessed tokens that were right and used, by their place among the guesses of a step.", ("position",)),
    MetricSpec("cache_config", "vllm:cache_config_info", "gauge", "The KV cache's settings, as labels.", _CONFIG),
    # -- our own --------------------------------------------------------------------------------------------------------
    MetricSpec("requests", "paceline_requests", "counter",
               "Requests by how they ended: finished, aborted, refused, rejected or failed.", ("outcome",),
               known=("finished", "aborted", "refused", "rejected", "failed")),
    MetricSpec("refusals", "paceline_refusals", "counter",
               "Requests turned away, by why: queue_full, queue_wait, deadline, overloaded, not_ready, low_memory, …",
               ("reason",)),
    MetricSpec("aborts", "paceline_aborts", "counter",
               "Sequences ended early, by why: client (it left), slow_reader, deadline or shutdown.", ("reason",)),
    MetricSpec("part", "paceline_request_part_seconds", "histogram",
               "A request's time by cause, from arrival to result: the parts add up to the latency.", ("part",), _PART),
    MetricSpec("slow_requests", "paceline_slow_requests", "counter", "Sequences that took longer than --slow-request."),
    MetricSpec("predicted_wait", "paceline_predicted_wait_seconds", "gauge",
               "How long a request that came now would wait for a slot, by the step-time model."),
    MetricSpec("lag", "paceline_delivery_lag_seconds", "gauge",
               "How far the API process is behind the engine: above 5 s new work is turned away."),
    MetricSpec("kv_blocks", "paceline_kv_blocks", "gauge", "KV blocks of the pool: total, used and cached.", ("state",)),
    MetricSpec("slot_steps", "paceline_slot_steps", "counter", "Slots offered: maxNumSeqs summed over steps."),
    MetricSpec("slot_steps_busy", "paceline_slot_steps_busy", "counter", "Slots that did useful work, summed over steps."),
    MetricSpec("steps", "paceline_steps", "counter", "Engine steps."),
    MetricSpec("step_seconds", "paceline_step_seconds", "histogram", "Time of one engine step.", buckets=_STEP),
    MetricSpec("model_residual", "paceline_step_model_residual", "gauge",
               "Relative error of the step-time model, at the 90th percentile of the steps that it was fitted on."),
    MetricSpec("model_steps", "paceline_step_model_steps", "gauge", "Steps that the step-time model has seen."),
    MetricSpec("knob_epoch", "paceline_knob_epoch", "gauge", "Knob changes that steps were run under."),
    MetricSpec("knob_revision", "paceline_knob_revision", "gauge", "Revision of the knobs that were asked for."),
    MetricSpec("strategy", "paceline_strategy", "gauge", "1 for the batching strategy in force.", ("strategy",)),
    MetricSpec("ready", "paceline_engine_ready", "gauge", "1 while the engine takes requests."),
    MetricSpec("engine_restarts", "paceline_engine_restarts", "counter", "Times that a dead engine was started again."),
    MetricSpec("memory", "paceline_memory_bytes", "gauge", "Resident memory of the server's processes: api and engine.",
               ("process",)),
    MetricSpec("memory_limit", "paceline_memory_limit_bytes", "gauge", "Memory that both may take together."),
    MetricSpec("key_requests", "paceline_api_key_requests", "counter",
               "Sequences by the name of the API key that asked for them, and how they ended.", ("key", "outcome")),
    MetricSpec("key_tokens", "paceline_api_key_tokens", "counter",
               "Tokens by the name of the API key: prompt, cached (part of the prompt) and output.", ("key", "kind")),
)  # fmt: skip

_BY_ATTRIBUTE = {spec.attribute: spec for spec in METRICS}


def metric(attribute: str) -> MetricSpec:
    """Return the row of an attribute. Raises `KeyError` if there is none."""
    return _BY_ATTRIBUTE[attribute]
