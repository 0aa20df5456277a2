"""Keys and certificates for a federation over TLS: a private authority, one server certificate, one key for each node.

    ca.crt               the authority's certificate; goes to every client, which trusts what it signed
    ca.key               the authority's key; stays with whoever runs the federation
    server.pem, .key     what the server shows, signed by the authority
    a node's key, .pub   how a client proves who it is; the .pub is registered with the server

`cryptography` comes with Flower, so it is imported where it is used.
"""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from priory.core.errors import UsageError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

ALWAYS = ("localhost", "127.0.0.1")
FILES = ("ca.crt", "ca.key", "server.pem", "server.key")


def write_authority(
    directory: Path, hosts: Sequence[str] = (), days: int = 365, start: datetime.datetime | None = None
) -> None:
    """Writes a new authority and a server certificate signed by it: ca.crt, ca.key, server.pem, server.key.

    Args:
        hosts: DNS names and IP addresses by which clients call the server; localhost and 127.0.0.1 are always added.
        days: How long both certificates hold.
        start: When they begin to hold; now, unless given.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.x509.oid import ExtendedKeyUsageOID

    if days < 1:
        raise UsageError(f"days={days} is no life for a certificate; choose 1 or more.")
    names = [_general_name(host) for host in dict.fromkeys([*ALWAYS, *hosts])]
    _refuse_to_overwrite(*(directory / name for name in FILES))
    directory.mkdir(parents=True, exist_ok=True)

    authority_key, server_key = _new_key(), _new_key()
    # Ten minutes early, so that a client whose clock is slow by as much as Flower allows can connect at once.
    begin = (start or datetime.datetime.now(datetime.UTC)) - datetime.timedelta(minutes=10)
    span = begin, begin + datetime.timedelta(days=days)
    authority = (
        _blank("Priory authority", "Priory authority", authority_key, span)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(authority_key, hashes.SHA384())
    )
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    server = (
        _blank("Priory server", "Priory authority", server_key, span)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    for name, certificate, key in (("ca.crt", authority, authority_key), ("server.pem", server, server_key)):
        _write(directory / name, certificate.public_bytes(serialization.Encoding.PEM), secret=False)
        _write((directory / name).with_suffix(".key"), _private_bytes(key, for_ssh=False), secret=True)


def write_node_key(path: Path) -> None:
    """Writes a new private key in OpenSSH's format, as a SuperNode wants it, and its public half beside it as .pub."""
    from cryptography.hazmat.primitives import serialization

    public = path.with_name(path.name + ".pub")
    _refuse_to_overwrite(path, public)
    path.parent.mkdir(parents=True, exist_ok=True)
    key = _new_key()
    _write(path, _private_bytes(key, for_ssh=True), secret=True)
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(public, line + b"\n", secret=False)


def check_certificates(directory: Path, now: datetime.datetime | None = None) -> None:
    """Returns nothing if a server can start with the certificates in a directory; otherwise says what is wrong.

    The authority's key is not needed for that, so it may be kept elsewhere.
    """
    from cryptography.exceptions import InvalidSignature

    missing = [name for name in FILES if name != "ca.key" and not (directory / name).is_file()]
    if missing:
        raise UsageError(f"{directory} lacks {', '.join(missing)}; write certificates there first.")
    now = now or datetime.datetime.now(datetime.UTC)
    authority, server = _read(directory / "ca.crt"), _read(directory / "server.pem")
    for name, certificate in (("ca.crt", authority), ("server.pem", server)):
        first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if now < first:
            raise UsageError(f"{directory / name} holds only from {first}, and it is {now}; set the clock or wait.")
        if now > last:
            raise UsageError(f"{directory / name} expired on {last}, and it is {now}; write new certificates.")
    try:
        server.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise UsageError(
            f"{directory / 'server.pem'} was not signed by the authority in ca.crt; "
            "take both from one authority, or write new certificates."
        ) from None
    if _public_half(directory / "server.key") != server.public_key():
        raise UsageError(
            f"{directory / 'server.key'} does not belong to server.pem; take both from one place, or write new ones."
        )


def _general_name(host: str) -> "x509.GeneralName":
    """A host as it stands in a certificate: an address if it reads like one, otherwise a name."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host or not host.isascii() or any(not (c.isalnum() or c in "-.*") for c in host):
        raise UsageError(f"host {host!r} is neither a DNS name nor an IP address; give it without scheme or port.")
    return x509.DNSName(host)


def _blank(
    subject: str, issuer: str, key: "ec.EllipticCurvePrivateKey", span: tuple[datetime.datetime, datetime.datetime]
) -> "x509.CertificateBuilder":
    """What both certificates share, before anybody signs."""
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(span[0])
        .not_valid_after(span[1])
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common: str) -> "x509.Name":
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, common)])


def _usage(signs_certificates: bool) -> "x509.KeyUsage":
    """For the authority signing certificates, for the server signing handshakes, and nothing else."""
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _new_key() -> "ec.EllipticCurvePrivateKey":
    """A key on P-384, the curve Flower asks of its nodes."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _private_bytes(key: "ec.EllipticCurvePrivateKey", for_ssh: bool) -> bytes:
    """An unencrypted private key as text, in OpenSSH's format or in the one TLS servers read."""
    from cryptography.hazmat.primitives import serialization

    form = serialization.PrivateFormat.OpenSSH if for_ssh else serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _read(path: Path) -> "x509.Certificate":
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise UsageError(f"{path} holds no certificate in PEM format; write new certificates.") from None


def _public_half(path: Path) -> object:
    """The public key of the private key in a file."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return load_pem_private_key(path.read_bytes(), None).public_key()
    except (ValueError, TypeError):
        raise UsageError(f"{path} holds no unencrypted key in PEM format; write new certificates.") from None


def _refuse_to_overwrite(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise UsageError(f"{path} exists, and keys are never overwritten; delete it or choose another directory.")


def _write(path: Path, content: bytes, secret: bool) -> None:
    """Writes a new file; a secret one can never be read by others, not even for the moment before a `chmod`."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(content)
