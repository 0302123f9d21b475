"""What Grafana wants around a panel's title, unit and queries: rows, places, data sources, variables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_HEIGHT = 8
_WIDTH = 24


@dataclass(frozen=True)
class Panel:
    """One panel; `queries` are PromQL by legend. `kind` is Grafana's, `stack` piles series up."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    text: str = ""
    kind: str = "timeseries"
    stack: bool = False


@dataclass(frozen=True)
class Dashboard:
    """Rows of panels by title; `variables` are those of `_SOURCES` that the reader may choose."""

    uid: str
    title: str
    text: str
    rows: dict[str, tuple[Panel, ...]]
    variables: tuple[str, ...] = field(default=("namespace", "model"))


_SOURCES = {
    "namespace": ("paceline_engine_ready", "namespace"),
    "model": ('paceline_engine_ready{namespace=~"$namespace"}', "model_name"),
    "pod": ('paceline_engine_ready{namespace=~"$namespace",model_name=~"$model"}', "pod"),
}
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def grafana(dashboard: Dashboard) -> dict[str, Any]:
    """Return the JSON that Grafana imports."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.text,
        "tags": ["paceline"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), *map(_variable, dashboard.variables)]},
        "panels": _panels(dashboard),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(name: str) -> dict[str, Any]:
    series, label = _SOURCES[name]
    query = f"label_values({series}, {label})"
    # allValue also matches series without the label, as of a Prometheus that scrapes single hosts
    shown = {"includeAll": True, "allValue": ".*", "multi": True, "current": {"text": "All", "value": "$__all"}}
    common = {"name": name, "type": "query", "datasource": _SOURCE, "refresh": 2, "sort": 1}
    return common | {"query": {"query": query, "refId": name}, "definition": query} | shown


def _panels(dashboard: Dashboard) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    y = 0
    for title, panels in dashboard.rows.items():
        found.append(
            {
                "id": len(found) + 1,
                "type": "row",
                "title": title,
                "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
                "panels": [],
            }
        )
        y += 1
        columns = len(panels) if len(panels) <= 4 else 3
        width = _WIDTH // columns
        for i, panel in enumerate(panels):
            place = {"x": i % columns * width, "y": y + i // columns * _HEIGHT, "w": width, "h": _HEIGHT}
            found.append(_panel(panel, len(found) + 1, place))
        y += -(-len(panels) // columns) * _HEIGHT
    return found


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    unit = {"tok/s": "suffix:tok/s", "bool": "bool_yes_no"}.get(panel.unit, panel.unit)
    defaults: dict[str, Any] = {"unit": unit, "min": 0}
    options: dict[str, Any] = {}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stack else "none"}
        defaults["custom"] = {"fillOpacity": 30 if panel.stack else 8, "stacking": stacking, "showPoints": "never"}
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    targets = [
        {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": query, "legendFormat": legend or "__auto"}
        for i, (legend, query) in enumerate(panel.queries.items())
    ]
    shown = {"id": number, "type": panel.kind, "title": panel.title, "description": panel.text, "gridPos": place}
    return shown | {
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }
