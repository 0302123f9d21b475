"""Samples that the operator's tests share."""

import copy
from datetime import UTC, datetime

from paceline_operator.settings import load_settings
from paceline_operator.spec import parse_service

KEY = "a-key-for-tests-of-32-bytes-or-more"
ENVIRONMENT = {"PACELINE_RUNTIME_IMAGE": "registry/runtime:1", "PACELINE_OPERATOR_KEY": KEY}
MINIMAL = {"model": {"uri": "hf://org/model"}}
FULL = {
    "model": {
        "uri": "hf://org/model",
        "name": "org/model-7b",
        "revision": "v1.2",
        "quantization": "q4_1",
        "maxModelLen": 4096,
        "secretRef": {"name": "hf-token", "key": "value"},
    },
    "batching": {
        "strategy": "iteration",
        "maxNumSeqs": 32,
        "maxNumSeqsLimit": 64,
        "maxNumBatchedTokens": 2048,
        "kvMemoryFraction": 0.8,
        "blockSize": 32,
        "maxQueueDelay": "10ms",
        "preferredBatchSizes": [4, 8],
        "staticFlush": "never",
        "longPrefillThreshold": 512,
        "prefixCaching": False,
    },
    "slo": {"ttft": "500ms", "tpot": "50ms", "percentile": 99},
    "tuning": {"mode": "Recommend", "bounds": {"maxNumSeqs": {"min": 4, "max": 48}, "maxQueueDelay": {"max": "1s"}}},
    "replicas": 3,
    "accelerator": {"resource": "nvidia.com/gpu", "count": 2, "product": "NVIDIA-H100-80GB-HBM3"},
    "resources": {"limits": {"cpu": 8, "memory": "64Gi"}, "requests": {"cpu": "4", "memory": "32Gi"}},
    "image": "registry/runtime:1",
    "env": [
        {"name": "HF_ENDPOINT", "value": "https://mirror"},
        {"name": "X", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ],
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoExecute", "tolerationSeconds": 60}],
    "template": {"spec": {"priorityClassName": "high"}},
}


def settings(**environment):
    return load_settings(ENVIRONMENT | {f"PACELINE_{name}": value for name, value in environment.items()})


def body(spec=None, *, name="chat", namespace="team-a", uid="uid-1", generation=1, status=None):
    meta = {"name": name, "namespace": namespace, "uid": uid, "generation": generation, "resourceVersion": "1"}
    found = {"apiVersion": "paceline.io/v1alpha1", "kind": "InferenceService", "metadata": meta}
    found["spec"] = copy.deepcopy(MINIMAL if spec is None else spec)
    return found | ({"status": status} if status else {})


def service(spec=None, **identity):
    return parse_service(body(spec, **identity))


def now():
    return datetime(2030, 1, 1, tzinfo=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def set_at(document, path, value):
    """Return a copy of `document` with `value` at a dotted path; list indices are numbers."""
    changed = copy.deepcopy(document)
    *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    target = changed
    for part in parents:
        target = target[part] if isinstance(part, int) else target.setdefault(part, {})
    target[last] = value
    return changed


def loose_crd(kind, group, plural, version="v1alpha1"):
    """Return the CRD of somebody else's kind, of which any content is fine."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [served]},
    }
