"""Many replays side by side: the candidates of a comparison or a sweep, on as many cores as there are."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline_core.errors import FormatError, KnobError
from paceline_core.knobs import Knobs, knob
from paceline_core.step_time import StepPredictor
from paceline_sim.replay import simulate
from paceline_sim.report import Summary, summarise
from paceline_sim.result import Result
from paceline_sim.slo import Slo
from paceline_sim.trace import Trace

__all__ = ["Candidate", "Engine", "candidates", "evaluate", "sweep_values"]

_MOST = 2_000  # candidates; more is a typing error, and would take hours


@dataclass(frozen=True, slots=True)
class Engine:
    """What doesn't change between candidates: how long steps take, and how much fits.

    `kv_blocks` returns the blocks of the pool for a blockSize and a kvMemoryFraction.
    """

    model: StepPredictor
    kv_blocks: Callable[[int, float], int]
    max_model_len: int
    pipeline_depth: int = 1

    def replay(self, trace: Trace, knobs: Knobs) -> Result:
        """Return what becomes of `trace` here under `knobs`. Raises `RequestRefused` as `simulate` does."""
        return simulate(
            trace,
            knobs,
            self.model,
            num_blocks=self.kv_blocks(knobs.block_size, knobs.kv_memory_fraction),
            max_model_len=self.max_model_len,
            pipeline_depth=self.pipeline_depth,
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One setting to try at `load` times the trace's rate; `label` says in what it differs from the others.

    `turn` = (k, n) replays only every n-th request from the k-th on: the share of one of n replicas.
    """

    label: str
    knobs: Knobs
    load: float = 1.0
    turn: tuple[int, int] = (0, 1)


def sweep_values(name: str, text: str) -> list[Any]:
    """Return the wire values of a sweep: `8:512` doubles from 8 to 512, `a,b,c` lists them.

    Values outside the knob's bounds are left out. Raises `FormatError` if the knob is unknown or nothing is left.
    """
    try:
        spec = knob(name)
    except KeyError:
        raise FormatError(f"{name}: there is no such knob") from None
    low, colon, high = text.partition(":")
    if colon and spec.kind != "int":
        raise FormatError(f"{name}={text}: only whole numbers have a range, give a list as in {name}=A,B")
    wanted = _doubling(name, low, high) if colon else [_wire(item.strip(), spec.kind) for item in text.split(",")]
    inside = [value for value in wanted if _is_valid(name, value)]
    if not inside:
        raise FormatError(f"{name}={text}: no candidate is inside the bounds, {spec.bound}")
    return inside


def candidates(base: Knobs, changes: Mapping[str, Sequence[Any]], loads: Sequence[float]) -> list[Candidate]:
    """Return every combination of the `changes` (wire name → wire values) on top of `base`, at every load.

    The envelope maxNumSeqsLimit follows maxNumSeqs; combinations that break a rule between knobs are left out. Raises
    `FormatError` if none is left or there are too many.
    """
    found: list[tuple[str, Knobs]] = []
    broken: KnobError | None = None
    total = len(loads)
    for values in changes.values():
        total *= len(values)
    if total > _MOST:
        raise FormatError(f"{total} candidates are too many, the most is {_MOST}: sweep fewer values")
    for values in itertools.product(*changes.values()):
        setting = dict(zip(changes, values, strict=True))
        limit = max(setting.get("maxNumSeqs", 0), base.max_num_seqs_limit)
        try:
            found.append((_label(setting), base.updated({"maxNumSeqsLimit": limit, **setting})))
        except KnobError as error:
            broken = error
    if not found:
        raise FormatError(f"no combination of the sweeps can run: {broken}")
    return [Candidate(label, knobs, load) for label, knobs in found for load in loads]


def evaluate(
    engine: Engine, trace: Trace, todo: Sequence[Candidate], slo: Slo, *, workers: int | None = None,
    progress: Callable[[], object] = lambda: None,
) -> list[Summary]:  # fmt: skip
    """Return the summary of each candidate, in their order, from up to `workers` processes (all cores if None).

    `progress` is called after each one. Raises what the first replay that fails raises.
    """
    width = min(workers or os.cpu_count() or 1, len(todo))
    task = partial(_evaluate_one, engine, slo)
    if width == 1:
        return [_noted(task(trace, candidate), progress) for candidate in todo]
    # spawned, not forked: the caller may have threads (a progress bar, the operator's event loop)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(width, context, initializer=_begin, initargs=(trace,)) as pool:
        futures = [pool.submit(_evaluate_kept, task, candidate) for candidate in todo]
        for future in futures:
            future.add_done_callback(lambda _: progress())
        return _results(futures)


def _results(futures: Sequence[Future[Summary]]) -> list[Summary]:
    """Wait for all; at the first failure drop what hasn't begun."""
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


_kept: list[Trace] = []  # in a worker process: the trace comes once, not with every candidate


def _begin(trace: Trace) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches the whole group: end at once, without a traceback
    _kept[:] = [trace]


def _evaluate_kept(task: Callable[[Trace, Candidate], Summary], candidate: Candidate) -> Summary:
    return task(_kept[0], candidate)


def _evaluate_one(engine: Engine, slo: Slo, trace: Trace, candidate: Candidate) -> Summary:
    if candidate.turn != (0, 1):
        first, replicas = candidate.turn
        trace = Trace(trace.requests[first::replicas])
    at_load = trace if candidate.load == 1.0 else trace.scaled(candidate.load)
    return summarise(engine.replay(at_load, candidate.knobs), slo)


def _noted(summary: Summary, progress: Callable[[], object]) -> Summary:
    progress()
    return summary


def _label(setting: Mapping[str, Any]) -> str:
    return " ".join(_text(value) if name == "strategy" else f"{name}={_text(value)}" for name, value in setting.items())


def _text(value: Any) -> str:
    """Return a wire value as it is written on the command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _doubling(name: str, low: str, high: str) -> Iterator[int]:
    if not (low.isdigit() and high.isdigit() and 1 <= int(low) <= int(high)):
        raise FormatError(f"{name}={low}:{high}: expected two whole numbers LOW:HIGH, at least 1 and rising")
    value = int(low)
    while value < int(high):
        yield value
        value *= 2
    yield int(high)


def _wire(item: str, kind: str) -> Any:
    """Return a listed item as the knob's wire type; what can't be read stays a text, which no numeric knob takes."""
    if kind == "bool":
        return {"true": True, "false": False}.get(item, item)
    try:
        return [int(item)] if kind == "ints" else int(item) if kind == "int" else float(item) if kind == "float" else item
    except ValueError:
        return item


def _is_valid(name: str, value: Any) -> bool:
    try:
        knob(name).parse(value)
    except KnobError:
        return False
    return True
