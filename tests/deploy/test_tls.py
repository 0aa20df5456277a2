"""Certificates and keys: what is written, and what a server must not start with."""

import datetime
import os
import shutil
import ssl
import stat
from pathlib import Path

import pytest

from priory.core.errors import UsageError
from priory.deploy.tls import (
    certificates_in,
    check_certificates,
    renew_server_certificate,
    write_authority,
    write_node_key,
)

pytest.importorskip("cryptography")

NOW = datetime.datetime(2030, 6, 1, tzinfo=datetime.UTC)
DAY, MINUTE = datetime.timedelta(days=1), datetime.timedelta(minutes=1)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    directory = tmp_path_factory.mktemp("certificates")
    write_authority(directory, ["server.example.org", "10.0.0.7", "::1"], days=10, start=NOW)
    return directory


def test_new_certificates_pass_the_check(certificates):
    check_certificates(certificates, NOW)


def test_certificates_hold_from_now_unless_told_otherwise(tmp_path):
    write_authority(tmp_path / "new")
    check_certificates(tmp_path / "new")


def test_the_server_answers_to_its_names_and_always_to_this_machine(certificates):
    from cryptography import x509

    server = x509.load_pem_x509_certificate((certificates / "server.pem").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "server.example.org"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "10.0.0.7", "::1"]


@pytest.mark.parametrize(("called", "accepted"), [("localhost", True), ("127.0.0.1", True), ("elsewhere", False)])
def test_a_handshake_needs_a_name_of_the_certificate(tmp_path, called, accepted):
    write_authority(tmp_path / "new")
    try:
        handshake(tmp_path / "new", called)
    except ssl.SSLCertVerificationError:
        assert not accepted
    else:
        assert accepted


def handshake(directory, called):
    """A TLS handshake in memory, the client strict about everything OpenSSL can be strict about."""
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_side.load_cert_chain(directory / "server.pem", directory / "server.key")
    client_side = ssl.create_default_context(cafile=directory / "ca.crt")
    client_side.verify_flags |= ssl.VERIFY_X509_STRICT
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_side.wrap_bio(back, there, server_hostname=called)
    server = server_side.wrap_bio(there, back, server_side=True)
    for end in (client, server, client, server):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue


