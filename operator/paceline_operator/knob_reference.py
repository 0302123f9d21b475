"""The reference of the knobs, from their table."""

from __future__ import annotations

from paceline_core.knobs import KNOBS, CostClass, KnobSpec

__all__ = ["render_knobs"]

_COSTS = {
    CostClass.STEP: "the next step; nobody notices",
    CostClass.PAUSE: "a pause: the KV pool is rebuilt in place, some sequences are recomputed, nobody sees an error",
    CostClass.RESTART: "a restart: pods roll",
}
_HEAD = """\
# Knobs

What decides how requests are batched. They are `spec.batching` of an [InferenceService](inferenceservice.md) (`sloTtft` and
`sloTpot` come from `spec.slo`), flags of [`paceline-runtime`](runtime.md), what `PATCH /admin/knobs` takes, what the twin is
asked about (`paceline simulate --set`), and what [tuning](tuning.md) chooses. A change is checked as a whole, applied at a
step boundary and can be taken back in one call.

| Knob | Values | Default | A change costs | Meaning |
|---|---|---|---|---|
"""
_TAIL = """
Between them: `maxNumSeqs` ≤ `maxNumSeqsLimit`, and `maxNumBatchedTokens` ≥ `maxNumSeqs`.

| A change costs | |
|---|---|
"""


def render_knobs(generated: str) -> str:
    """Return the page; `generated` is the line that says so."""
    rows = "".join(_row(spec) for spec in KNOBS)
    costs = "".join(f"| `{cost.value}` | {text} |\n" for cost, text in _COSTS.items())
    return generated + _HEAD + rows + _TAIL + costs


def _row(spec: KnobSpec) -> str:
    default = spec.to_wire(spec.default)
    shown = "none" if default in (None, []) else f"`{str(default).lower() if isinstance(default, bool) else default}`"
    unit = f" {spec.unit}" if spec.unit and spec.kind not in ("duration", "enum", "bool") else ""
    bound = spec.bound.replace("<", "&lt;")
    return f"| `{spec.name}` | {bound}{unit} | {shown} | `{spec.cost.value}` | {spec.description} |\n"
