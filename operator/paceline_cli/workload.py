"""Workloads: which prompts with how many output tokens, reproducible from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["SENTENCES", "LoadRequest", "mixed_lengths"]

# Plain English, so that tokenisation is that of real prompts (about 1.3 tokens a word).
SENTENCES = (
    "A paceline is a line of riders who take turns in the wind.",
    "The rider at the front works hardest, and everyone behind saves about a third of the effort.",
    "After a short pull the leader swings off, drifts back and joins the tail of the line.",
    "Nobody stops while riders join and leave, so the group keeps its speed all day.",
    "A good line is smooth: no sudden braking, no gaps, and clear hand signals before every hole in the road.",
    "On a windy day the line bends into an echelon, and the last riders in the gutter get no shelter at all.",
    "Long climbs break the group apart, because weight matters more than shelter when the road points up.",
    "The captain watches the weakest rider and sets a pace that the whole line can hold to the finish.",
    "In the last kilometres the sprinters hide from the wind until they can see the banner.",
    "A short note on food: eat before you are hungry and drink before you are thirsty.",
    "The mechanic checks tyres, chains and brakes in the evening, so that the morning is calm.",
    "Rain makes painted lines slippery, and a careful rider crosses them upright and without braking.",
)
_QUESTIONS = ("Sum this up in one line.", "What should a new rider learn from this?", "Continue the story.")
# Share of requests and range of output tokens: most answers are short, a few are long, and the long ones are what
# makes a static batch wait.
_OUTPUTS = ((0.7, 8, 24), (0.2, 32, 64), (0.1, 96, 128))
_PROMPT_SENTENCES = (1, 8)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a workload: its prompt, exactly how many tokens to generate, and when to send it (seconds)."""

    prompt: str
    max_tokens: int
    at: float = 0.0


def mixed_lengths(count: int, seed: int = 0) -> tuple[LoadRequest, ...]:
    """Return `count` requests, all sent at once, with prompts of 1–8 sentences and outputs of 8–128 tokens.

    The shares of short and long outputs hold exactly (not just on average), so that a small workload is comparable too.
    """
    chooser = random.Random(seed)  # noqa: S311  a workload, not a secret
    outputs = [chooser.randint(low, high) for share, low, high in _OUTPUTS for _ in range(round(share * count))]
    outputs = (outputs + [_OUTPUTS[0][1]] * count)[:count]
    chooser.shuffle(outputs)
    return tuple(LoadRequest(_prompt(chooser), max_tokens) for max_tokens in outputs)


def _prompt(chooser: random.Random) -> str:
    sentences = chooser.sample(SENTENCES, chooser.randint(*_PROMPT_SENTENCES))
    return " ".join([*sentences, chooser.choice(_QUESTIONS)])
