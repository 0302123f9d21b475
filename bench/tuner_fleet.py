"""Does tuning pay? Made-up services in virtual time, with the tuner's own code deciding and pods whose steps aren't linear.

    python -m bench.tuner_fleet                          # 50 services × 2 h
    python -m bench.tuner_fleet --services 4 --hours 0.5 # a look
    python -m bench.tuner_fleet --resume rows.jsonl      # keeps finished services there, and goes on where it was stopped

Pods are `paceline_sim.live.VirtualPod`: the production scheduler on a device in virtual time. The device has tiles, a
context knee, and computing that partly hides behind reading; the tuner sees only what `/admin/observe` tells. Each service's
traffic changes its kind half-way. Every seventh tells lies about its step times. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.tuner_report import FIRST, FLEET, missed, plots, report
from bench.tuner_services import FROZEN_AFTER, MAX_MODEL_LEN, PODS, STARTS, MadeUpService, made_up
from bench.tuner_truth import INTERVAL, Outcomes, goodputs, truth_of

from paceline_core.knobs import Knobs, knobs_to_wire
from paceline_core.wire import RequestRecord
from paceline_operator.tuning.brain import Brain, Situation
from paceline_operator.tuning.decide import Decision, decide
from paceline_operator.tuning.facts import Ask, PodFact, Tell
from paceline_operator.tuning.objective import Objective
from paceline_sim.live import VirtualPod

TICKS = 4  # looks per interval
STEPS = 64  # of an answer that are read
WINDOW = 300.0  # of the plots


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one service: goodput (requests/s within the objective) of both halves' settled parts, and overall.

    `best` is of the best setting of each half alone, `fixed` of the best one that is kept through both.

    `seconds` of CPU went to the tuned run, and to finding out what fixed knobs would have given.
    """

    name: str
    start: str
    lie: str
    kinds: tuple[str, str]
    tuned: tuple[float, float, float]
    vllm: tuple[float, float, float]
    best: tuple[float, float]
    best_knobs: tuple[str, str]
    fixed: tuple[float, float]
    fixed_knobs: str
    changes: int
    reverted: int
    failed: int
    final: Mapping[str, int]
    messages: tuple[str, ...]
    decisions: int = 0
    seconds: tuple[float, float] = (0.0, 0.0)
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)