def test_secrets_are_readable_by_their_owner_only(tmp_path, open_umask):
    write_authority(tmp_path / "new")
    renew_server_certificate(tmp_path / "new")
    write_node_key(tmp_path / "new" / "node")
    for name in ("ca.key", "server.key", "node"):
        assert stat.S_IMODE((tmp_path / "new" / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_a_node_key_is_a_p384_key_with_its_public_half(tmp_path):
    from cryptography.hazmat.primitives import serialization

    write_node_key(tmp_path / "keys" / "node")
    private = serialization.load_ssh_private_key((tmp_path / "keys" / "node").read_bytes(), None)
    public = serialization.load_ssh_public_key((tmp_path / "keys" / "node.pub").read_bytes())
    assert private.public_key() == public
    assert (tmp_path / "keys" / "node.pub").read_text().startswith("ecdsa-sha2-nistp384 ")


def test_nothing_is_overwritten(certificates, tmp_path):
    before = (certificates / "ca.key").read_bytes()
    with pytest.raises(UsageError, match=r"ca\.crt exists"):
        write_authority(certificates)
    assert (certificates / "ca.key").read_bytes() == before
    write_node_key(tmp_path / "node")
    with pytest.raises(UsageError, match="node exists"):
        write_node_key(tmp_path / "node")


@pytest.mark.parametrize("host", ["", "https://server", "server:8000", "a b"])
def test_a_host_that_no_certificate_can_name_is_refused_before_anything_is_written(tmp_path, host):
    with pytest.raises(UsageError, match="neither a DNS name nor an IP address"):
        write_authority(tmp_path / "new", [host])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("days", [0, 3651])
def test_a_server_certificate_lasts_a_day_at_least_and_no_longer_than_its_authority(tmp_path, days):
    with pytest.raises(UsageError, match=f"days={days} does not fit .*; choose 1 to 3650"):
        write_authority(tmp_path / "new", days=days)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("when", "complaint"), [(NOW - DAY, "holds only from"), (NOW + 11 * DAY, "expired on")])
def test_certificates_hold_neither_before_nor_after_their_time(certificates, when, complaint):
    with pytest.raises(UsageError, match=complaint):
        check_certificates(certificates, when)


@pytest.mark.parametrize("name", ["ca.crt", "server.pem", "server.key"])
def test_a_missing_file_is_named(certificates, tmp_path, name):
    copy = shutil.copytree(certificates, tmp_path / "copy")
    (copy / name).unlink()
    with pytest.raises(UsageError, match=f"lacks {name}"):
        check_certificates(copy, NOW)


def test_the_authority_may_keep_its_key_elsewhere(certificates, tmp_path):
    copy = shutil.copytree(certificates, tmp_path / "copy")
    (copy / "ca.key").unlink()
    check_certificates(copy, NOW)


@pytest.mark.parametrize(
    ("name", "complaint"), [("ca.crt", "was not signed by the authority"), ("server.key", "does not belong")]
)
def test_files_of_two_authorities_do_not_mix(certificates, tmp_path, name, complaint):
    copy = shutil.copytree(certificates, tmp_path / "copy")
    write_authority(tmp_path / "other", days=10, start=NOW)
    shutil.copy(tmp_path / "other" / name, copy / name)
    with pytest.raises(UsageError, match=complaint):
        check_certificates(copy, NOW)


@pytest.mark.parametrize("name", ["ca.crt", "server.key"])
def test_what_is_no_pem_file_is_named(certificates, tmp_path, name):
    copy = shutil.copytree(certificates, tmp_path / "copy")
    (copy / name).write_text("nothing")
    with pytest.raises(UsageError, match=f"{name} holds no"):
        check_certificates(copy, NOW)


# Renewal.


@pytest.fixture
def copy(certificates, tmp_path):
    return shutil.copytree(certificates, tmp_path / "copy")


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_authority_lasts_ten_years_and_the_server_certificate_one(tmp_path):
    write_authority(tmp_path / "new", start=NOW)
    assert {one.path.name: one.until - NOW for one in certificates_in(tmp_path / "new")} == {
        "ca.crt": 3650 * DAY - 10 * MINUTE,
        "server.pem": 365 * DAY - 10 * MINUTE,
    }


def test_a_renewed_certificate_has_the_same_hosts_and_authority_and_another_key(copy):
    before, later = contents(copy), NOW + 20 * DAY  # it had expired after ten
    renew_server_certificate(copy, now=later)
    check_certificates(copy, later + 364 * DAY)
    after = contents(copy)
    assert {name for name in before if before[name] != after[name]} == {"server.pem", "server.key"}
    assert before.keys() == after.keys()
    (_, server) = certificates_in(copy)
    assert server.hosts == ("localhost", "127.0.0.1", "server.example.org", "10.0.0.7", "::1")


def test_a_client_that_trusts_the_authority_accepts_the_renewed_certificate(tmp_path):
    write_authority(tmp_path / "new")
    renew_server_certificate(tmp_path / "new", days=1)
    handshake(tmp_path / "new", "localhost")


@pytest.mark.parametrize("replaced", [0, 1])
def test_a_renewal_that_is_cut_short_leaves_a_pair_that_works_or_is_refused_and_can_be_repeated(
    copy, monkeypatch, replaced
):
    class CutError(Exception):
        pass

    left, replace = [None] * replaced, Path.replace

    def cut(path, target):
        if not left:
            raise CutError
        left.pop()
        return replace(path, target)

    before = contents(copy)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", cut)
        with pytest.raises(CutError):
            renew_server_certificate(copy, now=NOW)
    if replaced:
        with pytest.raises(UsageError, match=r"server\.key does not belong to server\.pem; .* keys renew"):
            check_certificates(copy, NOW)
    else:
        assert before.items() <= contents(copy).items()
    renew_server_certificate(copy, now=NOW)
    check_certificates(copy, NOW)
    assert contents(copy).keys() == before.keys()


@pytest.mark.parametrize("written", [0, 1])
def test_a_renewal_without_space_changes_nothing(copy, monkeypatch, written):
    left = [None] * written

    def full(handle):
        if not left:
            raise OSError(28, "No space left on device")
        left.pop()

    before = contents(copy)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        renew_server_certificate(copy, now=NOW)
    assert before.items() <= contents(copy).items()
    check_certificates(copy, NOW)


@pytest.mark.parametrize(
    ("days", "now", "sentence"),
    [
        (0, NOW, "days=0 is too short for a server certificate; choose 1 or more"),
        (
            365,
            NOW + 3400 * DAY,
            r"expires on 2040-05-2\d, before .* of 365 days; choose days=249 or less, or make a new",
        ),
        (1, NOW + 3650 * DAY, "expires on .* of 1 days; make a new set in another directory, and give every node"),
    ],
)
def test_a_server_certificate_never_outlives_its_authority(copy, days, now, sentence):
    before = contents(copy)
    with pytest.raises(UsageError, match=sentence):
        renew_server_certificate(copy, days, now)
    assert contents(copy) == before


def test_the_most_days_that_a_refusal_names_are_accepted(copy):
    renew_server_certificate(copy, 249, NOW + 3400 * DAY)


@pytest.mark.parametrize("name", ["ca.crt", "ca.key", "server.pem"])
def test_a_renewal_names_the_file_that_it_lacks(copy, name):
    (copy / name).unlink()
    with pytest.raises(
        UsageError, match=f"lacks {name}, without which the server certificate cannot be renewed; bring them here"
    ):
        renew_server_certificate(copy, now=NOW)


def test_a_renewal_needs_the_key_of_the_authority_that_clients_trust(copy, tmp_path):
    write_authority(tmp_path / "other", start=NOW)
    shutil.copy(tmp_path / "other" / "ca.key", copy / "ca.key")
    with pytest.raises(UsageError, match=r"ca\.key does not belong to ca\.crt"):
        renew_server_certificate(copy, now=NOW)


@pytest.mark.parametrize(
    ("left", "sentence"),
    [
        (30 * DAY, None),
        (30 * DAY - MINUTE, "expires in 29 days, on 2030-06-"),
        (MINUTE, "expires in 0 days, on 2030-06-"),
        (-MINUTE, "expired on 2030-06-"),
    ],
)
def test_a_certificate_warns_30_days_before_it_expires(certificates, left, sentence):
    (authority, server) = certificates_in(certificates)
    warning = server.warning(server.until - left)
    assert warning is None if sentence is None else sentence in warning
    assert authority.warning(server.until - left) is None
    if sentence:
        assert warning.endswith(f"; renew the certificate with `priory flower keys renew {certificates}`.")


def test_an_authority_cannot_be_renewed_without_its_nodes(certificates):
    (authority, _) = certificates_in(certificates)
    assert authority.warning(authority.until).endswith("new set in another directory, and give every node its ca.crt.")


def test_a_client_may_trust_two_authorities_while_one_replaces_the_other(tmp_path):
    for name in ("old", "new"):
        write_authority(tmp_path / name)
    both = b"".join((tmp_path / name / "ca.crt").read_bytes() for name in ("old", "new"))
    for name in ("old", "new"):
        (tmp_path / name / "ca.crt").write_bytes(both)
        handshake(tmp_path / name, "localhost")
