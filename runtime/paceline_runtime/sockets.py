"""Listening sockets, bound before anything heavy starts, so that a taken port is one clear line within a second."""

from __future__ import annotations

import errno
import socket

from paceline_runtime.settings import SettingsError

__all__ = ["listen"]

BACKLOG = 2048
# What a client may leave unread in the kernel; else it grows to 4 MB for each that doesn't read. Connections inherit it.
SEND_BUFFER = 256 << 10


def listen(host: str, port: int, flag: str) -> socket.socket:
    """Return a socket that listens on `host:port` (0: any free port). Raises `SettingsError` that names `flag`."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise SettingsError(f"--host {host!r} isn't an address of this machine: {error}") from None
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SettingsError(_explain(error, host, port, flag)) from None
    listener.setblocking(False)
    return listener


def _explain(error: OSError, host: str, port: int, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken by another process: stop it, or choose another port with {flag}"
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has: choose a port above 1023 with {flag}"
    return f"can't listen on {host}:{port} ({flag}): {error.strerror or error}"
