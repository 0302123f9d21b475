"""Scenarios worth seeing first, each with the sentence that says what to look at."""

from __future__ import annotations

from typing import Any

__all__ = ["PRESETS"]

_STREAM = [120, 30, 60, 300, 40, 90, 25, 150, 50, 70, 35, 80]
_NOISY = [24, 60, 60, 60, 24, 24]

# `scenario` is a document of `Scenario`; `compare` is the strategy below it
PRESETS: tuple[dict[str, Any], ...] = (
    {
        "id": "varied",
        "title": "Varied lengths",
        "text": "Three slots wait for the longest of their batch. Continuous batching refills each at once: "
        "10 steps instead of 14, 80 % of the slots used instead of 57 %.",
        "scenario": {"strategy": "static", "lengths": [8, 2, 2, 2, 6, 4, 4, 4], "slots": 4},
        "compare": {"strategy": "continuous"},
    },
    {
        "id": "even",
        "title": "Even lengths",
        "text": "If all requests are equally long, static and continuous batching tie: it is the variance that costs.",
        "scenario": {"strategy": "static", "lengths": [4] * 8, "slots": 4},
        "compare": {"strategy": "continuous"},
    },
    {
        "id": "stream",
        "title": "A stream of requests",
        "text": "Twelve requests, one every 10 steps. Static batching waits for a full batch, dynamic at most 15 steps, "
        "continuous not at all: a mean latency of 402, 418 and 118 steps.",
        "scenario": {"strategy": "static", "lengths": _STREAM, "every": 10, "slots": 4},
        "compare": {"strategy": "continuous"},
    },
    {
        "id": "stream-dynamic",
        "title": "Dynamic batching",
        "text": "Batches start sooner than static ones, but still end with their longest request: 665 steps, 39 % used.",
        "scenario": {"strategy": "dynamic", "lengths": _STREAM, "every": 10, "slots": 4, "maxWait": 15},
        "compare": {"strategy": "continuous"},
    },
    {
        "id": "long-prompt",
        "title": "A long prompt",
        "text": "E's long prompt is computed in one step, and everybody's next token waits for it. In chunks of 64 tokens "
        "(below) each step takes a little longer instead, and nobody stalls.",
        "scenario": {
            "strategy": "continuous",
            "lengths": _NOISY,
            "prompts": [16, 16, 16, 16, 1600, 16],
            "every": 4,
            "slots": 6,
            "prefillCost": 2,
        },
        "compare": {"strategy": "continuous", "chunk": 64},
    },
    {
        "id": "scarce-memory",
        "title": "Too little memory",
        "text": "Six slots, but KV blocks for two requests at a time: the others wait for memory although slots are free.",
        "scenario": {
            "strategy": "continuous",
            "lengths": [60, 90, 40, 120, 30, 80, 50, 70],
            "prompts": [24],
            "every": 3,
            "slots": 6,
            "kvBlocks": 14,
            "prefillCost": 2,
        },
        "compare": {"strategy": "continuous", "kvBlocks": 0},
    },
    {
        "id": "objective",
        "title": "A latency objective",
        "text": "Strategy iteration spends only as many prompt tokens per step as keeps a token every 3 steps.",
        "scenario": {
            "strategy": "continuous",
            "lengths": _NOISY,
            "prompts": [16, 16, 16, 16, 1600, 16],
            "every": 4,
            "slots": 6,
            "prefillCost": 2,
        },
        "compare": {"strategy": "iteration", "tpot": 3},
    },
)
