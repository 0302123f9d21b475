"""Pods that answer late, wrongly or not at all, over real HTTP: each is marked, none keeps the others from being heard."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
from aiohttp import web
from tuning_kit import DEVICE, FakePod, traffic

from paceline_core.knobs import Knobs
from paceline_core.plan import StepShape
from paceline_core.wire import RequestRecord, StepRecord
from paceline_operator.tuning.ledger import Health, PodLedger
from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.sampling import samples_of
from paceline_operator.tuning.scrape import Scraper, Source
from paceline_operator.tuning.view import merge
from paceline_sim.live import VirtualPod
from paceline_sim.trace import TraceRequest

NOW = 1_800_000_000.0  # Unix seconds
TOKEN = "secret"


def virtual_pod(name="pod", *, begin=NOW - 60, extra=()):
    pod = VirtualPod(Knobs(), DEVICE, num_blocks=8000, max_model_len=1 << 20, now=begin, name=name)
    for request in [*traffic(2.0, 50).requests, *extra]:
        pod.send(request.at(request.arrival + begin))
    pod.run(begin + 60)
    return pod


@contextlib.asynccontextmanager
async def served(fake, metrics=None):
    """Serve a fake pod on a port of its own; yield that port. Both ports of the contract are one here."""
    app = web.Application()
    app.router.add_get("/admin/observe", fake.observe)
    if metrics is not None:

        async def answer(_request):
            return web.Response(text=metrics)

        app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield site._server.sockets[0].getsockname()[1]
    finally:
        await runner.cleanup()


async def look(fake, ledger=None, *, now=NOW, patience=5.0, metrics=None, looks=1):
    ledger = ledger or PodLedger("pod")
    async with served(fake, metrics) as port:
        scraper = Scraper(timeout=patience, concurrency=4, clock=lambda: now, admin_port=port, http_port=port)
        try:
            for _ in range(looks):
                await scraper.look([(Source("pod", "127.0.0.1", TOKEN), ledger)])
        finally:
            await scraper.close()
    return ledger


async def test_a_pod_is_read_from_its_cursor_on():
    pod = virtual_pod()
    ledger = await look(FakePod(pod), looks=2)
    assert ledger.fresh and ledger.cursor == pod.observe().cursor
    assert len(list(ledger.records)) == len(pod.observe().requests)
    assert ledger.model is not None and list(ledger.step_ratios())


def spoil(change):
    async def spoiled(document, _request):
        change(document)
        return document

    return spoiled


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda d: d.update(now=float("nan")), "clock"),
        (lambda d: d["gauges"].update(running=-3), "negative"),
        (lambda d: d["stepModel"].update(residual=float("inf")), "not a number"),
        (lambda d: [r.update(arrival=float("nan")) for r in d["requests"][::2]], "records can't be"),
        (lambda d: [r.update(promptTokens=-5) for r in d["requests"][::2]], "records can't be"),
        (lambda d: [r.update(end=r["arrival"] - 5.0) for r in d["requests"] if r["end"]], "records can't be"),
        (lambda d: [r.update(outputTokens=10**12) for r in d["requests"]], "records can't be"),
        (lambda d: [r.update(promptTokens=0) for r in d["requests"][::2]], "records can't be"),
    ],
)
async def test_figures_that_cannot_be_are_not_believed(change, word):
    ledger = await look(FakePod(virtual_pod(), spoil(change)))
    assert ledger.health is Health.LYING and word in ledger.why
    assert all(0 <= r.prompt_tokens < 10**8 and 0 <= r.output_tokens < 10**8 for r in ledger.records)


async def test_a_single_bad_record_is_left_out_and_the_rest_counts():
    ledger = await look(FakePod(virtual_pod(), spoil(lambda d: d["requests"][0].update(arrival=float("nan")))))
    assert ledger.fresh and ledger.dropped == 1 and len(list(ledger.records)) > 50


async def test_a_clock_that_is_off_is_put_right():
    pod = virtual_pod(begin=NOW - 3660)  # an hour behind
    ledger = await look(FakePod(pod))
    assert ledger.fresh and "clock is off by -3600.0 s" in ledger.why
    assert all(NOW - 61 <= r.arrival <= NOW for r in ledger.records)


async def test_a_counter_that_falls_without_a_new_engine_is_a_lie_and_with_one_it_is_a_restart():
    ledger = await look(FakePod(virtual_pod()))
    before = len(list(ledger.records))
    fallen = spoil(lambda d: d["gauges"].update(outputTokens=1))
    await look(FakePod(virtual_pod(), fallen), ledger)
    assert ledger.health is Health.LYING and "output_tokens fell" in ledger.why
    ledger = await look(FakePod(virtual_pod()))
    await look(FakePod(virtual_pod("another")), ledger)
    assert ledger.fresh and ledger.instance == "another" and len(list(ledger.records)) >= before


async def test_statistics_that_stand_still_are_stale():
    fake = FakePod(virtual_pod())
    ledger = await look(fake)
    await look(fake, ledger, now=NOW + 10)
    assert ledger.health is Health.STALE and "frozen" in ledger.why


async def refuse(_document, _request):
    return web.Response(status=404)


METRICS = 'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'


async def test_an_old_pod_gives_its_gauges_at_least():
    ledger = await look(FakePod(virtual_pod(), refuse), metrics=METRICS)
    assert ledger.health is Health.OLD and (ledger.gauges.running, ledger.gauges.waiting) == (3, 2)
    ledger = await look(FakePod(virtual_pod(), spoil(lambda d: d.update(schemaVersion=99))), metrics=METRICS)
    assert ledger.health is Health.OLD and "schema version 99" in ledger.why
    ledger = await look(FakePod(virtual_pod(), refuse))
    assert ledger.health is Health.OLD and "404" in ledger.why


async def test_a_slow_pod_costs_its_time_out_and_a_gone_one_nothing():
    async def slow(document, _request):
        await asyncio.sleep(30)
        return document

    ledger = await look(FakePod(virtual_pod(), slow), patience=0.3)
    assert ledger.health is Health.SILENT and "in time" in ledger.why
    scraper = Scraper(timeout=1.0, concurrency=1, admin_port=1, http_port=1)
    await scraper.look([(Source("pod", "127.0.0.1", TOKEN), ledger)])
    await scraper.close()
    assert ledger.health is Health.SILENT and "reached" in ledger.why


@contextlib.asynccontextmanager
async def several(fakes):
    """Serve several fake pods at one port, told apart by their tokens; yield that port."""
    app = web.Application()

    async def observe(request):
        return await fakes[request.headers["Authorization"].removeprefix("Bearer ")].observe(request)

    app.router.add_get("/admin/observe", observe)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield site._server.sockets[0].getsockname()[1]
    finally:
        await runner.cleanup()


async def look_at(fakes, *, patience=5.0):
    """Return the ledgers of pods, which are asked in the order of their names here."""
    ledgers = {name: PodLedger(name) for name in fakes}
    async with several(fakes) as port:
        scraper = Scraper(timeout=patience, concurrency=len(fakes), clock=lambda: NOW, admin_port=port, http_port=port)
        try:
            await scraper.look([(Source(name, "127.0.0.1", name), ledger) for name, ledger in ledgers.items()])
        finally:
            await scraper.close()
    return ledgers


async def test_a_slow_pod_never_holds_up_the_others():
    """One answers only once the others were heard, one never: asked one after the other, the first would be in vain."""
    heard = asyncio.Event()

    async def never(_document, _request):
        await asyncio.sleep(30)

    async def after_the_other(document, _request):
        await heard.wait()
        return document

    async def at_once(document, _request):
        heard.set()
        return document

    spoilers = {"stuck": never, "late": after_the_other, "fine": at_once}
    ledgers = await look_at({name: FakePod(virtual_pod(name), spoiler) for name, spoiler in spoilers.items()}, patience=2.0)
    assert {name: ledger.health for name, ledger in ledgers.items()} == {
        "stuck": Health.SILENT, "late": Health.FRESH, "fine": Health.FRESH
    }  # fmt: skip
    view = merge([ledgers["stuck"], ledgers["fine"]], Objective(1.0, 0.05), NOW, 60.0)
    assert view.fresh == 1 and view.arrival_rate == pytest.approx(4.0, rel=0.35)  # made up for the silent one


NESTED = "[" * 200_000


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(now=10**400),
        lambda d: d["gauges"].update(running=10**400),
        lambda d: d["requests"][0].update(arrival=10**400),
        lambda d: d["stepModel"].update(constant=10**400),
        lambda _: web.Response(text=NESTED),
        lambda _: web.Response(text='{"steps":' + NESTED),
    ],
)
async def test_nonsense_of_one_pod_never_spoils_what_others_tell(change):
    async def spoiled(document, _request):
        answer = change(document)
        return document if answer is None else answer

    ledgers = await look_at({"odd": FakePod(virtual_pod("odd"), spoiled), "fine": FakePod(virtual_pod("fine"))})
    assert ledgers["fine"].fresh and ledgers["odd"].health in (Health.OLD, Health.LYING)
    assert len(ledgers["odd"].why) < 200


async def test_an_answer_that_nobody_has_thought_of_fails_its_pod_alone(monkeypatch):
    plain = PodLedger.absorb

    def absorb(ledger, document, now):
        if ledger.name == "odd":
            raise ArithmeticError("what is this?")
        plain(ledger, document, now)

    monkeypatch.setattr(PodLedger, "absorb", absorb)
    ledgers = await look_at({name: FakePod(virtual_pod(name)) for name in ("odd", "fine")})
    assert ledgers["fine"].fresh and ledgers["odd"].health is Health.LYING and "what is this?" in ledgers["odd"].why


async def test_an_answer_without_end_is_cut():
    async def endless(_document, request):
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(400):
                await response.write(b" " * 65_536)
        return response

    ledger = await look(FakePod(virtual_pod(), endless))
    assert ledger.health is Health.OLD and "larger than 8 MiB" in ledger.why


def test_no_traffic_is_no_reason_to_complain():
    pod = VirtualPod(Knobs(), DEVICE, num_blocks=800, max_model_len=1 << 20, now=NOW, name="idle")
    ledger = PodLedger("idle")
    ledger.absorb(pod.observe(), NOW)
    view = merge([ledger], Objective(1.0, 0.05), NOW, 60.0)
    assert ledger.fresh and view.attainment == 1.0 and view.arrival_rate == 0.0


def test_one_giant_request_is_traffic_as_any_other_and_what_fits_no_pool_is_left_out():
    giant = TraceRequest(20.0, 100_000, 50)
    pod = virtual_pod(extra=[giant])
    ledger = PodLedger("pod")
    ledger.absorb(pod.observe(), NOW)
    (sample,) = samples_of([ledger], Objective(1.0, 0.05), since=NOW - 60, now=NOW, epochs={"pod": 0}, block_size=16)
    assert max(row.prompt for row in sample) == 100_000
    lie = RequestRecord("lie", NOW - 5, 10**9, 1, "finished", 0, 0)
    ledger.absorb(replace(pod.observe(), requests=(lie,)), NOW + 1)
    assert "lie" not in {r.request_id for r in ledger.records}


def test_a_model_is_wrong_by_what_it_is_off_in_most_sizes_of_steps_however_often_they_come():
    """Behind a queue all steps are of sizes beyond a cache's end, where no linear model holds; elsewhere it is right."""
    ledger = PodLedger("pod", health=Health.FRESH, model=DEVICE.base)

    def step(decodes, context, factor):
        seconds = factor * DEVICE.base.predict(StepShape(decodes, 0, context, 0))
        ledger._keep_step(StepRecord(1.0, seconds, 0, decodes, 0, context, 0, decodes, 0))

    for decodes in (1, 2, 4, 8, 16):
        step(decodes, 200 * decodes, 1.02)
    for _ in range(500):
        step(64, 40_000, 2.2)
    assert merge([ledger], Objective(1.0, 0.05), 60.0, 60.0).step_error == pytest.approx(0.02)
    for decodes in (1, 2, 4, 8, 16):  # the device has become slower by half in all of them
        for _ in range(12):
            step(decodes, 200 * decodes, 1.5)
    assert merge([ledger], Objective(1.0, 0.05), 60.0, 60.0).step_error == pytest.approx(0.5)
