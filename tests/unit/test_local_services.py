"""Services on loopback: which backends, in which order, and that bytes arrive whatever the backends do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from ipaddress import IPv4Network

import pytest

from paceline_local.addresses import AddressBook, Network, claim_network
from paceline_local.balancer import Balancer
from paceline_local.endpoints import Backend, backends_of, order, service_ports
from paceline_local.errors import LocalError
from paceline_local.processes import Process, end, identify, kill_all, marked, start

HOST = "127.99.7.1"


def pod(name, ip="127.64.0.16", ready=True, **meta):
    status = {"podIP": ip, "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]}
    ports = [{"name": "http", "containerPort": 8000}]
    spec = {"containers": [{"name": "c", "ports": ports}]}
    return {
        "metadata": {"name": name, "namespace": "default", "labels": {"app": "web"}} | meta,
        "spec": spec,
        "status": status,
    }


def service(**spec):
    return {"metadata": {"name": "web", "namespace": "default"}, "spec": {"selector": {"app": "web"}} | spec}


@pytest.mark.parametrize(
    ("other", "counts"),
    [
        (pod("b", "127.64.0.17"), True),
        (pod("b", "127.64.0.17", ready=False), False),
        (pod("b", "127.64.0.17", deletionTimestamp="2026-01-01T00:00:00Z"), False),
        (pod("b", "127.64.0.17", labels={"app": "other"}), False),
        (pod("b", "127.64.0.17", namespace="elsewhere"), False),
        (pod("b", None), False),
    ],
)
def test_only_ready_pods_of_the_selector_get_connections(other, counts):
    found = backends_of(service(), {"port": 80, "targetPort": "http"}, [pod("a"), other])
    expected = [Backend("127.64.0.16", 8000)] + ([Backend("127.64.0.17", 8000)] if counts else [])
    assert found == tuple(expected)


def test_target_ports_by_name_number_and_default():
    pods = [pod("a")]
    assert backends_of(service(), {"port": 80, "targetPort": 9000}, pods)[0].port == 9000
    assert backends_of(service(), {"port": 80}, pods)[0].port == 80
    assert backends_of(service(), {"port": 80, "targetPort": "metrics"}, pods) == ()


def test_publish_not_ready_addresses():
    assert backends_of(service(publishNotReadyAddresses=True), {"port": 80}, [pod("a", ready=False)])


@pytest.mark.parametrize("spec", [{"clusterIP": "None"}, {"selector": None}, {"type": "ExternalName"}])
def test_services_without_an_address_are_not_balanced(spec):
    assert service_ports(service(ports=[{"port": 80}], **spec)) == []


def test_least_connections_first_equals_in_rotation():
    a, b, c = (Backend("127.64.0.16", port) for port in (1, 2, 3))
    assert order((a, b, c), {a: 2, b: 1}, 0) == [c, b, a]
    assert [order((a, b, c), {}, turn)[0] for turn in range(4)] == [a, b, c, a]
    assert order((), {}, 5) == []


# the balancer with real sockets


class Echo:
    """A server that answers with its name and what it got, when the client has sent all."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.backend = Backend("127.0.0.1", self.server.sockets[0].getsockname()[1])
        return self

    async def _serve(self, reader, writer):
        data = await reader.read()  # until the client half-closes
        writer.write(self.name.encode() + b":" + data)
        await writer.drain()
        writer.close()

    async def __aexit__(self, *_):
        self.server.close()
        await self.server.wait_closed()


async def call(port: int, data: bytes = b"x") -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(data)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return answer


@pytest.fixture
def port():
    import socket

    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


async def test_connections_are_spread_and_a_dead_backend_costs_nothing(port):
    balancer = Balancer(HOST, port)
    async with Echo("a") as a, Echo("b") as b:
        dead = Backend("127.0.0.1", 1)
        await balancer.set_backends((a.backend, b.backend, dead))
        names = Counter([(await call(port)).split(b":")[0] for _ in range(20)])
        assert sum(names.values()) == 20 and set(names) == {b"a", b"b"} and min(names.values()) >= 5
        await balancer.set_backends((a.backend,))
        assert {await call(port) for _ in range(5)} == {b"a:x"}
        async with asyncio.timeout(10):  # the count goes down when a connection's last half has ended
            while balancer._open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    balancer.close()


async def test_large_transfers_arrive_whole_both_ways(port):
    balancer = Balancer(HOST, port)
    data = os.urandom(3_000_000)
    async with Echo("a") as a:
        await balancer.set_backends((a.backend,))
        assert await call(port, data) == b"a:" + data
    balancer.close()


