"""What a fleet costs: a thousand InferenceServices on a real API server, the operator as a process, the rest played here.

    KUBEBUILDER_ASSETS=… python -m bench.fleet                     # 1,000 services × 2 replicas
    KUBEBUILDER_ASSETS=… python -m bench.fleet --services 100      # in a minute

etcd and kube-apiserver are the bench's own and run without controllers: no pod ever exists, and the bench writes the status
of Deployments, so that what is measured is the operator and the API server alone. Tuning is off. Exit code 1 if a gate is
missed.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.fleet_baseline import replay
from bench.fleet_operator import Cost, Meter, Operator
from bench.fleet_plane import MERGE, Client, RealPlane, assets
from bench.fleet_report import Figures, gates, write
from bench.fleet_world import (
    CLASS,
    GROUP,
    DeploymentController,
    Knobs,
    Services,
    create,
    inference_class,
    path_of,
    place,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

CLASS_SLOTS, NEW_CLASS_SLOTS = 48, 56  # both unlike the knob's own default
_LONGEST_S = 3600.0
_CHANGES = 60  # single changes whose way into the children is timed
_CLASS_SIGN_S = 90.0  # within which a change of the class must show anywhere


@dataclass
class Bench:
    """One run; each method is a phase and returns its cost."""

    client: Client
    plane: RealPlane
    services: Services
    knobs: Knobs
    count: int
    replicas: int
    bar: Progress
    check: Callable[[], None] = lambda: None  # ends the run if the operator has ended

    def wait(self, what: str, total: int, done: Callable[[], int], limit: float = _LONGEST_S) -> None:
        """Show progress until `done()` reaches `total`."""
        task, deadline = self.bar.add_task(what, total=total), time.monotonic() + limit
        while (have := done()) < total:
            self.check()
            self.bar.update(task, completed=have)
            if time.monotonic() > deadline:
                raise SystemExit(f"{what}: {have} of {total} after {limit:.0f} s")
            time.sleep(0.1)
        self.bar.update(task, completed=total)

    @contextlib.contextmanager
    def measured(self, operator: Operator) -> Iterator[Cost]:
        """Measure what happens inside; a dead operator ends the run."""
        self.check = operator.check
        with Meter(operator, self.plane.processes) as cost:
            yield cost

    def cold(self, operator: Operator) -> Cost:
        """All services are there and nothing else: until every one is Ready."""
        with self.measured(operator) as cost:
            self.wait("cold reconcile", self.count, lambda: len(self.services.ready))
            cost.seconds = time.monotonic() - operator.started
            settle(operator)
        return cost

    def restart(self, operator: Operator) -> Cost:
        """Everything is as it should be, the operator is new: until it has looked at each service. It must write nothing."""
        with self.measured(operator) as cost:
            self.wait("restart", self.count, operator.passes)
            cost.seconds = time.monotonic() - operator.started
            settle(operator)
        return cost

    def steady(self, operator: Operator, seconds: float) -> Cost:
        """Nothing happens."""
        with self.measured(operator) as cost:
            end = time.monotonic() + seconds
            self.wait("steady state", int(seconds), lambda: int(seconds - max(0.0, end - time.monotonic())))
        return cost

    def single_changes(self) -> list[float]:
        """Change one service after another; return the seconds until each new knob was in its ConfigMap."""
        found = list[float]()
        task = self.bar.add_task("single changes", total=min(_CHANGES, self.count))
        for number in range(min(_CHANGES, self.count)):
            name, slots = place(number)[1], 100 + number
            begin = time.monotonic()
            self.edit(number, slots)
            self._await_slots(name, slots)
            found.append(self.knobs.seen[name][0] - begin)
            self.bar.advance(task)
        return found

    def _await_slots(self, name: str, slots: int) -> None:
        deadline = time.monotonic() + 60
        while self.knobs.slots(name) != slots:
            if time.monotonic() > deadline:
                raise SystemExit(f"{name} never got its new knobs")
            time.sleep(0.002)

    def edit(self, number: int, slots: int) -> None:
        self.client.call("PATCH", path_of(number), {"spec": {"batching": {"maxNumSeqs": slots}}}, MERGE)

    def churn(self, operator: Operator) -> Cost:
        """A tenth of the fleet at once: half is edited, a quarter deleted, as many are new."""
        tenth = max(4, self.count // 10)
        edited = range(self.count // 2, self.count // 2 + tenth // 2)
        deleted, new = range(self.count - tenth // 4, self.count), range(self.count, self.count + tenth // 4)
        with self.measured(operator) as cost:
            self.client.many([("DELETE", path_of(number), None, MERGE) for number in deleted])
            self.client.many([("PATCH", path_of(n), {"spec": {"batching": {"maxNumSeqs": 99}}}, MERGE) for n in edited])
            create(self.client, new, self.replicas)

            def done() -> int:
                return sum(self.knobs.slots(place(n)[1]) == 99 for n in edited) + sum(
                    place(n)[1] in self.services.ready for n in new
                )

            begin = time.monotonic()
            self.wait("churn", len(edited) + len(new), done)
            cost.seconds = time.monotonic() - begin
            settle(operator)
        return cost

    def class_change(self, operator: Operator) -> Cost | None:
        """One edit of the class that all services name; None if the operator doesn't act on classes."""
        names = [place(n)[1] for n in range(self.count)]
        if {self.knobs.slots(name) for name in names} != {CLASS_SLOTS}:
            return None

        def done() -> int:
            return sum(self.knobs.slots(name) == NEW_CLASS_SLOTS for name in names)

        with self.measured(operator) as cost:
            path = f"{GROUP}/inferenceclasses/{CLASS}"
            self.client.call("PATCH", path, {"spec": inference_class(NEW_CLASS_SLOTS)["spec"]}, MERGE)
            begin = time.monotonic()
            while not done():
                if time.monotonic() > begin + _CLASS_SIGN_S:
                    return None
                time.sleep(0.1)
            self.wait("class change", len(names), done)
            cost.seconds = time.monotonic() - begin
            settle(operator)
        return cost


