"""The results as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TITLES = {
    "device": "Device",
    "correctness": "Kernels against float64",
    "tokens": "Tokens against `transformers`",
    "kernels": "Kernels beside torch",
    "engine-8b": "Engine, Llama-3.1-8B's shape",
    "engine-0.6b": "Engine, Qwen3-0.6B's shape",
    "load": "One load of mixed lengths, Llama-3.1-8B's shape",
    "peers": "The same load with Hugging Face",
}
LEGEND = (
    "Random weights. `mbu`: bytes of weights and KV per step time, as a share of the measured copy rate; `mfu`: operations, "
    "as a share of the measured rate of a square product; `share`: of idle GPU time."
)


def markdown(document: Mapping[str, Any]) -> str:
    """Return the document of `gpu_check` as text."""
    lines = ["# GPU check", ""]
    if document["dry"]:
        lines += ["**Dry run on a CPU: it proves the script. Nothing here is a measurement.**", ""]
    lines += [LEGEND, ""]
    for name, section in document["sections"].items():
        lines += [f"## {TITLES[name]}", "", f"{section['state']} after {section['seconds']:.0f} s", ""]
        for table, rows in section["results"].items():
            shown = _failures(rows) if table == "cases" else rows
            summary = f"{len(rows)} cases, {len(_failures(rows))} bad" if table == "cases" else table
            lines += [f"### {summary}", "", *_table(shown), ""]
    return "\n".join(lines)


def _failures(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if not row["good"]]


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value).replace("|", "/")
