"""`paceline-operator`: runs the operator until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import kopf
from kopf._cogs.clients.errors import APIError, APISessionClosed  # kopf has no public names for what ends its watches
from kopf._cogs.clients.watching import WatchingError
from kopf._cogs.structs.references import Insights
from kopf._core.engines.peering import Identity

from paceline_core.main import run_command
from paceline_operator.admin_client import AdminClient
from paceline_operator.cluster import Cluster, load_configuration
from paceline_operator.controller import Controller
from paceline_operator.errors import LeaseError, SettingsError, WatchEnded
from paceline_operator.handlers import make_registry, make_settings, watch_new_kinds
from paceline_operator.health import Health, serve
from paceline_operator.leader import Elected, Election
from paceline_operator.lease import Times
from paceline_operator.metrics import Metrics
from paceline_operator.settings import Settings, load_settings, settings_help
from paceline_operator.webhook import ClassReader, Webhook
from paceline_operator.webhook_certificates import CertificateKeeper, FileSource, SecretSource

__all__ = ["main"]

_DESCRIPTION = "Turn InferenceServices into batching pods. Talks to the API server that KUBECONFIG or the pod names."
_ATTEMPT = re.compile(r"Request attempt #(\d+) failed")  # how kopf begins it
_TOLD_ATTEMPTS = 2
_BEAT = 1.0  # seconds between two signs of life of the event loop
_FATAL = (APIError, APISessionClosed, WatchingError)  # what kopf gives up on: forbidden, not found, errors for a minute
_ATTEMPTS_A_MINUTE = 30  # with the 2 s of `handlers._BACKOFFS`


def main() -> None:
    """Run the operator; what keeps it from starting is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="paceline-operator",
        description=_DESCRIPTION,
        epilog="environment:\n" + settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    sys.exit(run_command(_run, errors=()))


def _run() -> None:
    settings = load_settings(os.environ)
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("kopf.objects", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_tell_outages_rarely)
        handler.addFilter(_tell_the_end_once)
        handler.addFilter(_tell_nothing_of_missing_kinds)
    metrics, health = Metrics(), Health()
    leadership = _candidate(settings, metrics, health)
    _on_signal(leadership.stop)
    _serve_health(settings, health, metrics)
    with _admission(settings, metrics, health, leadership):
        try:
            if leadership.acquire():
                _lead(settings, metrics, health, leadership)
        finally:
            leadership.release()


@contextmanager
def _admission(settings: Settings, metrics: Metrics, health: Health, leadership: Election | Elected) -> Iterator[None]:
    """Serve the webhook, if there is to be one, whether this replica leads or not."""
    if not settings.webhook_port:
        yield
        return
    serving: list[bool] = []
    health.ready_if("webhook", lambda: "" if serving else "doesn't serve yet")
    if settings.webhook_cert_dir:
        source: FileSource | SecretSource = FileSource(Path(settings.webhook_cert_dir))
    else:
        source = SecretSource(load_configuration(), settings, metrics)
    keeper = CertificateKeeper(source, metrics)
    keeper.start(lambda: leadership.stopped)
    webhook = Webhook(settings, metrics, ClassReader(load_configuration(), metrics), keeper.context)
    webhook.start()
    serving.append(True)
    try:
        yield
    finally:
        keeper.stop()
        webhook.stop()


def _on_signal(end: Callable[[], None]) -> None:
    """Call `end` when the process is asked to end; kopf has handlers of its own while it runs."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end())


def _candidate(settings: Settings, metrics: Metrics, health: Health) -> Election | Elected:
    if not settings.leader_election:
        return Elected()
    beat = partial(health.beat, "lease")
    times, where = Times.of(settings.lease_duration), (settings.operator_namespace, settings.lease_name)
    return Election(load_configuration(), *where, metrics, times=times, beat=beat)


def _serve_health(settings: Settings, health: Health, metrics: Metrics) -> None:
    try:
        if settings.metrics_port:
            serve(settings.metrics_host, settings.metrics_port, health, metrics.registry)
    except OSError as error:
        raise SettingsError(f"PACELINE_METRICS_PORT={settings.metrics_port} can't be used: {error.strerror}") from error


def _lead(settings: Settings, metrics: Metrics, health: Health, leadership: Election | Elected) -> None:
    """Operate until told to end. Raises `LeaseError` if the leadership is lost, `WatchEnded` if a watch is."""
    cluster = Cluster(load_configuration(), metrics, threads=settings.workers, leadership=leadership)
    try:
        asyncio.run(_operate(settings, cluster, metrics, health, leadership))
    except _FATAL as error:
        remedy = (
            "see that the CRDs are installed and that the rights of the chart's ClusterRole are granted, and start it again"
        )
        raise WatchEnded(f"a watch has ended for good: {_words(error)}: {remedy}") from error


def _words(error: BaseException) -> str:
    """Return what the API server said: kopf's errors begin with it, and go on with the whole answer."""
    return str(getattr(error, "message", None) or error)


def _tell_outages_rarely(record: logging.LogRecord) -> bool:
    """Pass a watch's first failed attempts, then one a minute: a server that is away for an hour is one piece of news."""
    attempt = _ATTEMPT.match(record.getMessage())
    return attempt is None or int(attempt[1]) <= _TOLD_ATTEMPTS or int(attempt[1]) % _ATTEMPTS_A_MINUTE == 0


def _tell_the_end_once(record: logging.LogRecord) -> bool:
    """Drop kopf's own tracebacks of what ends the process: it ends with one line about that."""
    return not (record.exc_info and isinstance(record.exc_info[1], _FATAL))


def _tell_nothing_of_missing_kinds(record: logging.LogRecord) -> bool:
    """Drop kopf's advice to install the CRDs of other projects: what is missing and asked for stands in the status."""
    return not record.getMessage().startswith("Unresolved resources cannot be served")


async def _operate(
    settings: Settings, cluster: Cluster, metrics: Metrics, health: Health, leadership: Election | Elected
) -> None:
    admin = AdminClient(timeout=settings.admin_timeout, concurrency=settings.admin_concurrency, leadership=leadership)
    controller = Controller(settings, cluster, admin, metrics)
    registry, kopf_settings = make_registry(controller, classes=settings.use_classes), make_settings()
    insights, ended, lost = Insights(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    controller.on_apis = partial(watch_new_kinds, registry, kopf_settings, insights)
    health.ready_if("objects", lambda: "" if controller.started else "not everything is listed yet")
    _on_signal(lambda: _set(loop, ended))
    if leadership.stopped:
        return  # asked to end before anything could hear it

    def lose() -> None:
        lost.set()
        _set(loop, ended)

    leadership.hold(lose)
    beating = asyncio.create_task(_beat(health))
    await kopf.operator(
        registry=registry,
        settings=kopf_settings,
        insights=insights,
        namespaces=settings.watch_namespaces,
        clusterwide=not settings.watch_namespaces,
        stop_flag=ended,
        # kopf's own would ask for the user's name, which a container that runs under any number doesn't have
        identity=Identity(f"{platform.node()}/{os.getpid()}"),
    )
    beating.cancel()
    if lost.is_set():
        raise LeaseError("another replica leads now, or may: this one ends, and starts anew as a candidate")


def _set(loop: asyncio.AbstractEventLoop, flag: asyncio.Event) -> None:
    """Set a flag of the loop from another thread."""
    loop.call_soon_threadsafe(flag.set)


async def _beat(health: Health) -> None:
    while True:
        health.beat("loop")
        await asyncio.sleep(_BEAT)


if __name__ == "__main__":
    main()
