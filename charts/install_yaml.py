"""Prints the chart rendered for `kubectl apply -f`: `python charts/install_yaml.py REGISTRY [helm's --set …]`.

Uses helm from PATH, else the one that the tests carry. Nobody can keep a random key in a file that is rendered again and
again, so the key's Secret is made by hand, once: the first lines say how.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CHARTS = Path(__file__).parent
NAMESPACE = "paceline-system"
HEADER = f"""\
# Paceline, rendered from its Helm chart. Once, before it is applied:
#   kubectl create namespace {NAMESPACE}
#   kubectl -n {NAMESPACE} create secret generic paceline-key --from-literal=key="$(openssl rand -hex 32)"
# Then: kubectl apply --server-side -f install.yaml     (before 1.25: kubectl apply --validate=false -f install.yaml)
apiVersion: v1
kind: Namespace
metadata:
  name: {NAMESPACE}
  labels: {{pod-security.kubernetes.io/enforce: restricted}}
"""


def helm() -> str:
    """Return the helm to use."""
    if found := shutil.which("helm"):
        return found
    sys.path.insert(0, str(CHARTS.parent / "tests"))
    from kubetools import tools

    return str(tools() / "helm")


def render(registry: str, *options: str) -> str:
    """Return the whole file. `options` are helm's."""
    values = f"imageRegistry={registry},operatorKey.existingSecret=paceline-key"
    command = [helm(), "template", "paceline", CHARTS / "paceline", "--namespace", NAMESPACE, "--set", values, *options]
    environment = os.environ | {"KUBECONFIG": os.devnull}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    return HEADER + done.stdout


if __name__ == "__main__":
    if len(sys.argv) < 2 or not sys.argv[1]:
        raise SystemExit(
            "name the registry that has the images, as in: make install-yaml IMAGE_REGISTRY=registry.example.com/ml"
        )
    sys.stdout.write(render(*sys.argv[1:]))
