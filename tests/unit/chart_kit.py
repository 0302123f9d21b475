"""The chart rendered by real helm, once per set of options."""

import functools
import os
from pathlib import Path

import yaml

from kubetools import helm

CHART = Path(__file__).parents[2] / "charts" / "paceline"
IMAGES = ("--set", "imageRegistry=reg.example.com/ml")
FULL_VALUES = Path(__file__).parent / "chart_goldens" / "full-values.yaml"
# flags that Kubernetes can be told of without a cluster
NO_CLUSTER = {key: value for key, value in os.environ.items() if key != "KUBECONFIG"} | {"KUBECONFIG": os.devnull}


@functools.cache
def rendered(*options):
    return helm("template", "paceline", CHART, "--namespace", "paceline-system", *options, env=NO_CLUSTER).stdout


def render(*options):
    return [document for document in yaml.safe_load_all(rendered(*IMAGES, *options)) if document]


def refusal(*options):
    """Return what helm says about values that it must refuse."""
    refused = helm("template", "paceline", CHART, *options, check=False, env=NO_CLUSTER)
    assert refused.returncode != 0, f"helm accepts {options}"
    return refused.stderr


def one(documents, kind, name=None):
    (found,) = [d for d in documents if d["kind"] == kind and name in (None, d["metadata"]["name"])]
    return found


def operator_container(documents):
    (container,) = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    return container


def environment(documents):
    """Return what the operator's process would see, with a key in place of the mounted one."""
    found = {e["name"]: e["value"] for e in operator_container(documents)["env"] if "value" in e}
    return {name: value for name, value in found.items() if name != "PACELINE_OPERATOR_KEY_FILE"} | {
        "PACELINE_OPERATOR_KEY": "k" * 48
    }


def notes(*options):
    """Return NOTES.txt as `helm install` prints it."""
    text = helm(
        "install", "paceline", CHART, "--dry-run=client", "--namespace", "paceline-system", *IMAGES, *options, env=NO_CLUSTER
    ).stdout
    return text.partition("\nNOTES:\n")[2]
