"""Live knobs against a fake admin server: what differs is patched, what failed is told, what is settled is left alone."""

import asyncio
import json

import pytest
from aiohttp import web
from operator_kit import MINIMAL, service

from paceline_core.errors import KnobError, RevisionConflict
from paceline_core.knobs import Knobs, knobs_to_wire
from paceline_core.wire import KnobsDocument, KnobsPatch, from_json, to_json
from paceline_operator.admin_client import AdminClient
from paceline_operator.errors import AdminError
from paceline_operator.knob_sync import KnobState, KnobSync, Target, difference
from paceline_operator.metrics import Metrics
from paceline_operator.names import digest
from paceline_operator.pods import Instance
from paceline_runtime.knob_store import KnobStore

TOKEN = "right-token"


class FakeAdmin:
    """The admin port of one pod: validates as the runtime does, with revisions; `fault` overrides the answer."""

    def __init__(self):
        self.current = Knobs()
        self.revision = 1
        self.calls = []
        self.patches = []
        self.fault = None
        self.lag = False

    def document(self, status="applied"):
        wire = knobs_to_wire(self.current)
        return KnobsDocument(self.revision, self.revision - 1, wire, dict.fromkeys(wire, status), instance="i")

    async def handle(self, request):
        self.calls.append(request.method)
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": {"message": "the admin API needs a token"}}, status=401)
        if self.fault:
            answer = self.fault(request)
            return await answer if asyncio.iscoroutine(answer) else answer
        if request.method == "PATCH":
            if request.headers["If-Match"] != f'"{self.revision}"':
                return web.json_response({"error": {"message": "stale"}}, status=409)
            self.patches.append(await request.json())
            patch = from_json(KnobsPatch, self.patches[-1])
            try:
                self.current = self.current.updated(patch.knobs)
            except KnobError as error:
                return web.json_response({"error": {"message": str(error)}}, status=422)
            self.revision += 1
        return web.json_response(to_json(self.document("pending" if self.lag else "applied")))


