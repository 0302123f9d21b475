"""The server's own certificate authority, its token and the kubeconfig: all private to the user who runs it."""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import os
import secrets
import ssl
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

__all__ = ["read_token", "tls_context", "write_kubeconfig", "write_private"]

_VALID = dt.timedelta(days=825)
_RENEW = dt.timedelta(days=30)


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read, atomically."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    fresh.rename(path)


def read_token(state: Path) -> str:
    """Return the bearer token of this state folder, made at the first start."""
    path = state / "token"
    if not path.exists():
        write_private(path, secrets.token_urlsafe(32).encode())
    return path.read_text().strip()


def tls_context(state: Path, host: str) -> ssl.SSLContext:
    """Return the server side of TLS, with certificates made when there are none or they end soon."""
    authority, certificate = state / "ca.crt", state / "server.pem"
    if not (authority.exists() and certificate.exists() and _fresh(certificate, host)):
        _issue(authority, certificate, host)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def write_kubeconfig(state: Path, server: str, token: str) -> Path:
    """Write `kubeconfig` for this server and return its path."""
    authority = base64.b64encode((state / "ca.crt").read_bytes()).decode()
    name = "paceline-local"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": server, "certificate-authority-data": authority}}],
        "users": [{"name": name, "user": {"token": token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": "default"}}],
        "current-context": name,
    }
    path = state / "kubeconfig"
    write_private(path, yaml.safe_dump(document, sort_keys=False).encode())
    return path


def _fresh(path: Path, host: str) -> bool:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    covered = ipaddress.ip_address(host) in names.get_values_for_type(x509.IPAddress)
    return covered and certificate.not_valid_after_utc - dt.datetime.now(dt.UTC) > _RENEW


def _issue(authority: Path, certificate: Path, host: str) -> None:
    """Make a new authority and one certificate; the authority's key is thrown away, so it can sign nothing else."""
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = _name("paceline-local-ca")
    ca = _builder(issuer, issuer, ca_key).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    ca = ca.add_extension(_usage(signs=True), critical=True)
    addresses = {ipaddress.ip_address(host), ipaddress.ip_address("127.0.0.1")}
    names = [x509.DNSName("localhost"), *(x509.IPAddress(address) for address in sorted(addresses, key=str))]
    leaf = _builder(_name("paceline-local"), issuer, key).add_extension(x509.SubjectAlternativeName(names), critical=False)
    leaf = leaf.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    leaf = leaf.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    ca = ca.add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_private(certificate, leaf.sign(ca_key, hashes.SHA256()).public_bytes(pem) + secret)
    write_private(authority, ca.sign(ca_key, hashes.SHA256()).public_bytes(pem))


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    return builder.not_valid_before(now - dt.timedelta(minutes=5)).not_valid_after(now + _VALID)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _usage(*, signs: bool) -> x509.KeyUsage:
    off = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    return x509.KeyUsage(
        digital_signature=True, key_cert_sign=signs, crl_sign=signs, encipher_only=False, decipher_only=False, **off
    )
