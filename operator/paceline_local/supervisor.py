"""The one process that keeps a local stack running: control plane, agents, operator. `python -m paceline_local.supervisor`.

It holds the lock of the state folder while it lives. SIGTERM stops everything in order: operator, pods with their grace,
agents, control plane. Whatever a supervisor that was killed left running is ended by the next `up` or `down`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

import aiohttp
import click

from paceline_core.main import run_command
from paceline_local.addresses import claim_network
from paceline_local.children import Child, ChildSpec
from paceline_local.client import ApiClient
from paceline_local.controlplane import ControlPlane, control_plane, free_port
from paceline_local.errors import ApiError, ApiUnavailable, LocalError
from paceline_local.leftovers import lock_stack, remove_leftovers
from paceline_local.manifests import condition, is_ready
from paceline_local.node_object import NODE_NAME
from paceline_local.resources import CRDS, NODES, Resource
from paceline_local.state import MARKER, StateDir, read_json, state_dir, write_json
from paceline_operator.crd import crds

__all__ = ["Supervisor", "main"]

log = logging.getLogger(__name__)
_POLL_S = 0.2
_LOG_CHECK_S = 10.0
_METRICS_PORT = 9090
_LOCK_PATIENCE_S = 1.0
_AGENT_GRACE_S = 25.0  # more than the node agent gives its pods
# settings of ours that must not come from the shell that ran `up`: they would mean another cluster
_DROPPED = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")


class Supervisor:
    """Starts the stack of one state folder and keeps it running until `stop`."""

    def __init__(self, state: StateDir, environment: Mapping[str, str], *, with_operator: bool = True) -> None:
        self._state, self._with_operator = state, with_operator
        self._environment = {k: v for k, v in environment.items() if k not in _DROPPED} | {
            MARKER: os.fspath(state.home),
            "PYTHONSAFEPATH": "1",  # python -m must not import what lies in the current folder
            "PYTHONUNBUFFERED": "1",
        }
        self._children: list[Child] = []
        self._phase, self._error = "starting", ""
        self._kind = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Start everything, keep it running until `stop` is set, then stop everything in order."""
        claim = claim_network(self._state.home, (read_json(self._state.network) or {}).get("octet"))
        write_json(self._state.network, {"octet": claim.network.octet})
        plane = control_plane(self._state, claim.network, self._environment)
        self._kind = plane.kind
        start = asyncio.create_task(self._start(plane, claim.network.node))
        stopped = asyncio.create_task(stop.wait())
        trimming = asyncio.create_task(self._bound_logs())
        try:
            await asyncio.wait([start, stopped], return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                start.result()
                await stopped
        finally:
            for task in (start, stopped, trimming):
                task.cancel()
            await asyncio.gather(start, stopped, trimming, return_exceptions=True)
            await self._stop()
            claim.guard.close()

    async def _start(self, plane: ControlPlane, host: str) -> None:
        for spec in plane.children:
            await self._begin(spec).ready.wait()
        self._say("installing the CRD")
        await self._install_crd()
        home, python = os.fspath(self._state.home), (sys.executable, "-m", "paceline_local.agent", "--home")
        agents = [
            self._begin(ChildSpec("services", (*python, home, "services"), self._is_node_ready)),
            self._begin(ChildSpec("node", (*python, home, *plane.roles), self._is_node_ready, grace=_AGENT_GRACE_S)),
        ]
        if self._with_operator:
            agents.append(self._begin(self._operator(host)))
        for child in agents:
            await child.ready.wait()
        self._say("up")

    def _begin(self, spec: ChildSpec) -> Child:
        child = Child(spec, self._environment, self._state.log(spec.name), self._write_status)
        self._children.append(child)
        self._say(f"starting {spec.name}")
        child.begin()
        return child

    async def _stop(self) -> None:
        self._say("stopping")
        for child in reversed(self._children):  # operator, node agent with its pods, Services, control plane
            await child.stop()
        self._say("stopped")

    def _operator(self, host: str) -> ChildSpec:
        key = self._state.home / "operator.key"
        if not key.exists():
            descriptor = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
        port = free_port(host, _METRICS_PORT, set())
        env = {
            "KUBECONFIG": os.fspath(self._state.kubeconfig),
            "PACELINE_RUNTIME_IMAGE": "localhost/paceline-runtime:local",  # never pulled: processes have no image
            "PACELINE_OPERATOR_KEY_FILE": os.fspath(key),
            # on one's own machine a manifest may do what its author could do by hand
            "PACELINE_ALLOWED_MODEL_SCHEMES": "file,hf,pkg,pvc",
            "PACELINE_ALLOWED_IMAGES": "*",
            "PACELINE_ALLOW_TEMPLATE": "any",
            "PACELINE_METRICS_HOST": host,
            "PACELINE_METRICS_PORT": str(port),
        }
        command = (sys.executable, "-m", "paceline_operator")
        return ChildSpec("operator", command, _serves(f"http://{host}:{port}/metrics"), env)

    # what the children's work shows

    async def _install_crd(self) -> None:
        while True:
            try:
                async with ApiClient.from_kubeconfig(self._state.kubeconfig) as client:
                    if await _crds_served(client):
                        return
            except ApiUnavailable as error:
                self._say(f"installing the CRD: {error}")
            except ApiError as error:
                if error.status in {400, 422}:
                    raise LocalError(f"the API server refuses the CRD: {error}") from error
                self._say(f"installing the CRD: {error}")
            await asyncio.sleep(_POLL_S)

    async def _is_node_ready(self) -> bool:
        try:
            async with ApiClient.from_kubeconfig(self._state.kubeconfig) as client:
                return is_ready(await client.get(NODES, NODE_NAME))
        except (ApiError, ApiUnavailable):
            return False

    async def _bound_logs(self) -> None:
        while True:
            await asyncio.sleep(_LOG_CHECK_S)
            for child in self._children:
                child.trim_log()

    # what we say

    def fail(self, error: str) -> None:
        """Note why the stack can't run."""
        self._error = error
        self._say("failed")

    def _say(self, phase: str) -> None:
        if phase != self._phase:
            log.info("%s", phase)
        self._phase = phase
        self._write_status()

    def _write_status(self) -> None:
        children = {child.spec.name: asdict(child.status) for child in self._children}
        document = {
            "pid": os.getpid(),
            "phase": self._phase,
            "error": self._error,
            "controlPlane": self._kind,
            "children": children,
        }
        write_json(self._state.status, document)


async def _crds_served(client: ApiClient) -> bool:
    """Create or update our CRDs; return whether the server has established and serves them."""
    return all([await _crd_served(client, manifest) for manifest in crds()])


async def _crd_served(client: ApiClient, manifest: dict[str, Any]) -> bool:
    """Create or update a CRD; return whether the server has established and serves it.

    Not by server-side apply: servers before 1.23 refuse the schema's validation rules there, and drop them here.
    """
    try:
        await client.create(CRDS, manifest)
    except ApiError as error:
        if error.reason != "AlreadyExists":
            raise
        await client.patch(CRDS, manifest["metadata"]["name"], {"spec": manifest["spec"]})
    established = condition(await client.get(CRDS, manifest["metadata"]["name"]), "Established")
    if established is None or established["status"] != "True":
        return False
    spec = manifest["spec"]
    # raises while it is established but not served yet
    plural, kind, namespaced = spec["names"]["plural"], spec["names"]["kind"], spec["scope"] == "Namespaced"
    await client.list(Resource(spec["group"], spec["versions"][0]["name"], plural, kind, namespaced))
    return True


def _serves(url: str) -> Callable[[], Awaitable[bool]]:
    """Return a check that a URL answers."""

    async def ready() -> bool:
        try:
            async with aiohttp.ClientSession(trust_env=False) as session, session.get(url) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    return ready


async def _supervise(state: StateDir, *, with_operator: bool) -> None:
    stop = asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sign, stop.set)
    supervisor = Supervisor(state, os.environ, with_operator=with_operator)
    try:
        await supervisor.run(stop)
    except LocalError as error:
        supervisor.fail(str(error))
        raise


def _run(state: StateDir, *, with_operator: bool, lock: int | None) -> None:
    state.create()
    with lock_stack(state, patience=_LOCK_PATIENCE_S, held=lock):
        remove_leftovers(state)
        asyncio.run(_supervise(state, with_operator=with_operator))


@click.command()
@click.option("--home", required=True, help="State folder of the stack.")
@click.option("--operator/--no-operator", default=True, help="Run the operator, too.")
@click.option("--lock", type=int, help="Descriptor of the stack's lock, if whoever starts this has taken it.")
def _command(home: str, operator: bool, lock: int | None) -> None:
    """Keep a local stack running. `paceline local up` starts this; nobody else has to."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    _run(state_dir(home), with_operator=operator, lock=lock)


def main() -> None:
    """Run the command line; errors end as one line on stderr and exit code 2."""
    sys.exit(run_command(lambda: _command.main(standalone_mode=False), errors=(click.ClickException, OSError)))


if __name__ == "__main__":
    main()
