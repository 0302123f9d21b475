"""Loopback addresses: a /16 of 127.0.0.0/8 per stack, the lower half for pods, the upper half for Services (Linux only).

Linux answers on every address of 127.0.0.0/8 without setting one up, so each pod can have port 8000 to itself.
"""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from paceline_local.errors import LocalError
from paceline_local.state import read_json, write_json

__all__ = ["AddressBook", "Network", "NetworkClaim", "claim_network"]

_FIRST_OCTET, _LAST_OCTET = 64, 250  # leaves 127.0.x.x (and resolvers on 127.0.0.53) alone


@dataclass(frozen=True, slots=True)
class Network:
    """One stack's part of loopback: 127.`octet`.0.0/16."""

    octet: int

    @property
    def pods(self) -> IPv4Network:
        """Addresses of pods."""
        return IPv4Network(f"127.{self.octet}.0.0/17")

    @property
    def services(self) -> IPv4Network:
        """Addresses of Services."""
        return IPv4Network(f"127.{self.octet}.128.0/17")

    @property
    def node(self) -> str:
        """The node's own address."""
        return f"127.{self.octet}.0.1"


@dataclass(frozen=True)
class NetworkClaim:
    """A network that no other live stack of this machine has; it is given back when the process ends."""

    network: Network
    guard: socket.socket


def claim_network(home: Path, preferred: int | None) -> NetworkClaim:
    """Claim a network for the stack at `home`, the `preferred` octet (its last one) if it is free.

    The claim is an abstract Unix socket: the kernel keeps it unique, and drops it however its owner ends.
    """
    count = _LAST_OCTET - _FIRST_OCTET + 1
    start = int.from_bytes(hashlib.sha256(str(home).encode()).digest()[:4], "big") % count
    octets = [_FIRST_OCTET + (start + step) % count for step in range(count)]
    for octet in [*([preferred] if preferred is not None else []), *octets]:
        guard = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            guard.bind(f"\0paceline-local-127.{octet}")
        except OSError:
            guard.close()
            continue
        return NetworkClaim(Network(octet), guard)
    raise LocalError(f"all {count} loopback networks are taken: run 'paceline local down' for stacks that you don't need")


class AddressBook:
    """Who has which address of a network; written to a file, so that a restart changes nobody's address."""

    def __init__(self, path: Path, network: IPv4Network, *, reserved: int = 16) -> None:
        self._path, self._network, self._reserved = path, network, reserved
        stored = read_json(path) or {}
        self._taken: dict[str, str] = {owner: a for owner, a in stored.get("taken", {}).items() if IPv4Address(a) in network}
        self._next = int(stored.get("next", 0))

    def allocate(self, owner: str) -> str:
        """Return the owner's address, a new one if it has none. Addresses go round, so that none is reused at once."""
        if owner in self._taken:
            return self._taken[owner]
        usable = self._network.num_addresses - self._reserved - 1
        in_use = set(self._taken.values())
        for step in range(usable):
            index = (self._next + step) % usable
            address = str(self._network[self._reserved + index])
            if address not in in_use:
                self._next = index + 1
                self._taken[owner] = address
                self._save()
                return address
        raise LocalError(f"no address is free in {self._network}")

    def release(self, owner: str) -> None:
        """Give the owner's address back."""
        if self._taken.pop(owner, None) is not None:
            self._save()

    def retain(self, owners: set[str]) -> None:
        """Release the addresses of everyone else: those who went while nobody watched."""
        for owner in set(self._taken) - owners:
            self.release(owner)

    def _save(self) -> None:
        write_json(self._path, {"taken": self._taken, "next": self._next})
