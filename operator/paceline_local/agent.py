"""The processes behind a local stack: `python -m paceline_local.agent --home DIR ROLE…`, with the roles of `ROLES`.

SIGTERM ends them; the node role first stops its pods. After kill -9 the next one takes the running pods over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import aiohttp
import click

from paceline_core.main import run_command
from paceline_local.addresses import Network
from paceline_local.client import ApiClient
from paceline_local.controllers import Controllers
from paceline_local.errors import LocalError
from paceline_local.garbage import GarbageCollector
from paceline_local.node import NodeAgent
from paceline_local.services import Services
from paceline_local.state import StateDir, read_json, state_dir

__all__ = ["ROLES", "main"]

log = logging.getLogger(__name__)
ROLES = ("controllers", "garbage", "node", "services")


async def _work(state: StateDir, roles: tuple[str, ...]) -> None:
    """Run the roles until SIGTERM or SIGINT."""
    stored = read_json(state.network)
    if stored is None:
        raise LocalError(f"{state.network} is missing: 'paceline local up' writes it")
    network = Network(int(stored["octet"]))
    stop = asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sign, stop.set)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a probe must test that a pod accepts connections
    async with ApiClient.from_kubeconfig(state.kubeconfig) as client, aiohttp.ClientSession(connector=connector) as session:
        node = NodeAgent(client, state, network, session) if "node" in roles else None
        works: dict[str, Coroutine[Any, Any, None]] = {}
        if node is not None:
            works["node"] = node.run()
        if "controllers" in roles:
            works["controllers"] = Controllers(client).run()
        if "garbage" in roles:
            works["garbage"] = GarbageCollector(client).run()
        if "services" in roles:
            works["services"] = Services(client, state, network).run()
        await _until(stop, works)
        if node is not None and stop.is_set():
            await node.shut_down()


async def _until(stop: asyncio.Event, works: dict[str, Coroutine[Any, Any, None]]) -> None:
    """Run until told to stop; a role that ends by itself has failed, and so have we: the supervisor starts us again."""
    tasks = [asyncio.create_task(work, name=name) for name, work in works.items()]
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
    for task in (*tasks, stopped):
        task.cancel()
    await asyncio.gather(*tasks, stopped, return_exceptions=True)
    for task in done - {stopped}:
        with contextlib.suppress(asyncio.CancelledError):
            task.result()


@click.command()
@click.option("--home", required=True, help="State folder of the stack.")
@click.argument("roles", nargs=-1, required=True, type=click.Choice(ROLES))
def _command(home: str, roles: tuple[str, ...]) -> None:
    """Run parts of a local stack. `paceline local up` starts this; nobody else has to."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(_work(state_dir(home), roles))


def main() -> None:
    """Run the command line; errors end as one line on stderr and exit code 2."""
    sys.exit(run_command(lambda: _command.main(standalone_mode=False), errors=(click.ClickException,)))


if __name__ == "__main__":
    main()
