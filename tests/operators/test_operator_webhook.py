"""The admission webhook: its answers as data, its certificates over the years, and the whole of it on a real API server."""

import base64
import json
import ssl
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from kubernetes import client, config
from operator_kit import MINIMAL, body, set_at, settings
from test_operator_class import cls

from embedded import embedded_server
from paceline_operator.admission import review
from paceline_operator.certificates import expiry, issue, next_bundle, read_bundle
from paceline_operator.classes import ClassBook
from paceline_operator.errors import SettingsError
from paceline_operator.metrics import Metrics
from paceline_operator.transport import Answer
from paceline_operator.webhook import ClassReader, Webhook
from paceline_operator.webhook_certificates import CertificateKeeper, FileSource, SecretSource

NAMES = ["127.0.0.1", "paceline-webhook.ml.svc"]
NOW = datetime(2030, 1, 1, tzinfo=UTC)
BAD = MINIMAL | {"image": "evil", "env": [{"name": "POD_IP", "value": "x"}]}


def asked(item, old=None, classes=(), **environment):
    request = {
        "uid": "u-1",
        "kind": {"group": "paceline.io", "version": "v1alpha1", "kind": item["kind"]},
        "name": item["metadata"].get("name", ""),
        "namespace": item["metadata"].get("namespace", ""),
        "operation": "UPDATE" if old else "CREATE",
        "object": item,
        "oldObject": old,
    }
    data = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    found = review(data, ClassBook(classes), settings(**environment))
    assert found["response"]["uid"] == "u-1"
    return found["response"]


def test_what_can_be_used_is_let_through():
    assert asked(body()) == {"uid": "u-1", "allowed": True}
    assert asked(cls())["allowed"]


def test_every_problem_is_told_at_once_with_its_field():
    found = asked(body(BAD))
    assert not found["allowed"]
    status = found["status"]
    assert (status["code"], status["reason"]) == (422, "Invalid")
    assert [cause["field"] for cause in status["details"]["causes"]] == ["spec.image", "spec.env[0].name"]
    assert "2 problems" in status["message"]
    assert "'evil' (image isn't allowed): leave it out" in status["message"]


def test_a_class_is_checked_by_its_own_rules():
    found = asked(cls({"limits": {"knobs": {"maxNumSeqs": {"min": 9, "max": 3}}}}))
    assert "spec.limits.knobs.maxNumSeqs" in found["status"]["message"]


def test_limits_of_the_class_count():
    spec = MINIMAL | {"className": "gpu", "replicas": 5}
    assert "class gpu: at most 4" in asked(body(spec), classes=[cls({"limits": {"maxReplicas": 4}})])["status"]["message"]


@pytest.mark.parametrize("classes", [(), (cls({"limits": {"strategies": []}}),)])
def test_a_class_that_is_missing_or_broken_is_a_warning_for_it_may_come_later(classes):
    found = asked(body(MINIMAL | {"className": "gpu"}), classes=classes)
    assert found["allowed"]
    assert "spec.className" in found["warnings"][0]


def test_what_was_stored_before_a_rule_can_still_be_labelled_and_deleted_but_not_edited_wrongly():
    old = body(BAD)
    labelled = set_at(old, "metadata.labels", {"a": "b"})
    assert asked(labelled, old)["allowed"]
    going = set_at(set_at(old, "metadata.deletionTimestamp", "2030-01-01T00:00:00Z"), "spec.replicas", 3)
    assert asked(going, old)["allowed"]
    assert not asked(set_at(old, "spec.replicas", 3), old)["allowed"]


def test_an_object_without_a_name_yet_is_checked_too():
    item = body()
    item["metadata"] = {"generateName": "x-"}
    assert asked(item)["allowed"]
    assert not asked(item | {"spec": BAD})["allowed"]


@pytest.mark.parametrize("spec", [None, [], "x", {"model": []}, {"model": {"uri": 3}, "slo": "x"}])
def test_a_malformed_object_is_refused_not_crashed_on(spec):
    assert not asked(body() | {"spec": spec})["allowed"]


@pytest.mark.parametrize(
    "data",
    [None, [], {}, {"request": None}, {"request": {}}, {"apiVersion": "admission.k8s.io/v1beta1", "request": {"uid": "x"}}],
)
def test_what_is_no_review_is_a_bad_request(data):
    with pytest.raises(ValueError):
        review(data, ClassBook(), settings())


