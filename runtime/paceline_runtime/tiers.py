"""How urgent work is, as clients and API keys say it: a number, lower goes first, or the name of a tier."""

from __future__ import annotations

from paceline_core.request import BATCH_PRIORITY

__all__ = ["MAX_PRIORITY", "SERVICE_TIERS", "TIERS"]

MAX_PRIORITY = 1 << 31  # either way
TIERS = {"interactive": 0, "batch": BATCH_PRIORITY}  # their priorities
# OpenAI's `service_tier` as ours; its others leave the choice to the API key
SERVICE_TIERS = {"flex": TIERS["batch"], "priority": TIERS["interactive"]}
