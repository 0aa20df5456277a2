"""Keys and certificates for a federation over TLS: a private authority, one server certificate, one key for each node.

    ca.crt               the authority's certificate, for ten years; goes to every client, which trusts what it signed
    ca.key               the authority's key; stays with whoever runs the federation
    server.pem, .key     what the server shows, signed by the authority for a year and renewed without the clients
    superexec.secret     how the process that starts apps proves itself to the SuperLink; stays on the server
    a node's key, .pub   how a client proves who it is; the .pub is registered with the server (node_keys.py)

`cryptography` comes with Flower, so it is imported where it is used.
"""

import datetime
import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from priory.core.errors import UsageError
from priory.core.files import private_directory, sync_directory

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

ALWAYS = ("localhost", "127.0.0.1")
SECRET = "superexec.secret"
FILES = ("ca.crt", "ca.key", "server.pem", "server.key")
DAYS, AUTHORITY_DAYS, SOON = 365, 3650, 30  # how long certificates are valid, and when to warn of their end
RENEW = "renew the certificate with `priory flower keys renew {}`"
NEW_SET = "make a new set in another directory, and give every node its ca.crt"
EARLY = datetime.timedelta(minutes=10)  # for clients whose clocks are slow by as much as Flower allows
Span = tuple[datetime.datetime, datetime.datetime]


def write_authority(
    directory: Path, hosts: Sequence[str] = (), days: int = DAYS, start: datetime.datetime | None = None
) -> None:
    """Write a new authority and a server certificate signed by it: ca.crt, ca.key, server.pem, server.key.

    Args:
        hosts: DNS names and IP addresses by which clients call the server; localhost and 127.0.0.1 are always added.
        days: How long the server certificate is valid; the authority is for ten years.
        start: When they begin to be valid; now, unless given.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    if not 1 <= days <= AUTHORITY_DAYS:
        raise UsageError(
            f"days={days} does not fit a server certificate, which its authority of {AUTHORITY_DAYS} days has to "
            f"outlive; choose 1 to {AUTHORITY_DAYS}."
        )
    names = [_general_name(host) for host in dict.fromkeys([*ALWAYS, *hosts])]
    _refuse_to_overwrite(*(directory / name for name in FILES))
    private_directory(directory, ours=False)

    begin, key = start or datetime.datetime.now(datetime.UTC), _new_key()
    authority = (
        _blank(_name("Priory authority"), _name("Priory authority"), key, _span(begin, AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .sign(key, hashes.SHA384())
    )
    server, server_key = _server_certificate(names, authority.subject, key, _span(begin, days))
    _write(directory / "ca.crt", _public_bytes(authority), secret=False)
    _write(directory / "ca.key", _private_bytes(key, for_ssh=False), secret=True)
    _write(directory / "server.pem", _public_bytes(server), secret=False)
    _write(directory / "server.key", _private_bytes(server_key, for_ssh=False), secret=True)


def renew_server_certificate(directory: Path, days: int = DAYS, now: datetime.datetime | None = None) -> None:
    """Replace server.pem and server.key by a new certificate with the same names and a new key.

    Both are written in full before the first replaces an old one. A crash between the two replacements leaves a pair
    that `check_certificates` refuses, and calling this again completes it.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    if days < 1:
        raise UsageError(f"days={days} is too short for a server certificate; choose 1 or more.")
    missing = [name for name in ("ca.crt", "ca.key", "server.pem") if not (directory / name).is_file()]
    if missing:
        raise UsageError(
            f"{directory} lacks {', '.join(missing)}, without which the server certificate cannot be renewed; bring "
            "them here from where they are kept, or make a new set in another directory."
        )
    authority, hosts = _read(directory / "ca.crt"), _hosts(_read(directory / "server.pem"))
    key = _private_key(directory / "ca.key")
    if not hosts:
        raise UsageError(f"{directory / 'server.pem'} names no host; make a new set in another directory.")
    if key.public_key() != authority.public_key():
        raise UsageError(f"{directory / 'ca.key'} does not belong to ca.crt; take both from one authority.")
    last = authority.not_valid_after_utc
    if days > (last - now + EARLY).days:  # and not by the date, which may lie beyond the calendar
        left = (last - now).days
        remedy = f"choose days={left} or less, or " if left > 0 else ""
        raise UsageError(
            f"{directory / 'ca.crt'} expires on {last:%Y-%m-%d}, before a server certificate of {days} days; "
            f"{remedy}{NEW_SET}."
        )
    server, server_key = _server_certificate(hosts, authority.subject, key, _span(now, days))
    contents = {"server.key": _private_bytes(server_key, for_ssh=False), "server.pem": _public_bytes(server)}
    for name, content in contents.items():
        draft = directory / f".{name}.new"
        draft.unlink(missing_ok=True)
        _write(draft, content, secret=name == "server.key")
    for name in contents:
        (directory / f".{name}.new").replace(directory / name)
    sync_directory(directory)


