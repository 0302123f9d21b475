"""The arithmetic of `paceline plan`, line by line, and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from paceline_cli.simulate_view import duration
from paceline_core.knobs import Knobs
from paceline_sim import Roofline, Slo, Trace
from paceline_sim.capacity import Sizing, batch_points

__all__ = ["Verdict", "show_ceilings", "show_load", "show_verdicts"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came out for one accelerator; `shares` of one replica's time that prefill and decode take at steps of `batch`.

    `floor` is the shortest step (seconds), which reads the weights and nothing else.
    """

    accelerator: str
    floor: float
    sizing: Sizing
    shares: tuple[float, float]
    batch: int

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "accelerator": self.accelerator,
            "replicas": self.sizing.replicas,
            "prefill_share": self.shares[0],
            "decode_share": self.shares[1],
            "fleets": [asdict(fleet) for fleet in self.sizing.tried],
        }


def show_ceilings(console: Console, roofline: Roofline, knobs: Knobs, context: int) -> None:
    """Print what memory and arithmetic allow one accelerator, at the data sheet's figures."""
    model, device = roofline.model, roofline.accelerator
    weights, per_token = model.weight_bytes(roofline.weight_bytes), model.kv_bytes_per_token()
    console.print(f"{model.name} on one {device.name}", style="bold")
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_row(
        "weights", f"{model.parameters / 1e9:.2f} G parameters × {roofline.weight_bytes:g} bytes = {weights / 1e9:.2f} GB"
    )
    sizes = f"2 × {model.layers} layers × {model.kv_heads} heads × {model.head_dim} × 2 bytes"
    facts.add_row("KV", f"{sizes} = {per_token / 1024:,.0f} KiB per token")
    if roofline.memory_left <= 0:
        facts.add_row("memory", f"{device.memory / 1e9:.0f} GB: doesn't fit")
        console.print(facts, "")
        return
    tokens = int(roofline.memory_left * knobs.kv_memory_fraction / per_token)
    facts.add_row(
        "memory",
        f"{device.memory / 1e9:.0f} GB − 5 % − weights = {roofline.memory_left / 1e9:.1f} GB, "
        f"× {knobs.kv_memory_fraction:g} for KV = {tokens:,} tokens",
    )
    peak = Roofline(model, device, roofline.weight_bytes, 1.0)
    facts.add_row(
        "one sequence",
        f"{weights / 1e9:.2f} GB ÷ {device.bandwidth / 1e12:.2f} TB/s = {duration(peak.constant)} per token: "
        f"at most {1 / peak.constant:,.0f} tok/s",
    )
    per_second = device.flops / model.flops_per_token
    facts.add_row(
        "prefill",
        f"{device.flops / 1e12:,.0f} TFLOP/s ÷ {model.flops_per_token / 1e9:.1f} GFLOP per token: at most "
        f"{per_second:,.0f} tok/s",
    )
    console.print(facts, "")
    console.print(_batches(peak, tokens, context), "")


def show_load(console: Console, roofline: Roofline, trace: Trace, verdict: Verdict) -> None:
    """Print what the load asks of one replica, and the fleets that were replayed."""
    prompts = sum(request.prompt_len for request in trace.requests)
    outputs = sum(request.output_len for request in trace.requests)
    seconds = trace.span
    console.print(
        f"The load on {roofline.accelerator.name}, at {roofline.efficiency:.0%} of the data sheet's figures", style="bold"
    )
    if seconds:
        prefill, decode = verdict.shares
        console.print(
            f"{trace.rate:.2f} requests/s: {prompts / seconds:,.0f} prompt tokens/s take {prefill:.0%} of one replica, "
            f"{outputs / seconds:,.0f} output tokens/s in steps of {verdict.batch} take {decode:.0%}",
            soft_wrap=True,
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("replicas", "in SLO", "TTFT p95", "TPOT p95", "E2E p95", "busy", "batch", "KV peak"):
        table.add_column(column, justify="right", no_wrap=True)
    for fleet in verdict.sizing.tried:
        times = map(duration, (fleet.ttft_p95, fleet.tpot_p95, fleet.e2e_p95))
        chosen = fleet.replicas == verdict.sizing.replicas
        table.add_row(
            str(fleet.replicas), f"{fleet.attainment:.1%}", *times, f"{fleet.busy:.0%}", f"{fleet.mean_batch:.1f}",
            f"{fleet.kv_peak:.0%}", style="bold green" if chosen else "",
        )  # fmt: skip
    console.print(table)


def show_verdicts(console: Console, verdicts: Sequence[Verdict], slo: Slo) -> None:
    """Print how many replicas of what."""
    console.print(f"SLO: {slo}")
    for verdict in verdicts:
        console.print(f"{verdict.accelerator}: {_answer(verdict, slo)}", style="bold", soft_wrap=True)


def _answer(verdict: Verdict, slo: Slo) -> str:
    sizing = verdict.sizing
    if sizing.replicas is not None:
        chosen = next(fleet for fleet in sizing.tried if fleet.replicas == sizing.replicas)
        plural = "s" if sizing.replicas > 1 else ""
        steps = f"{chosen.mean_batch:.0f} sequences per step"
        return f"{sizing.replicas} replica{plural} ({chosen.attainment:.1%} within the SLO, {steps})"
    if slo.tpot is not None and slo.tpot < verdict.floor:
        return f"no number of replicas meets the SLO: reading the weights alone takes {duration(verdict.floor)} per token"
    alone = sizing.alone or 0.0
    return f"no number of replicas meets the SLO: even with an engine to itself only {alone:.1%} of the requests do"


def _batches(peak: Roofline, kv_tokens: int, context: int) -> Table:
    """Return what a batch gains: nearly the same step, many times the tokens."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), caption_justify="left")
    for column in ("sequences", "step", "tok/s each", "tok/s together", ""):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for point in batch_points(peak, context, kv_tokens):
        note = "" if point.fits else "KV doesn't fit"
        table.add_row(
            f"{point.sequences}", duration(point.seconds), f"{1 / point.seconds:,.0f}", f"{point.token_rate:,.0f}", note
        )  # fmt: skip
    table.caption = f"decode steps at the ceiling, context {context:,} tokens"
    return table