def settle(operator: Operator, quiet: float = 3.0) -> None:
    """Wait until the operator has made no call for `quiet` seconds."""
    last, since = operator.calls(), time.monotonic()
    while time.monotonic() - since < quiet:
        time.sleep(0.25)
        now = operator.calls()
        if now != last:
            last, since = now, time.monotonic()


def run(options: argparse.Namespace, folder: Path, bar: Progress) -> Figures:
    with RealPlane(folder, assets()) as plane:
        plane.install_crds()
        with (
            Client(plane.kubeconfig) as client,
            Services(client, f"{GROUP}/inferenceservices") as services,
            Knobs(client, "/api/v1/configmaps?labelSelector=paceline.io/service") as knobs,
            DeploymentController(client, "/apis/apps/v1/deployments"),
        ):
            client.call("POST", f"{GROUP}/inferenceclasses", inference_class(CLASS_SLOTS))
            create(client, range(options.services), options.replicas)
            bench = Bench(client, plane, services, knobs, options.services, options.replicas, bar)
            return measure(bench, options, plane, folder)


def measure(bench: Bench, options: argparse.Namespace, plane: RealPlane, folder: Path) -> Figures:
    figures = Figures(services=options.services, replicas=options.replicas)
    with Operator(plane.kubeconfig, folder) as operator:
        figures.cold = bench.cold(operator)
        figures.steady = bench.steady(operator, options.steady)
    figures.own_speed = replay(bench.client, bench.count, figures.cold.writes)
    with Operator(plane.kubeconfig, folder) as operator:
        figures.restart = bench.restart(operator)
        figures.class_change = bench.class_change(operator)
        figures.changes = bench.single_changes()
        settle(operator)
        figures.churn = bench.churn(operator)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fleet", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steady", type=float, default=60.0, help="seconds of the steady phase")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))  # so that what was started ends too
    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="paceline-fleet-") as folder,
        Progress(*columns, console=Console(stderr=True)) as bar,
    ):
        figures = run(options, Path(folder), bar)
    print(write(figures, options.out))
    missed = [gate for gate in gates(figures) if not gate.met]
    for gate in missed:
        print(f"missed: {gate.text}", file=sys.stderr)
    return 1 if any(gate.hard for gate in missed) else 0


if __name__ == "__main__":
    sys.exit(main())
