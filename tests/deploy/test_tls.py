"""Certificates and keys: what is written, and what a server must not start with."""

import datetime
import shutil
import ssl
import stat

import pytest

from priory.core.errors import UsageError
from priory.deploy.tls import check_certificates, write_authority, write_node_key

pytest.importorskip("cryptography")

NOW = datetime.datetime(2030, 6, 1, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)


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


def test_secrets_are_readable_by_their_owner_only(certificates, tmp_path):
    write_node_key(tmp_path / "node")
    for path in (certificates / "ca.key", certificates / "server.key", tmp_path / "node"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


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


def test_a_certificate_for_no_time_is_refused(tmp_path):
    with pytest.raises(UsageError, match="days=0"):
        write_authority(tmp_path, days=0)


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
