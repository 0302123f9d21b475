"""The Batching Lab's live page on the admin port: its files are open, what it asks for needs the token."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import RedirectResponse

from paceline_lab.assets import CONTENT_SECURITY_POLICY, PAGE, asset, live_document
from paceline_runtime.api_errors import ApiError

__all__ = ["PREFIX", "add_lab"]

PREFIX = "/lab"


def add_lab(app: FastAPI, model_name: str) -> None:
    """Add the page. It plays no scenarios here: they would take time from the streams of this process."""

    @app.get(PREFIX)
    async def root() -> RedirectResponse:
        return RedirectResponse(f"{PREFIX}/")

    @app.get(f"{PREFIX}/api/live")
    async def live() -> dict[str, Any]:
        return live_document(model_name, needs_token=True, prefix="/admin", scenarios=False)

    @app.get(f"{PREFIX}/{{name:path}}")
    async def file(name: str) -> Response:
        found = asset(name or PAGE)
        if found is None:
            raise ApiError(404, f"no such page: the Lab is at {PREFIX}/", code="not_found")
        body, kind = found
        return Response(body, media_type=kind, headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY})
