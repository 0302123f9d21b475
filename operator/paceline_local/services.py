"""Services on this machine: each gets a loopback address, and each of its ports a balancer over the ready pods."""

from __future__ import annotations

import asyncio
import logging
from ipaddress import IPv4Address

from paceline_local.addresses import AddressBook, Network
from paceline_local.balancer import Balancer
from paceline_local.client import ApiClient
from paceline_local.endpoints import backends_of, service_ports
from paceline_local.errors import ApiError, ApiUnavailable
from paceline_local.events import EventRecorder
from paceline_local.manifests import Manifest, key_of
from paceline_local.mirror import Mirror
from paceline_local.resources import PODS, SERVICES
from paceline_local.state import StateDir
from paceline_local.waiting import set_within

__all__ = ["LOCAL_ADDRESS", "Services", "local_address"]

log = logging.getLogger(__name__)
LOCAL_ADDRESS = "paceline.io/local-address"  # annotation of a Service: where it answers on this machine
_RETRY_S = 2.0


def local_address(service: Manifest) -> str | None:
    """Return where the Service answers on this machine: its annotation, or a clusterIP that is a loopback address."""
    annotated = (service["metadata"].get("annotations") or {}).get(LOCAL_ADDRESS)
    cluster_ip = service["spec"].get("clusterIP") or ""
    if annotated:
        return str(annotated)
    return str(cluster_ip) if cluster_ip.startswith("127.") else None


class Services:
    """Gives Services their addresses and balances their ports."""

    def __init__(self, client: ApiClient, state: StateDir, network: Network) -> None:
        self._client, self._network = client, network
        self._events = EventRecorder(client, "paceline-services")
        # the first addresses stay free for what an API server takes by itself ("kubernetes" has the first)
        self._addresses = AddressBook(state.home / "services.json", network.services)
        self._balancers: dict[tuple[str, str, int], Balancer] = {}  # (Service's uid, address, port)
        self._changed = asyncio.Event()
        self._services = Mirror(client, SERVICES, self._note)
        self._pods = Mirror(client, PODS, self._note)
        self._refused: set[tuple[str, str, int]] = set()

    def _note(self, _kind: str, _obj: Manifest) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._services.run())
            group.create_task(self._pods.run())
            group.create_task(self._loop())

    async def _loop(self) -> None:
        await self._services.synced.wait()
        await self._pods.synced.wait()
        self._addresses.retain({service["metadata"]["uid"] for service in self._services.items.values()})
        while True:
            again = await self._sync()
            await set_within(self._changed, _RETRY_S if again else None)
            self._changed.clear()

    async def _sync(self) -> bool:
        """Bring addresses and balancers in line with the Services and pods; return whether something has to be retried."""
        again = False
        wanted: set[tuple[str, str, int]] = set()
        for service in list(self._services.items.values()):
            try:
                again |= await self._serve(service, wanted)
            except Exception:  # a Service that no server checked must not take the others' addresses away
                log.exception("%s can't be served", key_of(service))
        for key in set(self._balancers) - wanted:
            self._balancers.pop(key).close()
        self._refused &= wanted
        self._release()
        return again

    async def _serve(self, service: Manifest, wanted: set[tuple[str, str, int]]) -> bool:
        """Do one Service's part of `_sync`; add what it listens on to `wanted`."""
        if not service_ports(service):
            return False
        again = False
        try:
            address: str | None = await self._address(service)
        except (ApiError, ApiUnavailable) as error:
            log.warning("%s has no address yet: %s", key_of(service), error)
            again = True
            address = local_address(service)
        return again if address is None else await self._balance(service, address, wanted) or again

    def _release(self) -> None:
        self._addresses.retain({service["metadata"]["uid"] for service in self._services.items.values()})

    async def _address(self, service: Manifest) -> str:
        """Return the Service's address, after writing it down where clients look for it."""
        meta, cluster_ip = service["metadata"], service["spec"].get("clusterIP") or ""
        native = bool(cluster_ip) and IPv4Address(cluster_ip) in self._network.services
        address = cluster_ip if native else self._addresses.allocate(meta["uid"])
        if (meta.get("annotations") or {}).get(LOCAL_ADDRESS) == address and cluster_ip:
            return str(address)
        body: Manifest = {"metadata": {"annotations": {LOCAL_ADDRESS: address}}}
        if not cluster_ip:  # a real API server has always set one, and allows no other
            body["spec"] = {"clusterIP": address}
        await self._client.patch(SERVICES, meta["name"], body, meta["namespace"])
        return str(address)

    async def _balance(self, service: Manifest, address: str, wanted: set[tuple[str, str, int]]) -> bool:
        again = False
        for port in service_ports(service):
            key = (service["metadata"]["uid"], address, int(port["port"]))
            wanted.add(key)
            balancer = self._balancers.setdefault(key, Balancer(address, key[2]))
            try:
                await balancer.set_backends(backends_of(service, port, self._pods.items.values()))
                self._refused.discard(key)
            except OSError as error:
                again = True
                await self._report(service, key, error)
        return again

    async def _report(self, service: Manifest, key: tuple[str, str, int], error: OSError) -> None:
        if key not in self._refused:
            self._refused.add(key)
            message = f"can't listen on {key[1]}:{key[2]}: {error.strerror or error}"
            log.warning("%s: %s", key_of(service), message)
            await self._events.emit(service, "Warning", "ListenFailed", message)
