"""Pods and Deployments in the states that a kubelet and a controller leave them in."""

from paceline_operator.names import RESTART_HASH, REVISION, SERVICE_LABEL


def pod(
    name="chat-1", *, state=None, last=None, restarts=0, ready=False, node="node-1", conditions=(), phase="Running", **meta
):
    """Return a pod of service `chat`; `state` and `last` are the runtime container's (None: no container status yet)."""
    status = {"phase": phase, "podIP": "10.0.0.1", "conditions": [*conditions]}
    status["conditions"].append({"type": "Ready", "status": "True" if ready else "False"})
    if state is not None:
        container = {"name": "runtime", "state": state, "lastState": last or {}, "restartCount": restarts, "ready": ready}
        status["containerStatuses"] = [
            container | {"containerID": f"containerd://{name}-{restarts}", "image": "registry/runtime:1"}
        ]
    metadata = {
        "name": name,
        "namespace": "team-a",
        "uid": f"uid-{name}",
        "labels": {SERVICE_LABEL: "chat"},
        "annotations": {RESTART_HASH: "hash"},
        **meta,
    }
    limits = {"resources": {"limits": {"memory": "2Gi"}}}
    spec = {"containers": [{"name": "runtime", **limits}], **({"nodeName": node} if node else {})}
    return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


def running(name="chat-1", **options):
    return pod(name, state={"running": {"startedAt": "2030-01-01T00:00:00Z"}}, ready=True, **options)


def waiting(reason, message="", name="chat-1", **options):
    return pod(name, state={"waiting": {"reason": reason, "message": message}}, **options)


def ended(code, message="", reason="Error"):
    return {"terminated": {"exitCode": code, "message": message, "reason": reason}}


def unschedulable(message):
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return pod(node=None, conditions=[scheduled], phase="Pending")


def deployment(*, replicas=1, ready=0, updated=None, total=None, seen=True, uid="uid-1", revision=1, surge=1, template=None):
    updated = replicas if updated is None else updated
    status = {
        "observedGeneration": 1 if seen else 0,
        "replicas": updated if total is None else total,
        "updatedReplicas": updated,
    }
    return {
        "kind": "Deployment",
        "metadata": {
            "name": "chat",
            "namespace": "team-a",
            "generation": 1,
            "annotations": {"deployment.kubernetes.io/revision": str(revision)},
            "ownerReferences": [{"uid": uid, "controller": True}],
        },
        "spec": {
            "replicas": replicas,
            "strategy": {"rollingUpdate": {"maxSurge": surge}},
            "template": {"metadata": {"annotations": {REVISION: template}}} if template else {},
        },
        "status": status | ({"readyReplicas": ready} if ready else {}),
    }
