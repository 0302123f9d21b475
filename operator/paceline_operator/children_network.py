"""Children that lead to the pods, or keep others away: Service, NetworkPolicy, InferencePool, HTTPRoute. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from paceline_operator.api_kinds import Apis
from paceline_operator.children import Manifest
from paceline_operator.names import base_name, selector
from paceline_operator.pod import ADMIN_PORT, HTTP_PORT
from paceline_operator.settings import Settings
from paceline_operator.spec import InferenceService
from paceline_operator.spec_platform import EndpointPicker, Gateway, NetworkRules, Routing

__all__ = ["OPERATOR_LABELS", "network_children", "service_content"]

OPERATOR_LABELS = {"app.kubernetes.io/name": "paceline-operator"}  # of the operator's own pods (the chart's)
_NAMESPACE_LABEL = "kubernetes.io/metadata.name"  # every namespace carries its name since Kubernetes 1.21


def service_content(service: InferenceService) -> Manifest:
    """Return the Service: the stable name in front of the pods."""
    port = {"name": "http", "port": HTTP_PORT, "protocol": "TCP", "targetPort": "http"}
    return {"spec": {"type": "ClusterIP", "selector": selector(service.name), "ports": [port]}}


def network_children(service: InferenceService, settings: Settings, apis: Apis) -> Iterator[tuple[str, Manifest]]:
    """Yield kind and content of what the spec wants beside the Service."""
    rules, routing = service.spec.network_policy or NetworkRules(), service.spec.routing or Routing()
    if rules.enabled and settings.operator_namespace:
        yield "NetworkPolicy", {"spec": _network_policy(service, rules, settings, apis)}
    if routing.endpoint_picker:
        yield "InferencePool", {"spec": _inference_pool(service, routing.endpoint_picker)}
    if routing.gateway:
        yield "HTTPRoute", {"spec": _http_route(service, routing, routing.gateway)}


def _network_policy(service: InferenceService, rules: NetworkRules, settings: Settings, apis: Apis) -> Manifest:
    """Let clients reach the API, and only the operator the admin port."""
    public: Manifest = {"ports": [{"port": HTTP_PORT, "protocol": "TCP"}]}
    if rules.clients:
        public["from"] = [dict(peer) for peer in rules.clients]
    operator = {
        "namespaceSelector": _operator_namespace(settings, apis),
        "podSelector": {"matchLabels": OPERATOR_LABELS},
    }
    admin = {"ports": [{"port": ADMIN_PORT, "protocol": "TCP"}], "from": [operator]}
    return {
        "podSelector": {"matchLabels": selector(service.name)},
        "policyTypes": ["Ingress"],
        "ingress": [public, admin],
    }


def _operator_namespace(settings: Settings, apis: Apis) -> Manifest:
    """Select the operator's namespace by name; servers without policy/v1 (before 1.21) don't label namespaces so, and there
    the labels of the operator's pods have to do."""
    labelled = apis.versions.get("PodDisruptionBudget") == "policy/v1"
    return {"matchLabels": {_NAMESPACE_LABEL: settings.operator_namespace}} if labelled else {}


def _inference_pool(service: InferenceService, picker: EndpointPicker) -> Manifest:
    return {
        "selector": {"matchLabels": selector(service.name)},
        "targetPorts": [{"number": HTTP_PORT}],
        "endpointPickerRef": {
            "group": "",
            "kind": "Service",
            "name": picker.name,
            "port": {"number": picker.port},
            "failureMode": picker.failure_mode,
        },
    }


def _http_route(service: InferenceService, routing: Routing, gateway: Gateway) -> Manifest:
    """Route everything; without a request timeout, because a long generation isn't a fault."""
    parent = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": gateway.name}
    parent |= {"namespace": gateway.namespace} if gateway.namespace else {}
    parent |= {"sectionName": gateway.section_name} if gateway.section_name else {}
    base = base_name(service.name)
    backend: Manifest = {"group": "", "kind": "Service", "name": base, "port": HTTP_PORT, "weight": 1}
    if routing.endpoint_picker:
        backend = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": base, "weight": 1}
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        "backendRefs": [backend],
        "timeouts": {"request": "0s"},
    }
    hosts: Manifest = {"hostnames": list(routing.hostnames)} if routing.hostnames else {}
    return {"parentRefs": [parent], "rules": [rule]} | hosts
