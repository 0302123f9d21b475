"""Certificates, keys and the kubeconfig that a real kube-apiserver needs; the embedded one makes its own."""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline_local.apiserver.certificates import write_private

__all__ = ["write_pki"]

_VALID = dt.timedelta(days=825)
_PEM = serialization.Encoding.PEM
_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")


def write_pki(folder: Path, host: str, service_ip: str, server: str, kubeconfig: Path) -> None:
    """Write a new authority, the server's certificate, the key of service accounts and an administrator's kubeconfig.

    Everything is made anew at each start but the service accounts' key, which signs what outlives the server.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority = _Authority()
    write_private(folder / "ca.crt", authority.pem)
    addresses = [x509.IPAddress(ipaddress.ip_address(a)) for a in (host, "127.0.0.1", service_ip)]
    names = x509.SubjectAlternativeName([*(x509.DNSName(name) for name in _NAMES), *addresses])
    certificate, key = authority.issue("kube-apiserver", None, ExtendedKeyUsageOID.SERVER_AUTH, names)
    write_private(folder / "server.crt", certificate)
    write_private(folder / "server.key", key)
    _write_account_key(folder)
    # system:masters is what RBAC lets do everything
    certificate, key = authority.issue("paceline-local", "system:masters", ExtendedKeyUsageOID.CLIENT_AUTH, None)
    if kubeconfig.is_symlink():  # of an embedded control plane that was here before
        kubeconfig.unlink()
    write_private(kubeconfig, _kubeconfig(server, authority.pem, certificate, key).encode())


class _Authority:
    """A certificate authority that lives as long as this object: its key is never written."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "paceline-local-ca")])
        builder = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        usage = _usage(key_cert_sign=True, crl_sign=True)
        self.pem = builder.add_extension(usage, True).sign(self._key, hashes.SHA256()).public_bytes(_PEM)

    def issue(
        self, common: str, group: str | None, purpose: x509.ObjectIdentifier, names: x509.SubjectAlternativeName | None
    ) -> tuple[bytes, bytes]:
        """Return a certificate and its key as PEM."""
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
        attributes += [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(x509.Name(attributes), key).add_extension(x509.ExtendedKeyUsage([purpose]), False)
        builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False)
        if names is not None:
            builder = builder.add_extension(names, False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM), _private(key)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        builder = x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - dt.timedelta(minutes=5)).not_valid_after(now + _VALID)
        return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)


def _usage(*, key_cert_sign: bool, crl_sign: bool) -> x509.KeyUsage:
    off = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
        **off,
    )


def _private(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())


def _write_account_key(folder: Path) -> None:
    if (folder / "sa.pub").exists():
        return
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = key.public_key().public_bytes(_PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    write_private(folder / "sa.key", _private(key))
    write_private(folder / "sa.pub", public)


def _kubeconfig(server: str, authority: bytes, certificate: bytes, key: bytes) -> str:
    name = "paceline-local"
    user = {
        "client-certificate-data": base64.b64encode(certificate).decode(),
        "client-key-data": base64.b64encode(key).decode(),
    }
    cluster = {"server": server, "certificate-authority-data": base64.b64encode(authority).decode()}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": "default"}}],
        "current-context": name,
    }
    return yaml.safe_dump(document, sort_keys=False)
