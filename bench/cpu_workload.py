"""What every server of the comparison is asked to do: W or a cut of a recorded trace, one stream, one long prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline_sim import Trace

TEXT = Path(__file__).parent / "data" / "english.txt"
W = "W"
REQUESTS = 64
PROMPTS = (16, 256)  # tokens, uniform
OUTPUTS = ((0.7, 8, 32), (0.2, 33, 128), (0.1, 129, 256))  # share, least and most tokens
STREAM_PROMPT, STREAM_OUTPUT = 32, 128
LONG_PROMPT = 2048
# Of a recorded trace: so many requests, of those that two cores answer in some seconds, and that every KV cache has room for
CUT_REQUESTS, CUT_PROMPT, CUT_OUTPUT = 48, 1000, 256


@dataclass(frozen=True, slots=True)
class Job:
    """One request: the prompt's token ids, and how many tokens must come, whatever they are."""

    prompt: tuple[int, ...]
    output: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs that are asked for all at once, in this order."""

    name: str
    jobs: tuple[Job, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(job.prompt) for job in self.jobs)

    @property
    def output_tokens(self) -> int:
        return sum(job.output for job in self.jobs)


class English:
    """Pieces of real English text; no two begin alike, so that nobody's prefix cache can help."""

    def __init__(self, tokens: Sequence[int], seed: int) -> None:
        self._tokens = tuple(tokens)
        starts = list(range(len(tokens)))
        random.Random(seed).shuffle(starts)
        self._starts = iter(starts)

    def piece(self, length: int) -> tuple[int, ...]:
        """Return `length` tokens from a place that no piece began at; the text is read round and round."""
        start = next(self._starts)
        return tuple(self._tokens[(start + i) % len(self._tokens)] for i in range(length))


def batch(english: English, seed: int, requests: int = REQUESTS) -> Workload:
    """Return workload W: `requests` of mixed lengths at once, as many short, middle and long outputs as its shares."""
    draw = random.Random(seed)
    outputs: list[int] = []
    for share, least, most in OUTPUTS[1:]:
        outputs += [draw.randint(least, most) for _ in range(round(share * requests))]
    _, least, most = OUTPUTS[0]
    outputs += [draw.randint(least, most) for _ in range(requests - len(outputs))]
    draw.shuffle(outputs)
    return Workload(W, tuple(Job(english.piece(draw.randint(*PROMPTS)), output) for output in outputs))


def cut(english: English, trace: Trace, name: str) -> Workload:
    """Return the first requests of a trace (of that name) that aren't too long: their lengths, in their order, but at once.

    Raises `SystemExit` if there are too few.
    """
    fit = [r for r in trace.requests if r.prompt_len <= CUT_PROMPT and r.output_len <= CUT_OUTPUT][:CUT_REQUESTS]
    if len(fit) < CUT_REQUESTS:
        raise SystemExit(f"the trace has only {len(fit)} requests of at most {CUT_PROMPT} + {CUT_OUTPUT} tokens")
    return Workload(name, tuple(Job(english.piece(r.prompt_len), r.output_len) for r in fit))


def one_stream(english: English) -> Workload:
    """Return one request alone: the speed of its decoding."""
    return Workload("stream", (Job(english.piece(STREAM_PROMPT), STREAM_OUTPUT),))


def long_prompt(english: English) -> Workload:
    """Return one long prompt with one token of output: the speed of prefill."""
    return Workload("prefill", (Job(english.piece(LONG_PROMPT), 1),))


def warm_up(english: English) -> Workload:
    """Return a few requests that have everybody's kernels chosen, caches allocated and graphs made before the clock runs."""
    return Workload("warm-up", tuple(Job(english.piece(length), 8) for length in (16, 64, 128, 256)))