def under(bundle, trusted, now):
    """Return whether a client that trusts `trusted` takes the bundle's certificate at `now`."""
    serving = x509.load_pem_x509_certificates(bundle.serving)[0]
    authorities = [c for c in x509.load_pem_x509_certificates(trusted) if c.subject == serving.issuer]
    for authority in authorities:
        serving.verify_directly_issued_by(authority)
    valid = [c.not_valid_before_utc <= now <= c.not_valid_after_utc for c in (serving, *authorities)]
    return bool(authorities) and all(valid)


def test_over_twelve_years_the_certificate_is_always_valid_and_trusted():
    """Three days a step: so late the API server learns of new authorities, and the replicas show what was there before."""
    bundle = issue(NAMES, NOW)
    trusted, shown, seen = bundle.authorities, bundle, set()
    for day in range(0, 12 * 365, 3):
        now = NOW + timedelta(days=day)
        assert under(shown, trusted, now), f"day {day}"
        shown = bundle
        step = next_bundle(bundle, NAMES, trusted, now)
        trusted = bundle.authorities
        if step != bundle:
            assert read_bundle(step.data()) == step
            seen.add("authority" if step.serving == bundle.serving else "serving")
            bundle = step
    assert seen == {"authority", "serving"}
    assert len(x509.load_pem_x509_certificates(bundle.authorities)) == 1  # the first is over by now


def test_other_names_and_a_foreign_authority_lead_to_a_new_certificate():
    bundle = issue(NAMES, NOW)
    assert next_bundle(bundle, NAMES, bundle.authorities, NOW) == bundle
    other = next_bundle(bundle, ["other.svc"], bundle.authorities, NOW)
    assert other.serving != bundle.serving and other.authorities == bundle.authorities
    assert next_bundle(bundle, ["other.svc"], b"", NOW) == bundle  # not before the authority is trusted


@pytest.mark.parametrize("name", ["ca.crt", "ca.key", "tls.crt", "tls.key"])
@pytest.mark.parametrize("value", [None, b"", b"junk", "other"])
def test_a_broken_secret_counts_as_none(name, value):
    data = issue(NAMES, NOW).data()
    if value is None:
        del data[name]
    else:
        data[name] = issue(NAMES, NOW).data()[name] if value == "other" else value
    assert read_bundle(data) is None


@pytest.mark.parametrize("kind", ["EC", "RSA"])
def test_certificates_that_somebody_else_made_are_replaced(kind):
    key = ec.generate_private_key(ec.SECP256R1()) if kind == "EC" else rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "by hand")])
    blank = x509.CertificateBuilder(name, name, key.public_key(), 1, NOW, NOW + timedelta(days=365))
    made = blank.sign(key, hashes.SHA256())
    pem = made.public_bytes(serialization.Encoding.PEM)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    parts = pem, key.private_bytes(*form), pem, key.private_bytes(*form)
    found = read_bundle(dict(zip(("ca.crt", "ca.key", "tls.crt", "tls.key"), parts, strict=True)))
    assert found is None or next_bundle(found, NAMES, pem, NOW).serving != pem


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with embedded_server(tmp_path_factory.mktemp("webhook")) as found:
        yield found


def configuration(server):
    found = client.Configuration()
    found.retries = False
    config.load_kube_config(str(server.kubeconfig), client_configuration=found)
    return found


class Clock:
    def __init__(self):
        self.now = datetime.now(UTC)

    def __call__(self):
        return self.now


def source(server, secret, **environment):
    names = {"WEBHOOK_PORT": "1", "WEBHOOK_NAMES": ",".join(NAMES), "OPERATOR_NAMESPACE": "default"}
    return SecretSource(configuration(server), settings(**names, WEBHOOK_SECRET=secret, **environment), Metrics())


def secret_of(server, name):
    api = client.CoreV1Api(config.new_client_from_config(config_file=str(server.kubeconfig)))
    return {key: base64.b64decode(value) for key, value in api.read_namespaced_secret(name, "default").data.items()}


def test_replicas_share_one_secret_and_renew_it_once(server):
    clock = Clock()
    keepers = [CertificateKeeper(source(server, "shared"), Metrics(), clock) for _ in range(2)]
    assert [keeper.look() for keeper in keepers] == [True, True]
    first = keepers[0]._loaded
    assert keepers[1]._loaded == first
    clock.now += timedelta(days=70)  # of 90
    assert all(keeper.look() for keeper in keepers)
    assert keepers[0]._loaded == keepers[1]._loaded != first
    assert secret_of(server, "shared")["tls.crt"] == keepers[0]._loaded[0]