@pytest.fixture
async def admin():
    fake = FakeAdmin()
    app = web.Application()
    app.router.add_route("*", "/admin/knobs", fake.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.port = site._server.sockets[0].getsockname()[1]
    yield fake
    await runner.cleanup()


@pytest.fixture
async def sync(admin):
    client = AdminClient(timeout=2, concurrency=4, port=admin.port)
    yield KnobSync(client, Metrics())
    await client.close()


def target(token=TOKEN, **batching):
    knobs = knobs_to_wire(service(MINIMAL | {"batching": batching}).knobs)
    return Target(knobs, digest(knobs), "hash", token)


def instance(*, ready=True, process="p1", restart_hash="hash", address="127.0.0.1"):
    return Instance("chat-1", address, ready, process, restart_hash)


async def run(sync, wanted, *pods, known=None, verify=False):
    found = await sync.sync(wanted, list(pods) or [instance()], known or {}, verify=verify)
    return found["chat-1"]


async def test_a_pod_that_has_the_knobs_is_only_asked(sync, admin):
    state = await run(sync, target())
    assert state.state is KnobState.SYNCED
    assert (state.revision, state.epoch) == (1, 0)
    assert admin.calls == ["GET"]


async def test_what_differs_is_patched_once(sync, admin):
    wanted = target(strategy="static", maxNumSeqs=8, maxQueueDelay="0.2s")
    state = await run(sync, wanted)
    assert state.state is KnobState.SYNCED
    assert admin.current.max_num_seqs == 8
    assert admin.calls == ["GET", "PATCH"]
    assert await run(sync, wanted, known={"chat-1": state}) == state
    assert admin.calls == ["GET", "PATCH"]


async def test_a_new_process_is_asked_again(sync, admin):
    wanted = target(maxNumSeqs=8)
    state = await run(sync, wanted)
    admin.current = Knobs()  # it came up with its defaults
    again = await run(sync, wanted, instance(process="p2"), known={"chat-1": state})
    assert again.state is KnobState.SYNCED
    assert admin.current.max_num_seqs == 8


async def test_a_change_behind_our_back_is_found_when_verified(sync, admin):
    wanted = target(maxNumSeqs=8)
    state = await run(sync, wanted)
    admin.current = admin.current.updated({"maxNumSeqs": 9})
    assert (await run(sync, wanted, known={"chat-1": state})).revision == state.revision
    assert (await run(sync, wanted, known={"chat-1": state}, verify=True)).state is KnobState.SYNCED
    assert admin.current.max_num_seqs == 8


async def test_a_change_that_waits_for_a_step_is_pending(sync, admin):
    admin.lag = True
    state = await run(sync, target(maxNumSeqs=8))
    assert state.state is KnobState.PENDING
    assert state.again is not None
    admin.lag = False
    assert (await run(sync, target(maxNumSeqs=8), known={"chat-1": state})).state is KnobState.SYNCED


async def test_restart_knobs_are_not_patched(sync, admin):
    state = await run(sync, target(blockSize=32, maxNumSeqsLimit=512))
    assert state.state is KnobState.NEEDS_RESTART
    assert "blockSize" in state.message and "maxNumSeqsLimit" in state.message
    assert "delete the pod" in state.message  # it is of this template, so no rollout ends it
    assert admin.calls == ["GET"]
    assert "delete" not in (await run(sync, target(blockSize=32), instance(restart_hash="older"))).message


async def test_a_pod_of_an_older_template_that_refuses_goes_with_the_rollout(sync, admin):
    wanted = target(maxNumSeqs=512, maxNumSeqsLimit=512)  # above the old pod's envelope of 256
    state = await run(sync, wanted, instance(restart_hash="older"))
    assert state.state is KnobState.NEEDS_RESTART
    assert (await run(sync, wanted)).state is KnobState.REFUSED


async def test_a_wrong_token_is_told_in_the_pods_words(sync, admin):
    state = await run(sync, target(token="wrong"))
    assert state.state is KnobState.REFUSED
    assert "HTTP 401" in state.message
    assert "needs a token" in state.message
    assert "wrong" not in state.message.replace("wrong-", "")


async def test_a_lost_race_is_run_again(sync, admin):
    admin.fault = lambda request: web.json_response({"error": {"message": "stale"}}, status=409)
    state = await run(sync, target(maxNumSeqs=8))
    assert state.state is KnobState.PENDING
    admin.fault = None
    assert (await run(sync, target(maxNumSeqs=8), known={"chat-1": state})).state is KnobState.SYNCED


@pytest.mark.parametrize(("ready", "expected"), [(True, KnobState.UNREACHABLE), (False, KnobState.PENDING)])
async def test_a_silent_pod_alarms_only_once_it_is_ready(sync, admin, ready, expected):
    admin.fault = lambda request: web.json_response({"error": {"message": "loading"}}, status=503)
    assert (await run(sync, target(), instance(ready=ready))).state is expected


async def test_an_address_where_nobody_listens_is_told():
    client = AdminClient(timeout=2, concurrency=1, port=9)
    with pytest.raises(AdminError, match=r"127\.0\.0\.1:9") as raised:
        await client.knobs("127.0.0.1", TOKEN)
    assert raised.value.status == 0
    await client.close()


@pytest.mark.parametrize(
    "text", ["not json", "[]", '{"revision": 1}', '{"revision": "x", "epoch": 0, "knobs": {}, "status": {}}']
)
async def test_an_answer_that_is_no_document_is_an_error(sync, admin, text):
    admin.fault = lambda request: web.Response(text=text, content_type="application/json")
    state = await run(sync, target())
    assert state.state is KnobState.UNREACHABLE


async def test_an_answer_in_several_segments_is_read_whole(sync, admin):
    async def slowly(request):
        text = json.dumps(to_json(admin.document())).encode()
        response = web.StreamResponse(headers={"Content-Length": str(len(text))})
        await response.prepare(request)
        for part in (text[:40], text[40:]):
            await response.write(part)
            await asyncio.sleep(0.05)
        return response

    admin.fault = slowly
    assert (await run(sync, target())).state is KnobState.SYNCED


async def test_a_redirect_is_not_followed(sync, admin):
    admin.fault = lambda request: web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"})
    state = await run(sync, target())
    assert state.state is KnobState.UNREACHABLE
    assert "HTTP 302" in state.message


async def test_a_hung_pod_holds_up_only_itself(admin):
    released = asyncio.Event()

    async def hang(request):
        await released.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/admin/knobs", hang)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.2", admin.port).start()
    client = AdminClient(timeout=0.3, concurrency=4, port=admin.port)
    pods = [instance(), Instance("chat-2", "127.0.0.2", True, "p", "hash")]
    found = await KnobSync(client, Metrics()).sync(target(maxNumSeqs=8), pods, {}, verify=False)
    assert found["chat-1"].state is KnobState.SYNCED
    assert found["chat-2"].state is KnobState.UNREACHABLE
    released.set()
    await client.close()
    await runner.cleanup()


