"""One suite, two places: the stack fixture runs each test on `paceline local` and on the cluster that KUBECONFIG names."""

import os

import pytest
from stacks import ClusterStack, LocalStack


@pytest.fixture(scope="session")
def local_stack(tmp_path_factory):
    stack = LocalStack(tmp_path_factory.mktemp("local"))
    yield stack
    stack.close()


@pytest.fixture(scope="session")
def cluster_stack(tmp_path_factory):
    if "KUBECONFIG" not in os.environ:
        pytest.skip("KUBECONFIG names no cluster")
    stack = ClusterStack(os.environ["KUBECONFIG"], tmp_path_factory.mktemp("cluster") / "operator.log")
    yield stack
    stack.close()


@pytest.fixture(params=["local", pytest.param("cluster", marks=[pytest.mark.cluster, pytest.mark.nodes])])
def stack(request):
    return request.getfixturevalue(f"{request.param}_stack")
