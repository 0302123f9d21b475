"""What kopf calls: watch events of services and of their children, each handed on in a line or two.

Only event handlers, on purpose: they need no finalizer and write nothing to the objects, so deletion never waits for the
operator and a steady service is never patched. Ordering, retries and progress are the controller's.
"""

from __future__ import annotations

import logging
from typing import Any

import aiohttp
import kopf
from kopf._cogs.clients import scanning  # kopf has no public way to look for resources again without watching CRDs
from kopf._cogs.clients.errors import APIError, APISessionClosed
from kopf._cogs.structs.references import Insights
from kopf._core.reactor.observation import revise_resources
from kubernetes import client

from paceline_operator.api_kinds import WATCHED
from paceline_operator.cluster import load_configuration
from paceline_operator.controller import Controller
from paceline_operator.errors import ApiUnavailable
from paceline_operator.names import CLASS_KIND, CLASS_PLURAL, GROUP, KIND, PLURAL, SERVICE_LABEL, VERSION

__all__ = ["make_registry", "make_settings", "watch_new_kinds"]

logger = logging.getLogger(__name__)

# seconds between attempts: about a minute for a server that answers with errors; a connection that is refused is tried for
# ever by the watches themselves
_BACKOFFS = (0.2, 0.5, 1.0, *[2.0] * 30)

# seconds: kopf keeps a task and the last event of each object for so long (5 by default); ours have nothing to wait for, and
# at the start there is an event of every object
_IDLE = 0.1
_CHUNK = 100  # objects of a list at once; all kinds are listed at the same time
_WORKERS = 100  # such tasks per kind; any number by default


def make_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: label selectors on the server's side, patience, no peering, no events of its own.

    Nor does it watch CRDs and namespaces, which would need rights on the whole cluster: the controller waits for our CRD
    before kopf looks for it, and namespaces are named in full or all are served.
    """
    settings = kopf.OperatorSettings()
    settings.networking.error_backoffs = _BACKOFFS
    settings.networking.connect_timeout = 5.0
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.process.ultimate_exiting_timeout = 15.0
    settings.watching.chunk_size = _CHUNK
    settings.queueing.idle_timeout, settings.queueing.worker_limit = _IDLE, _WORKERS
    for group, plural in WATCHED:
        settings.watching.label_selectors[group, plural] = SERVICE_LABEL
    return settings


def make_registry(controller: Controller, *, classes: bool) -> kopf.OperatorRegistry:
    """Return the handlers, bound to `controller`; `classes` says whether InferenceClasses are watched too."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry, id="login")
    def login(**_: Any) -> kopf.ConnectionInfo:
        return _connection(load_configuration())

    @kopf.on.startup(registry=registry, id="startup")
    async def startup(**_: Any) -> None:
        await controller.start()

    @kopf.on.cleanup(registry=registry, id="cleanup")
    async def cleanup(**_: Any) -> None:
        await controller.stop()

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def service_event(event: Any, **_: Any) -> None:
        controller.observe(KIND, event)

    if classes:

        @kopf.on.event(GROUP, VERSION, CLASS_PLURAL, registry=registry)
        async def class_event(event: Any, **_: Any) -> None:
            controller.observe(CLASS_KIND, event)

    for (group, plural), kind in WATCHED.items():

        @kopf.on.event(group, plural, registry=registry, param=kind, id=f"{plural}-event")
        async def child_event(event: Any, param: Any = None, **_: Any) -> None:
            controller.observe(param, event)

    return registry


async def watch_new_kinds(registry: kopf.OperatorRegistry, settings: kopf.OperatorSettings, insights: Insights) -> None:
    """Make kopf watch what the API server serves now; what it watches already goes on. Raises `ApiUnavailable`."""
    groups = {group for group, _ in WATCHED} | {GROUP}
    try:
        found = await scanning.scan_resources(settings=settings, groups=groups, logger=logger)
    except (APIError, APISessionClosed, aiohttp.ClientError, TimeoutError) as error:
        raise ApiUnavailable(f"what the API server serves can't be listed for the watches: {error}") from error
    async with insights.revised:
        revise_resources(group=None, insights=insights, registry=registry, resources=found)
        insights.revised.notify_all()


def _connection(configuration: client.Configuration) -> kopf.ConnectionInfo:
    """Return the official client's credentials in kopf's form, so that both talk to the same server as the same user."""
    scheme, _, token = (configuration.get_api_key_with_prefix("BearerToken") or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