async def test_open_connections_outlive_their_backends_removal(port):
    balancer = Balancer(HOST, port)
    async with Echo("a") as a:
        await balancer.set_backends((a.backend,))
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"he")
        await writer.drain()
        await balancer.set_backends(())
        writer.write(b"llo")
        writer.write_eof()
        assert await reader.read() == b"a:hello"
        writer.close()
        with pytest.raises(ConnectionRefusedError):  # no backend: the port is closed, as kube-proxy rejects
            await asyncio.open_connection(HOST, port)


async def test_all_backends_dead_resets_the_connection(port):
    balancer = Balancer(HOST, port)
    await balancer.set_backends((Backend("127.0.0.1", 1),))
    with pytest.raises(ConnectionResetError):
        assert await call(port) == b"an answer"
    balancer.close()


async def test_a_taken_port_is_an_error_to_report(port):
    first, second = Balancer(HOST, port), Balancer(HOST, port)
    await first.set_backends((Backend("127.0.0.1", 1),))
    with pytest.raises(OSError, match="ddress already in use"):
        await second.set_backends((Backend("127.0.0.1", 1),))
    first.close()


# addresses


def test_addresses_are_unique_kept_and_not_reused_at_once(tmp_path):
    path = tmp_path / "a.json"
    book = AddressBook(path, IPv4Network("127.64.0.0/27"), reserved=16)
    first = [book.allocate(f"p{i}") for i in range(10)]
    assert len(set(first)) == 10 and book.allocate("p3") == first[3]
    again = AddressBook(path, IPv4Network("127.64.0.0/27"), reserved=16)
    assert again.allocate("p9") == first[9]
    again.release("p0")
    assert again.allocate("new") != first[0], "the address that was freed last comes last"
    for i in range(5):
        again.allocate(f"q{i}")
    with pytest.raises(LocalError, match="no address is free"):
        again.allocate("one too many")


def test_a_stack_that_moves_to_another_network_takes_new_addresses(tmp_path):
    path = tmp_path / "a.json"
    AddressBook(path, Network(64).pods).allocate("p")
    assert AddressBook(path, Network(65).pods).allocate("p").startswith("127.65.")


def test_retain_frees_everybody_else(tmp_path):
    book = AddressBook(tmp_path / "a.json", IPv4Network("127.64.0.0/28"), reserved=13)
    book.allocate("a"), book.allocate("b")
    book.retain({"b"})
    assert book.allocate("c") != book.allocate("b")


def test_two_stacks_never_share_a_network(tmp_path):
    first = claim_network(tmp_path, None)
    second = claim_network(tmp_path, first.network.octet)
    assert first.network != second.network and not first.network.pods.overlaps(second.network.services)
    first.guard.close()
    third = claim_network(tmp_path / "x", first.network.octet)
    assert third.network == first.network
    for claim in (second, third):
        claim.guard.close()


# processes


async def until(done):
    """Wait for something that must come; pytest's own time limit ends a wait in vain."""
    while True:
        if done():
            return
        await asyncio.sleep(0.02)


async def test_exit_codes_logs_and_grace(tmp_path):
    log = tmp_path / "logs" / "0.log"
    env = dict(os.environ)
    assert await start(["sh", "-c", "echo out; echo err >&2; exit 3"], env, tmp_path, log).wait() == 3
    assert sorted(log.read_text().split()) == ["err", "out"]
    polite = start(["sleep", "60"], env, tmp_path, log)
    assert await end(polite, 30.0) == -signal.SIGTERM
    stubborn = start(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"], env, tmp_path, log)
    await until(lambda: "ready" in log.read_text())
    assert await end(stubborn, 0.2) == -signal.SIGKILL


async def test_an_adopted_process_is_waited_for_without_its_exit_code(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as popen:  # noqa: ASYNC220
        adopted = Process(identify(popen.pid))
        waiting = asyncio.create_task(adopted.wait())
        await asyncio.sleep(0)
        assert not waiting.done() and adopted.id.alive
        popen.stdin.close()
        assert await waiting is None
    assert not adopted.id.alive


async def test_processes_are_found_by_their_mark_even_outside_their_session(tmp_path):
    env = dict(os.environ) | {"PACELINE_TEST_MARK": str(tmp_path)}
    script = "setsid sleep 60 & sleep 60 & wait"
    process = start(["sh", "-c", script], env, tmp_path, tmp_path / "log")
    await until(lambda: len(marked("PACELINE_TEST_MARK", str(tmp_path))) == 3)
    found = [p for p, _ in marked("PACELINE_TEST_MARK", str(tmp_path))]
    kill_all(found, signal.SIGKILL)
    await process.wait()
    await until(lambda: not any(p.alive for p in found))
    assert marked("PACELINE_TEST_MARK", str(tmp_path)) == []