def test_a_secret_that_was_spoilt_is_made_anew(server):
    keeper = CertificateKeeper(source(server, "spoilt"), Metrics())
    keeper.look()
    before = keeper._loaded
    api = client.CoreV1Api(config.new_client_from_config(config_file=str(server.kubeconfig)))
    api.patch_namespaced_secret("spoilt", "default", {"data": {"tls.crt": base64.b64encode(b"junk").decode()}})
    assert keeper.look()
    assert keeper._loaded != before
    assert read_bundle(secret_of(server, "spoilt")) is not None


def test_rights_that_are_missing_are_one_clear_error(server):
    found = source(server, "refused")
    found._call = lambda *_: Answer(403, "secrets is forbidden")
    with pytest.raises(SettingsError, match="refused to us"):
        CertificateKeeper(found, Metrics()).start()


def post(port, authorities, data, path="/validate"):
    context = ssl.create_default_context(cadata=authorities.decode())
    request = urllib.request.Request(
        f"https://127.0.0.1:{port}{path}", data if isinstance(data, bytes) else json.dumps(data).encode()
    )
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def reviewed(item):
    kind = {"group": "paceline.io", "version": "v1alpha1", "kind": item["kind"]}
    request = {"uid": "u", "kind": kind, "name": "x", "namespace": "default", "operation": "CREATE", "object": item}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def test_certificates_from_files_are_taken_over_without_a_restart(tmp_path):
    def write(bundle):
        (tmp_path / "tls.crt").write_bytes(bundle.serving)
        (tmp_path / "tls.key").write_bytes(bundle.serving_key)

    now = datetime.now(UTC)
    first, second = issue(NAMES, now), issue(NAMES, now)
    write(first)
    metrics = Metrics()
    keeper = CertificateKeeper(FileSource(tmp_path), metrics)
    assert keeper.look()
    webhook = Webhook(settings(WEBHOOK_HOST="127.0.0.1", CLASSES="false"), metrics, lambda _: ClassBook(), keeper.context)
    webhook.start()
    try:
        status, answer = post(webhook.port, first.authorities, reviewed(body(BAD)))
        assert (status, answer["response"]["allowed"]) == (200, False)
        write(second)
        assert keeper.look()
        assert post(webhook.port, second.authorities, reviewed(body()))[1]["response"]["allowed"]
        with pytest.raises(urllib.error.URLError):
            post(webhook.port, first.authorities, reviewed(body()))
        (tmp_path / "tls.key").write_bytes(first.serving_key)  # half of a renewal
        (tmp_path / "tls.crt").write_bytes(b"junk")
        assert keeper.look()  # keeps what it has
        assert post(webhook.port, second.authorities, reviewed(body()))[0] == 200
        for data in (b"junk", b"[]", b"{}", b'{"request": {"uid": 3}}'):
            assert post(webhook.port, second.authorities, data)[0] == 400
    finally:
        webhook.stop()
    refused = metrics.admission.labels("InferenceService", "refused")._value.get()
    assert (refused, metrics.admission.labels("other", "malformed")._value.get()) == (1, 4)
    assert metrics.certificate_expiry._value.get() == expiry(second.serving).timestamp()


def test_classes_that_a_review_uses_never_change_under_it(monkeypatch):
    """Reviews run on the server's thread, while another reads the classes anew for the next ones."""
    lists = iter([[cls(), cls(name="gone")], [cls()]])
    monkeypatch.setattr("paceline_operator.webhook.send", lambda *_, **__: Answer(200, "", {"items": next(lists)}))
    reader = ClassReader(client.Configuration(), Metrics())
    used = reader(newest=True)
    assert reader(newest=True).of(body(MINIMAL | {"className": "gpu"})) is not None
    assert used.of(body(MINIMAL | {"className": "gone"})) is not None


def test_classes_that_cannot_be_read_are_an_error_for_the_failure_policy(server):
    """The embedded server has no such kind here, and a wrong answer would let anything pass."""
    keeper = CertificateKeeper(source(server, "classes"), Metrics())
    keeper.look()
    reader = ClassReader(configuration(server), Metrics())
    webhook = Webhook(settings(WEBHOOK_HOST="127.0.0.1"), Metrics(), reader, keeper.context)
    webhook.start()
    try:
        status, answer = post(webhook.port, secret_of(server, "classes")["ca.crt"], reviewed(body()))
        assert (status, "can't be read" in answer) == (503, True)
    finally:
        webhook.stop()
