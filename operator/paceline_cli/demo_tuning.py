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
from paceline_cli.real_service import REAL_OUTPUTS, REAL_TPOT, REAL_TTFT, REAL_WORDS, real_manifest, too_much_for

__all__ = ["CLOCK", "REAL", "TUNED", "Act", "tuning_act"]

TUNED = "tuned"
_READY = 180.0
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Act:
    """One way to show it: what runs, what is promised, and how long people wait.

    `interval` (seconds between the operator's looks) is short for a demo's patience: 30 in earnest. `rate` is in requests/s
    (None: what is too much for the pods as they are at the start), `outputs` in tokens, `slo` TTFT and TPOT in seconds;
    `most` seconds of traffic, `after` of them once it has settled, `window` of them for the live figures.
    """

    kind: str
    text: str
    manifest: Callable[[Path], dict[str, Any]]
    interval: float
    rate: float | None
    words: tuple[int, int]
    outputs: tuple[int, int]
    slo: tuple[float, float]
    most: float
    after: float
    window: float


def _clock(home: Path) -> dict[str, Any]:
    return clock_manifest(TUNED, write_device(home), replicas=2, knobs={"maxNumSeqs": 1})


def _real(_home: Path) -> dict[str, Any]:
    return real_manifest(TUNED, replicas=2, knobs={"maxNumSeqs": 1})


CLOCK = Act(
    "clock",
    "The pods are the real server, scheduler and admin port; only the device is a clock (12 ms a step and more,\n"
    f"in tiles of eight). maxNumSeqs 1, objective TTFT ≤ {SLO_TTFT:g} s, TPOT ≤ {SLO_TPOT * 1e3:g} ms, mode Auto.",
    _clock, interval=4.0, rate=6.0, words=(40, 200), outputs=(40, 80), slo=(SLO_TTFT, SLO_TPOT), most=110.0, after=12.0,
    window=8.0,
)  # fmt: skip
REAL = Act(
    "CPU",
    "SmolLM2-135M on the real engine, one core a pod. maxNumSeqs 1, "
    f"objective TTFT ≤ {REAL_TTFT:g} s, TPOT ≤ {REAL_TPOT * 1e3:g} ms, mode Auto.",
    _real, interval=20.0, rate=None, words=REAL_WORDS, outputs=REAL_OUTPUTS, slo=(REAL_TTFT, REAL_TPOT), most=480.0,
    after=60.0, window=30.0,
)  # fmt: skip


def tuning_act(console: Console, home: Path, paceline: Callable[..., None], act: Act) -> None:
    """Run the act on the stack in `home`; `paceline` runs a subcommand. Raises `FleetError` if the pods don't come up."""
    console.rule(f"the tuner, on two {act.kind} pods")
    console.print(act.text, style="dim", highlight=False)
    manifest = home / "tuned.json"
    manifest.write_text(json.dumps(act.manifest(home)), encoding="utf-8")
    paceline("local", "apply", "-f", str(manifest))
    fleet = Fleet(home / "kubeconfig", TUNED)
    _wait_ready(fleet)
    rate = act.rate or _measured(console, fleet)
    watched = _watch(console, fleet, act, rate)
    console.print(_before_and_after(watched, act))
    failed = sum(s.failed for s in watched.sent)
    if failed:
        first = next(s.outcome.error for s in watched.sent if s.failed)
        raise FleetError(f"{failed} requests failed while knobs were tuned: {first}")
    if not watched.settled:
        console.print(
            f"[yellow]tuning hasn't settled within {act.most:.0f} s on this machine:[/] paceline tune explain {TUNED}"
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


def _measured(console: Console, fleet: Fleet) -> float:
    """Return a rate that is too much for the pods, and say so."""
    console.print("measuring what the pods serve with the knobs that they have …", style="dim")
    rate = too_much_for(fleet)
    console.print(f"the traffic is more than that: {rate:.1f} requests/s", style="dim", highlight=False)
    return rate


def _watch(console: Console, fleet: Fleet, act: Act, rate: float) -> _Watched:
    tried = promoted = settled = None
    before = _knobs(fleet.get())
    service: Mapping[str, Any] = {}
    with (
        Traffic(fleet.url(), fleet.name, lambda _: rate, lambda _: act.words, lambda _: act.outputs, slo=act.slo) as traffic,
        Live(console=console, refresh_per_second=4) as live,
    ):
        while traffic.seconds < (settled + act.after if settled else act.most):
            service = fleet.get()
            state = service.get("status", {}).get("tuning", {}).get("state")
            tried = tried or (traffic.seconds if state == "Canary" else None)
            promoted = promoted or (traffic.seconds if state in ("Verifying", "Settled") and tried else None)
            settled = settled or (traffic.seconds if state == "Settled" else None)
            live.update(_view(service, traffic, rate, act.window))
            time.sleep(0.5)
    return _Watched(traffic.sent, tried, promoted, settled is not None, before, _knobs(service))


def _view(service: Mapping[str, Any], traffic: Traffic, rate: float, window: float) -> Group:
    """Return the live view: state, knobs, and the share within the objective over the last seconds."""
    tuning = service.get("status", {}).get("tuning", {})
    recent = [s for s in traffic.sent if s.at > traffic.seconds - window]
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
        Text(
            f"  goodput    {good / window:4.1f}/s of {rate:.1f}  {_spark(traffic.sent, traffic.seconds)}",
            style="green",
        ),
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


def _before_and_after(watched: _Watched, act: Act) -> Table:
    table = Table(title=f"2 {act.kind} pods, the same processes throughout; counted by the clients", title_justify="left")
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
