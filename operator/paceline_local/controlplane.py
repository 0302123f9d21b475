"""The two control planes that a stack can have: our embedded API server, or real binaries (the envtest convention).

`KUBEBUILDER_ASSETS` names a folder with `kube-apiserver`, perhaps `etcd` (else it is looked for on PATH) and perhaps
`kube-controller-manager` (else our own controllers and garbage collector do its work, as envtest archives lack it).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline_local.addresses import Network
from paceline_local.children import ChildSpec
from paceline_local.client import ApiClient
from paceline_local.errors import LocalError
from paceline_local.pki import write_pki
from paceline_local.state import StateDir

__all__ = ["ASSETS", "ControlPlane", "answers", "control_plane", "free_port"]

ASSETS = "KUBEBUILDER_ASSETS"
_API_PORT, _ETCD_PORT, _PEER_PORT, _MANAGER_PORT = 6443, 2379, 2380, 10257
_ACCEPTS_S = 1.0


@dataclass(frozen=True)
class ControlPlane:
    """The processes of a control plane in their order of start, and the roles that are left to our own agent."""

    kind: str
    children: tuple[ChildSpec, ...]
    roles: tuple[str, ...]


def free_port(host: str, preferred: int, taken: set[int]) -> int:
    """Return a port that can be bound on `host` now: the preferred one, or one that the system picks."""
    for port in (preferred, 0, 0, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
        if found not in taken:
            taken.add(found)
            return found
    raise LocalError(f"no port is free on {host}")


def answers(kubeconfig: Path) -> Callable[[], Awaitable[bool]]:
    """Return a check that the API server of a kubeconfig is ready."""

    async def ready() -> bool:
        try:
            async with ApiClient.from_kubeconfig(kubeconfig) as client:
                await client.request("GET", "/readyz")
        except LocalError:  # no kubeconfig yet, no answer, or not ready
            return False
        return True

    return ready


def _accepts(host: str, port: int) -> Callable[[], Awaitable[bool]]:
    async def ready() -> bool:
        try:
            async with asyncio.timeout(_ACCEPTS_S):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    return ready


def control_plane(state: StateDir, network: Network, environment: Mapping[str, str]) -> ControlPlane:
    """Return the control plane that the environment asks for; makes its certificates. Raises `LocalError`."""
    assets = environment.get(ASSETS)
    return _real(state, network, Path(assets), environment) if assets else _embedded(state, network)


def _embedded(state: StateDir, network: Network) -> ControlPlane:
    host = network.node
    port = free_port(host, _API_PORT, set())
    kubeconfig = state.api / "kubeconfig"
    state.kubeconfig.unlink(missing_ok=True)
    state.kubeconfig.symlink_to(kubeconfig.relative_to(state.home))
    module = (sys.executable, "-m", "paceline_local.apiserver")
    command = (*module, "--state", os.fspath(state.api), "--host", host, "--port", str(port))
    return ControlPlane("embedded", (ChildSpec("apiserver", command, answers(kubeconfig)),), ("controllers", "node"))


def _program(assets: Path, name: str, environment: Mapping[str, str]) -> str | None:
    return shutil.which(name, path=os.fspath(assets)) or shutil.which(name, path=environment.get("PATH"))


def _needed(assets: Path, name: str, environment: Mapping[str, str]) -> str:
    program = _program(assets, name, environment)
    if program is None:
        raise LocalError(f"{name} is neither in {ASSETS}={assets} nor on PATH: unset it for the embedded API server")
    return program


def _real(state: StateDir, network: Network, assets: Path, environment: Mapping[str, str]) -> ControlPlane:
    etcd, server = (_needed(assets, name, environment) for name in ("etcd", "kube-apiserver"))
    host, taken = network.node, set[int]()
    ports = [free_port(host, port, taken) for port in (_API_PORT, _ETCD_PORT, _PEER_PORT, _MANAGER_PORT)]
    pki = state.api / "pki"
    write_pki(pki, host, _first_service(network), f"https://{host}:{ports[0]}", state.kubeconfig)
    children = [_etcd(state, etcd, host, ports[1], ports[2]), _server(state, network, server, ports[0], ports[1])]
    manager = shutil.which("kube-controller-manager", path=os.fspath(assets))
    if manager is None:
        return ControlPlane("real", tuple(children), ("controllers", "garbage", "node"))
    children.append(_manager(state, manager, host, ports[3]))
    return ControlPlane("real", tuple(children), ("node",))


def _first_service(network: Network) -> str:
    return str(network.services[1])  # the API server takes it for the Service "kubernetes"


def _etcd(state: StateDir, program: str, host: str, port: int, peer: int) -> ChildSpec:
    client_url, peer_url = f"http://{host}:{port}", f"http://{host}:{peer}"
    flags = {
        "name": "local",
        "data-dir": os.fspath(state.api / "etcd"),
        "listen-client-urls": client_url,
        "advertise-client-urls": client_url,
        "listen-peer-urls": peer_url,
        "initial-advertise-peer-urls": peer_url,
        "initial-cluster": f"local={peer_url}",
        "log-level": "warn",
        "logger": "zap",
    }
    return ChildSpec("etcd", (program, *_flags(flags)), _accepts(host, port))


def _server(state: StateDir, network: Network, program: str, port: int, etcd_port: int) -> ChildSpec:
    pki, host = state.api / "pki", network.node
    flags = {
        "etcd-servers": f"http://{host}:{etcd_port}",
        "bind-address": host,
        "secure-port": str(port),
        "client-ca-file": os.fspath(pki / "ca.crt"),
        "tls-cert-file": os.fspath(pki / "server.crt"),
        "tls-private-key-file": os.fspath(pki / "server.key"),
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-signing-key-file": os.fspath(pki / "sa.key"),
        "service-account-key-file": os.fspath(pki / "sa.pub"),
        # Services get loopback addresses from the server itself, so that clusterIP is where they answer
        "service-cluster-ip-range": str(network.services),
        "authorization-mode": "RBAC",
        # pods here have no identity of their own, and without a controller manager no service account ever exists
        "disable-admission-plugins": "ServiceAccount",
        # 127/8 isn't allowed in Endpoints, not even for the server's own
        "endpoint-reconciler-type": "none",
        "cert-dir": os.fspath(pki),
    }
    return ChildSpec("apiserver", (program, *_flags(flags)), answers(state.kubeconfig), grace=20.0)


def _manager(state: StateDir, program: str, host: str, port: int) -> ChildSpec:
    pki, kubeconfig = state.api / "pki", os.fspath(state.kubeconfig)
    flags = {
        "kubeconfig": kubeconfig,
        "authentication-kubeconfig": kubeconfig,
        "authorization-kubeconfig": kubeconfig,
        "bind-address": host,
        "secure-port": str(port),
        "leader-elect": "false",
        "service-account-private-key-file": os.fspath(pki / "sa.key"),
        "root-ca-file": os.fspath(pki / "ca.crt"),
        # a real API server refuses 127/8 in Endpoints; the node agent balances by selector instead
        "controllers": "*,-endpoint,-endpointslice,-endpointslicemirroring",
    }
    return ChildSpec("controller-manager", (program, *_flags(flags)), _accepts(host, port))


def _flags(flags: Mapping[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]
