"""An HTTP proxy before an API server that counts calls and does to them what networks and overloaded servers do."""

import asyncio
import json
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import yaml
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web
from kubernetes import client, config

GONE = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410, "message": "too old"}


@dataclass
class Fault:
    """What happens to the next `times` calls whose verb and path match, and whose body holds something: an answer, a lost
    answer, an expired watch."""

    verb: str
    part: str
    times: int
    status: int = 0
    message: str = "injected"
    holding: bytes = b""
    headers: dict = field(default_factory=dict)
    lose_answer: bool = False
    expire: bool = False


class FaultyProxy:
    """Serves http://127.0.0.1:port before the API server of a kubeconfig. `calls` are (time, verb, path, watch?)."""

    def __init__(self, kubeconfig, folder):
        self.calls, self.faults = [], []
        self._upstream = client.Configuration()
        config.load_kube_config(str(kubeconfig), client_configuration=self._upstream)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20)
        document = yaml.safe_load(Path(kubeconfig).read_text())
        document["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{port}"}
        document["users"][0]["user"] = {"token": "by-the-proxy"}
        self.kubeconfig = folder / "proxy.kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(document))

    async def _start(self):
        context = ssl.create_default_context(cafile=self._upstream.ssl_ca_cert)
        if self._upstream.cert_file:
            context.load_cert_chain(self._upstream.cert_file, self._upstream.key_file)
        self._session = ClientSession(connector=TCPConnector(ssl=context, limit=0), timeout=ClientTimeout(total=None))
        app = web.Application(client_max_size=16 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    def close(self):
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _stop(self):
        await self._runner.cleanup()
        await self._session.close()
        watches = asyncio.all_tasks() - {asyncio.current_task()}  # cancelled, but aiohttp doesn't wait for their end
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    def writes(self, since=0):
        """The calls after the first `since` ones that change something."""
        return [(verb, path) for _, verb, path, _ in self.calls[since:] if verb != "GET"]

    def _fault(self, verb, path, body):
        for fault in self.faults:
            if fault.times > 0 and fault.verb == verb and fault.part in path and fault.holding in body:
                fault.times -= 1
                return fault
        return None

    async def _serve(self, request):
        watch = request.query.get("watch") in ("true", "1")
        self.calls.append((monotonic(), request.method, request.path, watch))
        fault = self._fault("WATCH" if watch else request.method, request.path, await request.read())
        if fault and fault.expire:
            line = json.dumps({"type": "ERROR", "object": GONE}) + "\n"
            return web.Response(text=line, content_type="application/json")
        if fault and fault.status:
            status = {"kind": "Status", "code": fault.status, "message": fault.message}
            return web.json_response(status, status=fault.status, headers=fault.headers)
        return await self._forward(request, lose_answer=bool(fault and fault.lose_answer))

    async def _forward(self, request, *, lose_answer):
        headers = {k: v for k, v in request.headers.items() if k.lower() in ("accept", "content-type")}
        token = self._upstream.get_api_key_with_prefix("BearerToken")
        headers |= {"Authorization": token} if token else {}
        url = self._upstream.host.rstrip("/") + request.path_qs
        with suppress(ConnectionError):
            async with self._session.request(
                request.method, url, headers=headers, data=await request.read() or None
            ) as answer:
                if lose_answer:
                    await answer.read()
                    request.transport.close()
                    return web.Response()
                return await self._stream(request, answer)
        return web.Response(status=502)

    async def _stream(self, request, answer):
        kept = {k: v for k, v in answer.headers.items() if k.lower() in ("content-type", "retry-after")}
        response = web.StreamResponse(status=answer.status, headers=kept)
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response
