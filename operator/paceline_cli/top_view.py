"""The screen of `paceline top`: a table that can be sorted and filtered, refreshed while it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.widgets import DataTable, Footer, Input, Static

from paceline_cli.simulate_view import duration
from paceline_cli.top_fleet import Fleet, ServiceRow
from paceline_core.errors import PacelineError

__all__ = ["COLUMNS", "TopApp", "cells", "matching"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its title, what it shows, and by what it is sorted."""

    title: str
    cell: Callable[[ServiceRow], Text | str]
    key: Callable[[ServiceRow], float | str]
    right: bool = True


def _latency(row: ServiceRow, name: str) -> Text:
    value, bound = getattr(row.activity, name), row.objectives.get(name)
    text = Text("–" if value is None else duration(value), style="bold red" if row.misses(name) else "")
    return text if bound is None else text.append(f" ≤ {duration(bound)}", style="dim")


def _ready(row: ServiceRow) -> Text:
    return Text(
        f"{row.replicas} {'' if row.ready == 'yes' else row.ready}".rstrip(), style="" if row.ready == "yes" else "yellow"
    )


def _silent(row: ServiceRow) -> str:
    return f" ({row.silent} silent)" if row.silent else ""


COLUMNS = (
    Column("SERVICE", lambda r: f"{r.namespace}/{r.name}", lambda r: f"{r.namespace}/{r.name}", right=False),
    Column("READY", lambda r: _ready(r).append(_silent(r), style="yellow"), lambda r: r.ready == "yes", right=False),
    Column("STRATEGY", lambda r: r.strategy, lambda r: r.strategy, right=False),
    Column("RUN", lambda r: str(r.activity.running), lambda r: r.activity.running),
    Column("WAIT", lambda r: str(r.activity.waiting), lambda r: r.activity.waiting),
    Column("KV", lambda r: f"{r.activity.kv_usage:.0%}", lambda r: r.activity.kv_usage),
    Column("TOK/S", lambda r: f"{r.activity.token_rate:,.0f}", lambda r: r.activity.token_rate),
    Column("TTFT", lambda r: _latency(r, "ttft"), lambda r: r.activity.ttft or 0.0),
    Column("TPOT", lambda r: _latency(r, "tpot"), lambda r: r.activity.tpot or 0.0),
    Column("TUNER", lambda r: r.tuner, lambda r: r.tuner, right=False),
    Column("LAST CHANGE", lambda r: r.change, lambda r: r.change, right=False),
)


def cells(row: ServiceRow) -> list[Text]:
    """Return a row's cells as text."""
    texts = []
    for column in COLUMNS:
        made = column.cell(row)
        text = made if isinstance(made, Text) else Text(made)
        text.justify = "right" if column.right else "left"
        texts.append(text)
    return texts


def matching(rows: Sequence[ServiceRow], words: str, sorted_by: int, *, descending: bool) -> list[ServiceRow]:
    """Return the rows that contain every word somewhere, sorted by a column."""
    wanted = words.lower().split()
    found = [row for row in rows if all(word in _searchable(row) for word in wanted)]
    return sorted(found, key=lambda row: (COLUMNS[sorted_by].key(row),), reverse=descending)


def _searchable(row: ServiceRow) -> str:
    return f"{row.namespace}/{row.name} {row.strategy} {row.ready} {row.tuner}".lower()


class TopApp(App[None]):
    """The live view of a fleet."""

    TITLE = "paceline top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 1; padding: 0 1; background: $panel; }
    #filter { display: none; height: 3; }
    #filter.shown { display: block; }
    DataTable { height: 1fr; }
    """
    BINDINGS = [  # noqa: RUF012  # textual's own form
        Binding("q", "quit", "Quit"),
        Binding("s", "sort", "Sort by next column"),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "clear", "All"),
    ]

    def __init__(self, fleet: Fleet, every: float) -> None:
        super().__init__()
        self._fleet = fleet
        self._every = every
        self._rows: list[ServiceRow] = []
        self._sorted_by, self._descending, self._words = 0, False, ""

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Static("looking …", id="head")
        yield Input(placeholder="words that a service must contain, Enter keeps them, Esc shows all", id="filter")
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self.query_one(DataTable).focus()
        self._show()
        self._look()
        self.set_interval(self._every, self._look)

    @work(thread=True, exclusive=True)
    def _look(self) -> None:
        """Ask the cluster beside the screen's own thread, so that keys are answered meanwhile."""
        try:
            rows = self._fleet.look()
        except PacelineError as error:
            self.call_from_thread(self._head, f"[bold red]{error}[/]")
            return
        self.call_from_thread(self._take, rows)

    def _take(self, rows: list[ServiceRow]) -> None:
        self._rows = rows
        rate = sum(row.activity.token_rate for row in rows)
        pods = sum(row.activity.pods for row in rows)
        missing = sum(row.misses("ttft") or row.misses("tpot") for row in rows)
        late = f", [bold red]{missing} miss their objective[/]" if missing else ""
        self._head(f"{len(rows)} services, {pods} pods, {rate:,.0f} tokens/s{late}")
        self._show()

    def _head(self, text: str) -> None:
        self.query_one("#head", Static).update(text)

    def _show(self) -> None:
        table = self.query_one(DataTable)
        at = table.cursor_row
        table.clear(columns=True)
        for index, column in enumerate(COLUMNS):
            mark = (" ▼" if self._descending else " ▲") if index == self._sorted_by else ""
            table.add_column(column.title + mark)
        for row in matching(self._rows, self._words, self._sorted_by, descending=self._descending):
            table.add_row(*cells(row))
        table.move_cursor(row=at)

    def action_sort(self) -> None:
        """Sort by the next column."""
        self._sorted_by = (self._sorted_by + 1) % len(COLUMNS)
        self._descending = COLUMNS[self._sorted_by].right  # of figures the largest first
        self._show()

    def action_reverse(self) -> None:
        """Turn the order round."""
        self._descending = not self._descending
        self._show()

    def action_filter(self) -> None:
        """Ask for words."""
        box = self.query_one("#filter", Input)
        box.add_class("shown")
        box.focus()

    def action_clear(self) -> None:
        """Show all services again."""
        box = self.query_one("#filter", Input)
        box.value = ""
        box.remove_class("shown")
        self.query_one(DataTable).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while words are typed."""
        self._words = event.value
        self._show()

    def on_input_submitted(self) -> None:
        """Keep the words and go back to the table."""
        self.query_one(DataTable).focus()