class Fleet:
    """The pods of one service and the brain that tunes them."""

    def __init__(self, service: MadeUpService) -> None:
        self.service = service
        knobs = STARTS[service.start]
        sizes = {"num_blocks": service.blocks, "max_model_len": MAX_MODEL_LEN}
        self.pods = [VirtualPod(knobs, service.device, **sizes, name=f"pod-{i}") for i in range(PODS)]
        for number, pod in enumerate(self.pods):
            pod.scale = 2.0 if service.lie == "doubled" else 1.0
            for request in service.traffic(number).requests:
                pod.send(request)
        self.base = knobs_to_wire(knobs)
        self.brain = Brain()
        self.told: list[str] = []
        self.ended: list[RequestRecord] = []
        self.decisions = 0
        self.now = 0.0
        self._answer: Decision | None = None

    def run(self) -> None:
        end = 2 * self.service.half
        while self.now < end:
            self.now += INTERVAL / TICKS
            for pod in self.pods:
                pod.run(self.now)
                pod.frozen = self.service.lie == "frozen" and self.now > FROZEN_AFTER
            if self.brain.state.trial is not None or self._answer is not None or self.now % INTERVAL == 0:
                for pod in self.pods:
                    self._observe(pod)
                self._look()

    def _observe(self, pod: VirtualPod) -> None:
        ledger = self.brain.ledger(pod.name)
        document = pod.observe(ledger.cursor)
        thin = document.steps[:: max(1, len(document.steps) // STEPS)]  # as the operator's scraper reads them
        ledger.absorb(replace(document, steps=thin), self.now)
        self.ended += pod.take_records()  # a pod keeps its last ones only

    def _look(self) -> None:
        answer, self._answer = self._answer, None
        situation = self._situation()
        for effect in self.brain.look(situation, self.now, answer):
            if isinstance(effect, Tell):
                self.told.append(f"{self.now / 60:.1f} min {effect.reason}: {effect.message}")
            elif isinstance(effect, Ask):
                question = self.brain.question(situation, effect, self.now)
                self._answer = None if question is None else decide(question)
                self.brain.searching = question is not None
                self.decisions += question is not None
        for pod in self.pods:
            wanted = self._wanted(pod.name)
            if pod.knobs != wanted:
                pod.set_knobs(wanted)

    def _wanted(self, name: str) -> Knobs:
        state = self.brain.state
        trial = state.trial.tried if state.trial is not None and name in state.trial.pods else {}
        return STARTS[self.service.start].updated({**state.override, **trial})

    def _situation(self) -> Situation:
        service, state = self.service, self.brain.state
        facts = tuple(PodFact(pod.name, pod.name, applied=pod.knobs == self._wanted(pod.name)) for pod in self.pods)
        knobs = {**self.base, **state.override}
        return Situation(
            service.name, "Auto", "hash", knobs, {}, facts, service.ttft, service.tpot, 95.0, INTERVAL
        )  # fmt: skip


def outcomes_of(service: MadeUpService, fleet: Fleet) -> Outcomes:
    objective = Objective(service.ttft, service.tpot)
    ended = (*fleet.ended, *(r for pod in fleet.pods for r in pod.take_records()))
    left = ((r.arrival, False) for pod in fleet.pods for r in pod.unfinished())
    return sorted([*((r.arrival, objective.met(r)) for r in ended), *left])


def series_of(service: MadeUpService, outcomes: Sequence[tuple[float, bool]]) -> list[float]:
    """Return the share of requests within the objective per window."""
    count = int(2 * service.half // WINDOW)
    parts: list[list[bool]] = [[] for _ in range(count)]
    for arrival, met in outcomes:
        if arrival < count * WINDOW:
            parts[int(arrival // WINDOW)].append(met)
    return [round(sum(part) / len(part), 4) if part else 1.0 for part in parts]


def measure(job: tuple[int, float]) -> Row:
    """Run one service tuned, under vLLM's defaults, and under every setting of the sweep."""
    gc.freeze()
    gc.set_threshold(100_000)  # nothing here is a cycle worth looking for ten times a second: a tenth of the time
    service = made_up(*job)
    begin = time.process_time()
    fleet = Fleet(service)
    fleet.run()
    tuned, spent = outcomes_of(service, fleet), time.process_time() - begin
    truth = truth_of(service)
    state, final = fleet.brain.state, fleet.pods[0].knobs
    return Row(
        name=service.name,
        start=service.start,
        lie=service.lie,
        kinds=service.kinds,
        tuned=goodputs(service, tuned),
        vllm=truth.vllm,
        best=truth.best,
        best_knobs=(_brief(truth.knobs[0]), _brief(truth.knobs[1])),
        fixed=truth.fixed,
        fixed_knobs=_brief(truth.fixed_knobs),
        changes=sum("TuningCanary" in line for line in fleet.told),
        reverted=sum("TuningReverted" in line for line in fleet.told),
        failed=sum(r.outcome == "refused" for ledger in fleet.brain.ledgers.values() for r in ledger.records),
        final={"maxNumSeqs": final.max_num_seqs, "maxNumBatchedTokens": final.max_num_batched_tokens},
        messages=(*fleet.told, f"end: {state.phase} {state.reason}: {state.message}"),
        decisions=fleet.decisions,
        seconds=(round(spent, 2), round(time.process_time() - begin - spent, 2)),
        series={"tuned": series_of(service, tuned), "vllm": series_of(service, truth.outcomes)},
    )


def _brief(knobs: Knobs) -> str:
    return f"{knobs.max_num_seqs}/{knobs.max_num_batched_tokens}"


def kept_rows(path: Path | None) -> list[Row]:
    """Return the services that an earlier run has finished."""
    lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
    return [Row(**json.loads(line)) for line in lines]


def keep_row(path: Path, row: Row) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tuner_fleet", description="Tuned against fixed knobs, in virtual time."
    )
    parser.add_argument("--services", type=int, default=FLEET)
    parser.add_argument("--first", type=int, default=FIRST, help="number of the first service (default: %(default)s)")
    parser.add_argument("--hours", type=float, default=2.0, help="virtual hours per service")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--resume", type=Path, help="keep finished services in this file, and don't run them again")
    parser.add_argument("--verbose", action="store_true", help="print what each tuner told")
    options = parser.parse_args(arguments)
    begin, rows = time.monotonic(), kept_rows(options.resume)
    numbers = range(options.first, options.first + options.services)
    jobs = [
        (number, options.hours) for number in numbers if made_up(number, options.hours).name not in {r.name for r in rows}
    ]
    with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=8) as pool:
        for row in pool.imap_unordered(measure, jobs):
            rows.append(row)
            if options.resume is not None:
                keep_row(options.resume, row)
            print(f"{row.name} done after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
            if options.verbose:
                print(*(f"  {line}" for line in row.messages), sep="\n", flush=True)
    rows.sort(key=lambda row: row.name)
    options.out.mkdir(parents=True, exist_ok=True)
    text = report(rows, options.hours, INTERVAL)
    (options.out / "tuner_fleet.md").write_text(text, encoding="utf-8")
    (options.out / "tuner_fleet.json").write_text(
        json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8"
    )
    plots(rows, options.out, WINDOW)
    print(text)
    missing = missed(rows, options.hours)
    for failure in missing:
        print(f"missed: {failure}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
