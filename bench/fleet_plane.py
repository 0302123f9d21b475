"""A real etcd and kube-apiserver of one's own, without controllers: whoever starts it plays those itself."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from paceline_local.kubeconfig import load_connection
from paceline_local.pki import write_pki

ROOT = Path(__file__).parents[1]
HOST = "127.0.0.1"
APPLY, MERGE, JSON = "application/apply-patch+yaml", "application/merge-patch+json", "application/json"
_START_S = 240.0  # of the programs and of the CRDs, on a machine that has much else to do


class RealPlane:
    """Starts both programs of `assets` in `folder` (etcd also from PATH); use it as a context."""

    def __init__(self, folder: Path, assets: Path, **flags: str) -> None:
        self.folder, self.kubeconfig = folder, folder / "kubeconfig"
        self._assets, self._flags, self._children = assets, flags, list[subprocess.Popen[bytes]]()

    def __enter__(self) -> RealPlane:
        etcd, peer, port = free_ports(3)
        pki = self.folder / "pki"
        write_pki(pki, HOST, "10.0.0.1", f"https://{HOST}:{port}", self.kubeconfig)
        client, peers = f"http://{HOST}:{etcd}", f"http://{HOST}:{peer}"
        self._start(
            "etcd",
            {
                "name": "bench", "data-dir": self.folder / "etcd", "listen-client-urls": client, "logger": "zap",
                "advertise-client-urls": client, "listen-peer-urls": peers, "initial-advertise-peer-urls": peers,
                "initial-cluster": f"bench={peers}", "log-level": "warn",
            },
        )  # fmt: skip
        flags = {
            "etcd-servers": client, "bind-address": HOST, "secure-port": port, "client-ca-file": pki / "ca.crt",
            "tls-cert-file": pki / "server.crt", "tls-private-key-file": pki / "server.key",
            "service-account-issuer": "https://kubernetes.default.svc", "service-account-key-file": pki / "sa.key",
            "service-account-signing-key-file": pki / "sa.key", "service-cluster-ip-range": "10.0.0.0/16",
            "authorization-mode": "RBAC", "disable-admission-plugins": "ServiceAccount", "cert-dir": pki,
            "endpoint-reconciler-type": "none",
        }  # fmt: skip
        self._start("kube-apiserver", flags | {name.replace("_", "-"): value for name, value in self._flags.items()})
        self._await_ready()
        return self

    def __exit__(self, *exc: object) -> None:
        for child in reversed(self._children):
            child.terminate()
        for child in reversed(self._children):
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    @property
    def processes(self) -> list[psutil.Process]:
        """The running programs, etcd first."""
        return [psutil.Process(child.pid) for child in self._children]

    def _start(self, name: str, flags: Mapping[str, object]) -> None:
        program = shutil.which(name, path=os.fspath(self._assets)) or shutil.which(name)
        if program is None:
            raise SystemExit(f"{name} is neither in KUBEBUILDER_ASSETS={self._assets} nor on PATH")
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [program, *(f"--{flag}={value}" for flag, value in flags.items())]
            self._children.append(subprocess.Popen(command, stdout=log, stderr=log))

    def _await_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if any(child.poll() is not None for child in self._children):
                break
            try:
                with Client(self.kubeconfig) as client:
                    client.call("GET", "/readyz")
                return
            except (httpx.HTTPError, ApiError):
                time.sleep(0.2)
        raise SystemExit(f"the API server didn't start, see {self.folder}/kube-apiserver.log")

    def install_crds(self) -> None:
        """Make our kinds known and wait until they are served."""
        with Client(self.kubeconfig) as client:
            for path in sorted((ROOT / "crds").glob("*.yaml")):
                crd = yaml.safe_load(path.read_text())
                client.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
                kind = f"/apis/{crd['spec']['group']}/{crd['spec']['versions'][0]['name']}/{crd['spec']['names']['plural']}"
                self._await_served(client, kind)

    def _await_served(self, client: Client, path: str) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                client.call("GET", path)
                return
            except ApiError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


class ApiError(Exception):
    """The API server refused a call."""


class Client:
    """A plain client of one API server, with as many connections as are asked for at once."""

    def __init__(self, kubeconfig: Path, connections: int = 8) -> None:
        connection = load_connection(kubeconfig)
        self.server, self.tls = connection.server, connection.tls or ssl.create_default_context()
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self.http = httpx.Client(
            base_url=self.server, headers=connection.headers, verify=self.tls, trust_env=False, timeout=60, limits=limits
        )
        self._threads = ThreadPoolExecutor(connections)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.http.close()

    def call(self, verb: str, path: str, body: Any = None, content: str = JSON) -> Any:
        """Return the answer's JSON, or its text. Raises `ApiError`."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        answer = self.http.request(verb, path, content=data, headers={"Content-Type": content})
        if answer.status_code >= 300:
            raise ApiError(f"{verb} {path}: {answer.status_code} {answer.text[:300]}")
        return answer.json() if answer.text.startswith("{") else answer.text

    def many(self, calls: list[tuple[str, str, Any, str]]) -> None:
        """Make all calls, as many at once as there are connections."""
        for _ in self._threads.map(lambda call: self.call(*call), calls):
            pass


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def assets() -> Path:
    """Return the folder of the programs. Ends the run with one line if there is none."""
    found = os.environ.get("KUBEBUILDER_ASSETS")
    if not found:
        raise SystemExit("set KUBEBUILDER_ASSETS to a folder with kube-apiserver and etcd")
    return Path(found)
