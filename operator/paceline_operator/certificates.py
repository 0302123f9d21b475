"""Certificates of the webhook, as data: a certificate authority of our own and a serving certificate under it. Pure.

Both stand in one Secret that all replicas share, so that each shows a certificate that the API server trusts. They are
renewed in steps, each of which leaves a state that works: a new authority is first trusted beside the old one, and only then
signs the serving certificate.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

__all__ = ["Bundle", "expiry", "issue", "next_bundle", "read_bundle"]

_AUTHORITY = timedelta(days=3650)
_SERVING = timedelta(days=90)
_EARLY = 3  # renewed when a third of the lifetime is left
_SKEW = timedelta(minutes=5)  # a certificate is valid a little before it is made, for clocks that run late
_NAMES = ("ca.crt", "ca.key", "tls.crt", "tls.key")


@dataclass(frozen=True, slots=True)
class Bundle:
    """PEM texts. `authorities` are those to trust, the one that signs first, with `authority_key`; `serving` is under one of
    them."""

    authorities: bytes
    authority_key: bytes
    serving: bytes
    serving_key: bytes

    def data(self) -> dict[str, bytes]:
        """Return the Secret's entries."""
        return dict(zip(_NAMES, (self.authorities, self.authority_key, self.serving, self.serving_key), strict=True))


def read_bundle(data: dict[str, bytes]) -> Bundle | None:
    """Return the bundle of a Secret's entries; None if they can't be used, and a new one has to take their place."""
    try:
        bundle = Bundle(*(data[name] for name in _NAMES))
        signer, serving = _certificates(bundle.authorities)[0], _certificates(bundle.serving)[0]
        keys = [serialization.load_pem_private_key(key, None) for key in (bundle.authority_key, bundle.serving_key)]
    except (KeyError, ValueError, IndexError, TypeError):
        return None
    fits = all(key.public_key() == cert.public_key() for key, cert in zip(keys, (signer, serving), strict=True))
    return bundle if fits and isinstance(keys[0], ec.EllipticCurvePrivateKey) else None


def issue(names: Sequence[str], now: datetime) -> Bundle:
    """Return a whole new bundle for a server of these names."""
    key, authority = _authority(now)
    bundle = Bundle(_pem(authority), _key_pem(key), b"", b"")
    return _with_serving(bundle, names, now)


def next_bundle(bundle: Bundle, names: Sequence[str], trusted: bytes, now: datetime) -> Bundle:
    """Return the next state: `bundle` itself if nothing is due. `trusted` is what the API server trusts at present.

    A new authority comes first; nothing is signed with it before it is trusted. Authorities that are over are dropped.
    """
    authorities = _certificates(bundle.authorities)
    if _is_due(authorities[0], now):
        key, authority = _authority(now)
        kept = [old for old in authorities if old.not_valid_after_utc > now]
        return replace(bundle, authorities=b"".join(map(_pem, [authority, *kept])), authority_key=_key_pem(key))
    serving = _certificates(bundle.serving)[0]
    if _is_due(serving, now) or _names_of(serving) != sorted(set(names)) or not _is_under(serving, authorities[0]):
        return _with_serving(bundle, names, now) if _pem(authorities[0]) in _normal(trusted) else bundle
    fresh = [authority for authority in authorities if authority.not_valid_after_utc > now]
    return bundle if len(fresh) == len(authorities) else replace(bundle, authorities=b"".join(map(_pem, fresh)))


def expiry(pem: bytes) -> datetime:
    """Return when the first certificate of a PEM text ends. Raises `ValueError`."""
    return x509.load_pem_x509_certificates(pem)[0].not_valid_after_utc


def _is_due(certificate: x509.Certificate, now: datetime) -> bool:
    lifetime = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return certificate.not_valid_after_utc - now < lifetime / _EARLY


def _is_under(serving: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        serving.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _with_serving(bundle: Bundle, names: Sequence[str], now: datetime) -> Bundle:
    authority = _certificates(bundle.authorities)[0]
    signer = serialization.load_pem_private_key(bundle.authority_key, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey), "ours are"
    key, until = ec.generate_private_key(ec.SECP256R1()), min(now + _SERVING, authority.not_valid_after_utc)
    built = (
        _builder(_name("paceline-webhook"), authority.subject, key, now, until)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in sorted(set(names))]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    return replace(bundle, serving=_pem(built.sign(signer, hashes.SHA256())), serving_key=_key_pem(key))


def _authority(now: datetime) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return a new authority. Its name is its own, so that two of them side by side aren't mixed up."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"paceline-webhook-ca {secrets.token_hex(4)}")
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    built = (
        _builder(name, name, key, now, now + _AUTHORITY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return key, built.sign(key, hashes.SHA256())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(until)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _names_of(certificate: x509.Certificate) -> list[str]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:  # not one of ours
        return []
    return sorted([*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))])


def _certificates(pem: bytes) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(pem)


def _normal(pem: bytes) -> set[bytes]:
    """Return the certificates of a PEM text one by one, in our own spelling."""
    try:
        return {_pem(certificate) for certificate in _certificates(pem)}
    except ValueError:  # none, or not ours
        return set()


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
