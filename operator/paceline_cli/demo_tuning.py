"""The demo's last act: knobs that are set badly, an objective, `tuning.mode: Auto`, and what the operator makes of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline_cli.clock_service import SLO_TPOT, SLO_TTFT, Sent, Traffic, clock_manifest, write_device
from paceline_cli.fleet import Fleet, FleetError
from paceline_cli.load import percentile

__all__ = ["INTERVAL", "tuning_act"]

INTERVAL = 4.0  # seconds between the operator's looks: as short as a demo's patience, 30 in earnest
_SERVICE = "tuned"
_RATE = 6.0  # requests/s; two pods with one slot each serve about three
_READY = 120.0
_MOST = 110.0  # seconds of traffic
_AFTER = 12.0  # seconds that are shown once it has settled
_WINDOW = 8.0  # of the live figures
_BARS = "▁▂▃▄▅▆▇█"


def tuning_act(console: Console, home: Path, paceline: Callable[..., None]) -> None:
    """Run the act on the stack in `home`; `paceline` runs a subcommand. Raises `FleetError` if the pods don't come up."""
    console.rule("the tuner, on two clock pods")
    console.print(
        "The pods are the real server, scheduler and admin port; only the device is a clock (12 ms a step and more,\n"
        f"in tiles of eight). maxNumSeqs 1, objective TTFT ≤ {SLO_TTFT:g} s, TPOT ≤ {SLO_TPOT * 1e3:g} ms, mode Auto.",
        style="dim", highlight=False,
    )  # fmt: skip
    manifest = home / "tuned.json"
    service = clock_manifest(_SERVICE, write_device(home), replicas=2, knobs={"maxNumSeqs": 1})
    manifest.write_text(json.dumps(service), encoding="utf-8")
    paceline("local", "apply", "-f", str(manifest))
    fleet = Fleet(home / "kubeconfig", _SERVICE)
    _wait_ready(fleet)
    watched = _watch(console, fleet)
    console.print(_before_and_after(watched))
    failed = sum(bool(s.outcome.error) for s in watched.sent)
    if failed:
        first = next(s.outcome.error for s in watched.sent if s.outcome.error)
        raise FleetError(f"{failed} requests failed while knobs were tuned: {first}")
    if not watched.settled:
        console.print(
            f"[yellow]tuning hasn't settled within {_MOST:.0f} s on this machine:[/] paceline tune explain {_SERVICE}"
        )


@dataclass(frozen=True, slots=True)
class _Watched:
    """What was seen: the requests, when the change was tried and when it was in force everywhere, and the knobs then."""

    sent: Sequence[Sent]
    tried: float | None
    promoted: float | None
    settled: bool
    before: Mapping[str, Any]
    after: Mapping[str, Any]


def _wait_ready(fleet: Fleet) -> None:
    deadline = time.monotonic() + _READY
    while fleet.conditions().get("Ready", {}).get("status") != "True":
        if time.monotonic() > deadline:
            raise FleetError(f"{fleet.name} didn't become Ready within {_READY:.0f} s")
        time.sleep(0.25)


def _watch(console: Console, fleet: Fleet) -> _Watched:
    tried = promoted = settled = None
    before = _knobs(fleet.get())
    service: Mapping[str, Any] = {}
    with (
        Traffic(fleet.url(), fleet.name, lambda _: _RATE, lambda _: (40, 200)) as traffic,
        Live(console=console, refresh_per_second=4) as live,
    ):
        while traffic.seconds < (settled + _AFTER if settled else _MOST):
            service = fleet.get()
            state = service.get("status", {}).get("tuning", {}).get("state")
            tried = tried or (traffic.seconds if state == "Canary" else None)
            promoted = promoted or (traffic.seconds if state in ("Verifying", "Settled") and tried else None)
            settled = settled or (traffic.seconds if state == "Settled" else None)
            live.update(_view(service, traffic))
            time.sleep(0.5)
    return _Watched(traffic.sent, tried, promoted, settled is not None, before, _knobs(service))


def _view(service: Mapping[str, Any], traffic: Traffic) -> Group:
    """Return the live view: state, knobs, and the share within the objective over the last seconds."""
    tuning = service.get("status", {}).get("tuning", {})
    recent = [s for s in traffic.sent if s.at > traffic.seconds - _WINDOW]
    good = sum(s.good for s in recent)
    trial = tuning.get("trial", {})
    lines = [
        Text(f"{traffic.seconds:4.0f} s  {tuning.get('state', '…'):<10} {tuning.get('reason', '')}", style="bold"),
        Text(f"  {tuning.get('message', '')}", style="dim"),
        Text(f"  in force   {_short(_knobs(service))}"),
        Text(
            f"  on trial   {_short(trial.get('knobs', {}))} on {', '.join(trial.get('pods', [])) or 'all pods'}"
            if trial
            else ""
        ),
        Text(f"  goodput    {good / _WINDOW:4.1f}/s of {_RATE:g}  {_spark(traffic.sent, traffic.seconds)}", style="green"),
    ]
    return Group(*lines)


def _spark(sent: Sequence[Sent], now: float, width: int = 40) -> str:
    """Return the share within the objective over time, as bars."""
    step = max(2.0, now / width)
    cells: dict[int, list[bool]] = {}
    for s in sent:
        cells.setdefault(int(s.at // step), []).append(s.good)
    return "".join(
        _BARS[round((len(_BARS) - 1) * sum(cells[i]) / len(cells[i]))] if i in cells else " "
        for i in range(int(now // step))
    )


def _before_and_after(watched: _Watched) -> Table:
    table = Table(title="2 clock pods, the same processes throughout; counted by the clients", title_justify="left")
    for header in ("", "maxNumSeqs", "budget", "goodput/s", "in time", "TTFT p95", "TPOT p95"):
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    end = max((s.at for s in watched.sent), default=0.0)
    rows = (
        ("before", watched.before, 0.0, watched.tried or end),
        ("after", watched.after, (watched.promoted or end) + 2, end),
    )
    for name, knobs, low, high in rows:
        part = [s for s in watched.sent if low <= s.at < high]
        if not part:
            continue
        good = sum(s.good for s in part)
        ttft, tpot = ([t for s in part if (t := getattr(s.outcome, key)) is not None] for key in ("ttft", "tpot"))
        table.add_row(
            name,
            *(str(knobs.get(knob)) for knob in ("maxNumSeqs", "maxNumBatchedTokens")),
            f"{good / (high - low):.1f}",
            f"{good / len(part):.0%}",
            f"{percentile(ttft, 0.95):.2f} s",
            f"{1e3 * percentile(tpot, 0.95):.0f} ms",
        )
    return table


def _knobs(service: Mapping[str, Any]) -> dict[str, Any]:
    rows = service.get("status", {}).get("effective", {})
    return {name: rows[name]["value"] for name in ("maxNumSeqs", "maxNumBatchedTokens") if name in rows}


def _short(knobs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in knobs.items())