@dataclass(frozen=True)
class Certificate:
    """A certificate in a directory.

    Attributes:
        path: Of its file, ca.crt or server.pem.
        until: When it expires.
        hosts: Which it is for; none in an authority's.
    """

    path: Path
    until: datetime.datetime
    hosts: tuple[str, ...]

    def days(self, now: datetime.datetime | None = None) -> int:
        """Return the whole days that are left; negative once it has expired."""
        return (self.until - (now or datetime.datetime.now(datetime.UTC))).days

    def warning(self, now: datetime.datetime | None = None) -> str | None:
        """Return a sentence if it expires soon or has expired."""
        if (days := self.days(now)) >= SOON:
            return None
        when = f"expires in {days} days, on" if days >= 0 else "expired on"
        remedy = RENEW.format(self.path.parent) if self.path.name == "server.pem" else NEW_SET
        return f"{self.path} {when} {self.until:%Y-%m-%d}; {remedy}."


def certificates_in(directory: Path) -> list[Certificate]:
    """Return the certificates of the authority and of the server, as far as they are there."""
    paths = [path for path in (directory / "ca.crt", directory / "server.pem") if path.is_file()]
    read = {path: _read(path) for path in paths}
    return [
        Certificate(path, one.not_valid_after_utc, tuple(str(name.value) for name in _hosts(one)))
        for path, one in read.items()
    ]


def write_node_key(path: Path) -> None:
    """Write a new private key in OpenSSH's format, as a SuperNode wants it, and its public half next to it as .pub."""
    from cryptography.hazmat.primitives import serialization

    public = path.with_name(path.name + ".pub")
    _refuse_to_overwrite(path, public)
    private_directory(path.parent, ours=False)
    key = _new_key()
    _write(path, _private_bytes(key, for_ssh=True), secret=True)
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(public, line + b"\n", secret=False)


def write_secret(path: Path) -> None:
    """Write a new secret by which a SuperLink or SuperNode knows its SuperExec."""
    _refuse_to_overwrite(path)
    _write(path, secrets.token_bytes(32), secret=True)


def check_certificates(directory: Path, now: datetime.datetime | None = None) -> None:
    """Raise unless a server can start with the certificates in a directory.

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
            remedy = NEW_SET if name == "ca.crt" else RENEW.format(directory)
            raise UsageError(f"{directory / name} expired on {last}, and it is {now}; {remedy}.")
    try:
        server.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise UsageError(
            f"{directory / 'server.pem'} was not signed by the authority in ca.crt; "
            "take both from one authority, or write new certificates."
        ) from None
    if _private_key(directory / "server.key").public_key() != server.public_key():
        raise UsageError(
            f"{directory / 'server.key'} does not belong to server.pem; take both from one place, or "
            f"{RENEW.format(directory)}."
        )


def _server_certificate(
    hosts: "list[x509.GeneralName]", issuer: "x509.Name", authority_key: Any, span: Span
) -> "tuple[x509.Certificate, ec.EllipticCurvePrivateKey]":
    """Sign a server certificate, and return it with its new key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = _new_key()
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    server = (
        _blank(_name("Priory server"), issuer, key, span)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(signer, critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    return server, key


def _span(start: datetime.datetime, days: int) -> Span:
    return start - EARLY, start - EARLY + datetime.timedelta(days=days)


def _general_name(host: str) -> "x509.GeneralName":
    """Return a host as a certificate has it: an address if it reads like one, otherwise a name."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host or not host.isascii() or any(not (c.isalnum() or c in "-.*") for c in host):
        raise UsageError(f"host {host!r} is neither a DNS name nor an IP address; give it without scheme or port.")
    return x509.DNSName(host)


def _blank(
    subject: "x509.Name", issuer: "x509.Name", key: "ec.EllipticCurvePrivateKey", span: Span
) -> "x509.CertificateBuilder":
    """Begin a certificate with what those of authority and server share."""
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(span[0])
        .not_valid_after(span[1])
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common: str) -> "x509.Name":
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, common)])


def _hosts(certificate: "x509.Certificate") -> "list[x509.GeneralName]":
    """Return the hosts that a certificate is for."""
    from cryptography import x509

    found = [one.value for one in certificate.extensions]
    return [name for one in found if isinstance(one, x509.SubjectAlternativeName) for name in one]


def _usage(*allowed: str) -> "x509.KeyUsage":
    """Return what a key may be used for, and that it is for nothing else."""
    from cryptography import x509

    names = "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign "
    names += "crl_sign encipher_only decipher_only"
    return x509.KeyUsage(**{name: name in allowed for name in names.split()})


def _new_key() -> "ec.EllipticCurvePrivateKey":
    """Return a new key on P-384, the curve that Flower requires of its nodes."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _private_bytes(key: "ec.EllipticCurvePrivateKey", for_ssh: bool) -> bytes:
    """Return an unencrypted private key as text, in OpenSSH's format or in the one that TLS servers read."""
    from cryptography.hazmat.primitives import serialization

    form = serialization.PrivateFormat.OpenSSH if for_ssh else serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _public_bytes(certificate: "x509.Certificate") -> bytes:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM)


def _read(path: Path) -> "x509.Certificate":
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise UsageError(f"{path} holds no certificate in PEM format; write new certificates.") from None


def _private_key(path: Path) -> Any:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError):
        raise UsageError(f"{path} holds no unencrypted key in PEM format; write new certificates.") from None


def _refuse_to_overwrite(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise UsageError(f"{path} exists, and keys are never overwritten; delete it or choose another directory.")


def _write(path: Path, content: bytes, secret: bool) -> None:
    """Write a new file; a secret one can never be read by others, not even for the moment before a `chmod`."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
