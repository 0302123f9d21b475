"""The Node object and its Lease, as the API shows this machine. Pure but for reading what the machine has."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version

import psutil

from paceline_local.manifests import Manifest, micro_timestamp, timestamp

__all__ = ["LEASE_NAMESPACE", "LEASE_SECONDS", "NODE_NAME", "lease", "machine_resources", "node_manifest", "node_status"]

NODE_NAME = "local"
LEASE_NAMESPACE = "kube-node-lease"
LEASE_SECONDS = 40
_MAX_PODS = 110


def machine_resources() -> dict[str, str]:
    """Return what the machine has, in the API's units. Accelerators aren't offered: nothing here would divide them."""
    return {
        "cpu": str(os.cpu_count() or 1),
        "memory": f"{psutil.virtual_memory().total // 1024}Ki",
        "pods": str(_MAX_PODS),
    }


def node_manifest() -> Manifest:
    """Return the Node to create."""
    labels = {
        "kubernetes.io/hostname": NODE_NAME,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
        "paceline.io/local": "true",
    }
    return {"metadata": {"name": NODE_NAME, "labels": labels}, "spec": {}}


def node_status(address: str, resources: Mapping[str, str], since: float, now: float) -> Manifest:
    """Return the Node's status: ready since `since`."""
    conditions = [
        _condition("MemoryPressure", "False", "KubeletHasSufficientMemory", since, now),
        _condition("DiskPressure", "False", "KubeletHasNoDiskPressure", since, now),
        _condition("PIDPressure", "False", "KubeletHasSufficientPID", since, now),
        _condition("Ready", "True", "AgentReady", since, now),
    ]
    return {
        "capacity": dict(resources),
        "allocatable": dict(resources),
        "addresses": [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": NODE_NAME}],
        "conditions": conditions,
        "nodeInfo": {
            "architecture": platform.machine(),
            "bootID": "",
            "containerRuntimeVersion": "process://1",
            "kernelVersion": platform.release(),
            "kubeProxyVersion": "",
            "kubeletVersion": f"paceline-{version('paceline')}",
            "machineID": "",
            "operatingSystem": "linux",
            "osImage": platform.platform(),
            "systemUUID": "",
        },
    }


def _condition(kind: str, status: str, reason: str, since: float, now: float) -> Manifest:
    times = {"lastHeartbeatTime": timestamp(now), "lastTransitionTime": timestamp(since)}
    return {"type": kind, "status": status, "reason": reason, "message": reason} | times


def lease(now: float | None = None) -> Manifest:
    """Return the Lease whose renewal says that the node lives."""
    renewed = micro_timestamp(time.time() if now is None else now)
    spec = {"holderIdentity": NODE_NAME, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": renewed}
    return {"metadata": {"name": NODE_NAME, "namespace": LEASE_NAMESPACE}, "spec": spec}