def test_values_are_compared_not_texts():
    document = KnobsDocument(1, 0, {"maxQueueDelay": "0.05s", "sloTtft": None, "preferredBatchSizes": [8, 4]}, {})
    wanted = {"maxQueueDelay": "50ms", "sloTtft": None, "preferredBatchSizes": [4, 8]}
    assert difference(wanted, document) == ({}, [])
    assert difference(wanted | {"sloTtft": "1s"}, document) == ({"sloTtft": "1s"}, [])


def test_a_knob_that_an_older_pod_lacks_is_left_out():
    assert difference({"maxNumSeqs": 8}, KnobsDocument(1, 0, {}, {})) == ({}, [])


def test_what_is_accepted_counts_as_it_will_be():
    document = KnobsDocument(1, 0, {"maxNumSeqs": 256}, {"maxNumSeqs": "pending"}, {"maxNumSeqs": 8})
    assert difference({"maxNumSeqs": 8}, document) == ({}, [])


class Leading:
    """A leadership with a number, that may be over."""

    def __init__(self, number):
        self.number, self.over = number, False

    def fence(self):
        return self.number

    def may_act(self):
        return not self.over


async def test_the_first_look_at_a_process_brings_the_leaders_number_even_if_nothing_differs(admin):
    leadership = Leading(7)
    client = AdminClient(timeout=2, concurrency=4, port=admin.port, leadership=leadership)
    sync = KnobSync(client, Metrics())
    state = await run(sync, target())
    assert admin.calls == ["GET", "PATCH"]
    assert admin.patches == [{"knobs": {}, "fencing": 7, "schemaVersion": 1}]
    await run(sync, target(), known={"chat-1": state}, verify=True)
    assert admin.calls[2:] == ["GET"]
    await run(sync, target(), instance(process="p2"), known={"chat-1": state})
    assert admin.calls[3:] == ["GET", "PATCH"]
    await client.close()


async def test_a_leader_that_was_followed_sends_no_change(admin):
    leadership = Leading(7)
    client = AdminClient(timeout=2, concurrency=4, port=admin.port, leadership=leadership)
    leadership.over = True
    state = await run(KnobSync(client, Metrics()), target(maxNumSeqs=8))
    assert (state.state, admin.calls) == (KnobState.UNREACHABLE, ["GET"])
    assert admin.current == Knobs()
    await client.close()


def test_a_runtime_refuses_an_earlier_leader_also_where_nothing_was_changed():
    store = KnobStore(Knobs())
    store.patch(KnobsPatch({}, fencing=8))
    with pytest.raises(RevisionConflict, match="a newer leader"):
        store.patch(KnobsPatch({"maxNumSeqs": 8}, fencing=7))
    assert store.revision == 1
