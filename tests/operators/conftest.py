"""Fixtures of the tests with a real operator process: the API server and an operator on it, one of each per module."""

import contextlib
import os

import pytest
from operator_process import Api, operating

from embedded import embedded_server


def pytest_generate_tests(metafunc):
    servers = getattr(metafunc.module, "SERVERS", None)
    if servers and "api" in metafunc.fixturenames:
        metafunc.parametrize("api", servers, indirect=True, scope="module")


@pytest.fixture(scope="module")
def api(request, tmp_path_factory):
    """A namespace of its own on an API server: the embedded one, or the real one if the module asks for it (`SERVERS`)."""
    with contextlib.ExitStack() as stack:
        if getattr(request, "param", "embedded") == "real":
            kubeconfig = os.environ["KUBECONFIG"]
        else:
            kubeconfig = stack.enter_context(embedded_server(tmp_path_factory.mktemp("apiserver"))).kubeconfig
        found = Api(kubeconfig)
        found.prepare()
        yield found
        found.close()


@pytest.fixture(scope="module")
def operator(api, tmp_path_factory):
    with operating(api, tmp_path_factory.mktemp("operator") / "operator.log") as found:
        yield found
