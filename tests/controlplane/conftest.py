"""One suite for two servers: `api` is the embedded one always, and the real one that KUBECONFIG names, if it's set."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import Api, eventually, widget_crd

from embedded import embedded_server, start

_REAL = [pytest.param("real", marks=pytest.mark.cluster)] if "KUBECONFIG" in os.environ else []


@pytest.fixture(scope="session", params=["embedded", *_REAL])
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with contextlib.ExitStack() as stack:
        if request.param == "embedded":
            state = tmp_path_factory.mktemp("apiserver")
            start(state).stop()  # so that the one under test has a past that it no longer remembers
            server = stack.enter_context(embedded_server(state))
            api = Api(server.kubeconfig, real=False)
        else:
            api = Api(Path(os.environ["KUBECONFIG"]), real=True)
        yield api
        for name in api.created:
            api.delete(f"/api/v1/namespaces/{name}")
        api.close()


@pytest.fixture
def ns(api: Api) -> str:
    return api.new_namespace()


@pytest.fixture(scope="session")
def widgets(api: Api) -> Iterator[Callable[..., str]]:
    """Install a CRD of our own group; gives the path of its collection (or of an object) in a namespace."""
    group = f"{api.prefix}.paceline.dev"
    api.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", widget_crd(group)).ok()
    crd = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/widgets.{group}"
    probe = f"/apis/{group}/v1/widgets"
    eventually(lambda: api.get(probe).status == 200, "the CRD was not served")

    def path(namespace: str, *name: str) -> str:
        return "/".join([f"/apis/{group}/v1/namespaces/{namespace}/widgets", *name])

    yield path
    api.delete(crd)
