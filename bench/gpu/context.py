"""What a section is given, and where its results go: written after each one, so that a cut run keeps what it had."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.sizes import Sizes


@dataclass
class Context:
    """`measured` holds the rates of the section `device` by name; `results` is this section's document."""

    sizes: Sizes
    path: Path
    measured: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)

    def put(self, table: str, **row: Any) -> None:
        """Append a row to a table and write the document."""
        self.results.setdefault(table, []).append({k: _short(v) for k, v in row.items()})
        self.path.write_text(json.dumps(self.results, indent=1) + "\n")

    def rate(self, name: str) -> float:
        """Return a measured rate; a section that runs alone has none, and shares of it are nan."""
        return float(self.measured.get(name, float("nan")))


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return None if value != value else float(f"{value:.4g}")
