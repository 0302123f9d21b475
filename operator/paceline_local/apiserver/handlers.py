"""From HTTP requests to operations and back: content types, verbs, answers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import yaml
from aiohttp import web

from paceline_local.apiserver.discovery import discovery
from paceline_local.apiserver.errors import ApiError, bad_request, method_not_allowed, no_route, unsupported_media_type
from paceline_local.apiserver.objects import Json, metadata
from paceline_local.apiserver.operations import APPLY, Operations
from paceline_local.apiserver.scale import bind, read_scale, write_scale
from paceline_local.apiserver.tables import partial, table
from paceline_local.apiserver.targets import DeleteOptions, Reply, Target, WriteOptions, parse_path
from paceline_local.apiserver.watches import Selection, listed, watch
from paceline_local.json_yaml import load_json_yaml

__all__ = ["Handlers", "error_response"]

_BODY_TYPES = ("application/json", "application/yaml")
_HEALTH = ("/healthz", "/livez", "/readyz")
_REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


class Handlers:
    """All requests, after the guard let them in."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        if request.path in _HEALTH:
            return web.Response(text="ok")
        if request.path == _REVIEW and request.method == "POST":
            return _answer(Reply(await _review(request), 201))
        document = discovery(request.path, self._operations.registry)
        if document is not None:
            if request.method != "GET":
                raise method_not_allowed()
            return _answer(Reply(document))
        if not request.path.startswith(("/api/", "/apis/")):
            raise no_route()
        target = parse_path(request.path, self._operations.registry)
        verb = self._verb(request, target)
        if verb is None:
            raise method_not_allowed()
        return await verb(request, target)

    def _verb(
        self, request: web.Request, target: Target
    ) -> Callable[[web.Request, Target], Awaitable[web.StreamResponse]] | None:
        method = request.method
        if not target.name:
            return {"GET": self._list, "POST": self._create, "DELETE": self._delete_collection}.get(method)
        if target.subresource == "scale":
            return {"GET": self._get_scale, "PUT": self._write_scale, "PATCH": self._write_scale}.get(method)
        if target.subresource == "binding" and target.resource.kind == "Pod":
            return {"POST": self._bind}.get(method)
        if target.subresource and not (target.subresource == "status" and target.resource.status):
            raise no_route()
        if target.subresource:
            return {"GET": self._get, "PUT": self._update, "PATCH": self._patch}.get(method)
        return {"GET": self._get, "PUT": self._update, "PATCH": self._patch, "DELETE": self._delete}.get(method)

    async def _list(self, request: web.Request, target: Target) -> web.StreamResponse:
        selection = Selection.from_query(target, request.query)
        if request.query.get("watch") in ("true", "1"):
            return await self._watch(request, selection)
        found = listed(self._operations.store, selection)
        return web.json_response(self._rendered(request, target, found))

    async def _watch(self, request: web.Request, selection: Selection) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Cache-Control": "no-cache, private"})
        await response.prepare(request)
        target = Target(selection.resource)

        def render(obj: Json) -> Json:
            return self._rendered(request, target, obj)

        try:
            await watch(self._operations.store, selection, request.query, render, response.write)
            await response.write_eof()
        except ConnectionError:
            pass  # the client went away: that's how most watches end
        return response

    async def _get(self, request: web.Request, target: Target) -> web.StreamResponse:
        return web.json_response(self._rendered(request, target, self._operations.live(target)))

    async def _create(self, request: web.Request, target: Target) -> web.StreamResponse:
        return _answer(self._operations.create(target, await _object(request), _options(request)))

    async def _update(self, request: web.Request, target: Target) -> web.StreamResponse:
        return _answer(self._operations.update(target, await _object(request), _options(request)))

    async def _patch(self, request: web.Request, target: Target) -> web.StreamResponse:
        document = await _document(request)
        return _answer(self._operations.patch(target, request.content_type, document, _options(request)))

    async def _delete(self, request: web.Request, target: Target) -> web.StreamResponse:
        options = DeleteOptions.from_request(request.query, await _optional(request))
        return _answer(self._operations.delete(target, options))

    async def _delete_collection(self, request: web.Request, target: Target) -> web.StreamResponse:
        options = DeleteOptions.from_request(request.query, await _optional(request))
        found = listed(self._operations.store, Selection.from_query(target, request.query))
        for obj in found["items"]:
            meta = metadata(obj)
            self._operations.delete(Target(target.resource, meta.get("namespace", ""), meta["name"]), options)
        return web.json_response(found)

    async def _get_scale(self, request: web.Request, target: Target) -> web.StreamResponse:
        return web.json_response(read_scale(self._operations, target))

    async def _write_scale(self, request: web.Request, target: Target) -> web.StreamResponse:
        content_type = request.content_type if request.method == "PATCH" else None
        document = await _document(request)
        return _answer(write_scale(self._operations, target, content_type, document, _options(request)))

    async def _bind(self, request: web.Request, target: Target) -> web.StreamResponse:
        return _answer(bind(self._operations, target, await _object(request), _options(request)))

    def _rendered(self, request: web.Request, target: Target, obj: Json) -> Json:
        """Return an object or list as the client asked for it: whole, as a table, or metadata only."""
        wanted = request.headers.get("Accept", "").partition(",")[0]
        objects = obj["items"] if "items" in obj and obj["kind"].endswith("List") else [obj]
        if "as=Table" in wanted:
            revision = metadata(obj).get("resourceVersion", "")
            return table(target.resource, objects, revision, request.query.get("includeObject", "Metadata"))
        if "as=PartialObjectMetadataList" in wanted:
            kind = {"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1"}
            return {**kind, "metadata": obj["metadata"], "items": [partial(item) for item in objects]}
        return partial(obj) if "as=PartialObjectMetadata" in wanted else obj


def _options(request: web.Request) -> WriteOptions:
    return WriteOptions.from_query(request.query, request.headers.get("User-Agent", ""))


async def _document(request: web.Request) -> Any:
    """Return the decoded body of a write; a format that can't be read is a 415, one that doesn't parse a 400."""
    data = await request.read()
    try:
        text = data.decode()
        if "yaml" in request.content_type and request.content_type in (APPLY, "application/yaml"):
            (document,) = load_json_yaml(text)
            return document
        return json.loads(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise bad_request(f"the body can't be parsed: {error}") from error


async def _object(request: web.Request) -> Json:
    if request.content_type not in (*_BODY_TYPES, "application/octet-stream"):  # the latter: no Content-Type at all
        raise unsupported_media_type(request.content_type, _BODY_TYPES)
    document = await _document(request)
    if not isinstance(document, dict):
        raise bad_request("the body must be a JSON object")
    return document


async def _review(request: web.Request) -> Json:
    """Answer what the caller may do: all, whatever was asked (so kubectl's protobuf body need not be read)."""
    asked = await _object(request) if request.content_type == "application/json" else {}
    kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "metadata": {}}
    return {**kind, **asked, "status": {"allowed": True, "reason": "the token of this server may do everything"}}


async def _optional(request: web.Request) -> Any:
    return await _document(request) if await request.read() else None


def _answer(reply: Reply) -> web.Response:
    response = web.json_response(reply.body, status=reply.code)
    for warning in reply.warnings:
        quoted = warning.replace("\\", "\\\\").replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{quoted}"')
    return response


def error_response(error: ApiError) -> web.Response:
    """Return the `Status` of a refused request."""
    return web.json_response(error.status(), status=error.code)
