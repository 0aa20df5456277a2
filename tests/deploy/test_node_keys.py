"""Node keys: a rotation that fails anywhere can be repeated, and at no time has a client no key or another client's."""

import json
import shutil
import subprocess

import pytest

from priory.core.errors import UsageError
from priory.deploy.node_keys import Node, SuperLink, fingerprint, read_public, revoke, rotate
from priory.deploy.roster import Roster
from priory.deploy.tls import write_node_key

pytest.importorskip("cryptography")


class BrokenError(Exception):
    """The connection breaks, or the process is killed."""


class FakeSuperLink:
    """A SuperLink that forgets no key, as Flower's does not.

    Attributes:
        left: How many more calls succeed before one breaks; the one that breaks may have had its effect.
    """

    name = "clinic"

    def __init__(self) -> None:
        self.known: list[Node] = []
        self.left, self.effect = 10**6, True

    def nodes(self):
        self.call()
        return list(self.known)

    def register(self, key, name):
        if any(one.key == key for one in self.known):
            raise UsageError("Public key already in use.")
        new = Node(100 + len(self.known), name, "registered", key)
        self.call(lambda: self.known.append(new))
        return new.id

    def unregister(self, node):
        def change():
            self.known = [Node(one.id, one.name, "unregistered", one.key) if one is old else one for one in self.known]

        (old,) = [one for one in self.known if one.id == node and one.status != "unregistered"]
        self.call(change)

    def call(self, change=lambda: None):
        self.left -= 1
        if self.left < 0:
            if self.effect:
                change()
            raise BrokenError
        change()

    def active(self):
        return {one.key: one.id for one in self.known if one.status != "unregistered"}


@pytest.fixture
def superlink():
    return FakeSuperLink()


@pytest.fixture
def place(tmp_path, superlink):
    """Keys of two clients, registered and bound to their nodes in a run."""
    (tmp_path / "out").mkdir()
    for client in (0, 1):
        write_node_key(tmp_path / "keys" / f"client-{client}")
        node = superlink.register(public(tmp_path, client), f"client-{client}")
        Roster.open(tmp_path / "out", True).bind(client, node, [])
    return tmp_path


def public(place, client=0):
    return read_public(place / "keys" / f"client-{client}.pub")


def private(place, client=0):
    """The public half of a private key."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

    key = load_ssh_private_key((place / "keys" / f"client-{client}").read_bytes(), None).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def book(place):
    return Roster.open(place / "out", True)


def rotated(place, superlink, name="client-0", **how):
    return list(rotate(place / "keys", name, superlink, roster=book(place), **how))


def files(place):
    return sorted(path.name for path in (place / "keys").iterdir())


PAIRS = ["client-0", "client-0.pub", "client-1", "client-1.pub"]


def test_a_new_pair_takes_the_place_of_the_old_one(place, superlink):
    old, other = public(place), public(place, 1)
    said = rotated(place, superlink)
    assert public(place) != old
    assert private(place) == public(place)
    assert superlink.active() == {public(place): 102, other: 101}
    assert book(place).bound == {0: 102, 1: 101}
    assert files(place) == PAIRS
    assert said == [
        f"client-0: {fingerprint(public(place))} is registered as node 102",
        f"client 0 is bound to node 102 in {place / 'out' / 'nodes.json'}",
        f"{fingerprint(old)} (node 100) is unregistered, and turned away from now on",
        f"{place / 'keys' / 'client-0'} and {place / 'keys' / 'client-0.pub'} are the new pair",
    ]


def test_a_client_that_makes_its_own_key_sends_the_public_half_only(place, superlink):
    write_node_key(place / "site" / "key")
    rotated(place, superlink, public=place / "site" / "key.pub")
    assert superlink.active() == {public(place): 102, public(place, 1): 101}
    assert public(place) == read_public(place / "site" / "key.pub")
    assert files(place) == ["client-0.pub", "client-1", "client-1.pub"]  # the old private key is good for nothing


def test_a_rotation_to_a_sent_key_can_be_repeated_when_it_is_done(place, superlink):
    write_node_key(place / "site" / "key")
    for _ in range(2):
        rotated(place, superlink, public=place / "site" / "key.pub")
    assert superlink.active()[public(place)] == 102
    assert len(superlink.known) == 3


@pytest.mark.parametrize("sent", [False, True], ids=["made here", "sent"])
@pytest.mark.parametrize("effect", [False, True], ids=["before its effect", "after its effect"])
@pytest.mark.parametrize("left", range(6))
def test_a_rotation_that_broke_anywhere_is_completed_by_the_same_command(
    place, superlink, monkeypatch, left, effect, sent
):
    how, old = {}, public(place)
    if sent:
        write_node_key(place / "site" / "key")
        how["public"] = place / "site" / "key.pub"
    superlink.left, superlink.effect = left, effect
    rebind = Roster.rebind

    def breaks(*arguments):
        superlink.call(lambda: rebind(*arguments))

    monkeypatch.setattr(Roster, "rebind", breaks)
    try:
        rotated(place, superlink, **how)
    except BrokenError:
        assert left < 4  # nodes, register, rebind, unregister
        bound = book(place).bound[0]
        assert bound in superlink.active().values()  # the client can always speak, under its old key or its new one
        superlink.left = 10**6
        rotated(place, superlink, **how)
    else:
        assert left >= 4
    superlink.left = 10**6
    assert superlink.active().keys() == {public(place), public(place, 1)}
    assert old not in superlink.active()
    assert book(place).bound == {0: superlink.active()[public(place)], 1: 101}
    assert files(place) == [name for name in PAIRS if not (sent and name == "client-0")]
    assert len(superlink.known) == 3
    assert sent or private(place) == public(place)


@pytest.mark.parametrize("replaced", [0, 1])
def test_a_rotation_whose_files_were_not_all_moved_is_completed_by_the_same_command(
    place, superlink, monkeypatch, replaced
):
    moved, replace = [], type(place).replace

    def cut(path, target):
        if path.name.startswith("client-0.new"):
            if len(moved) == replaced:
                raise BrokenError
            moved.append(path)
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(place), "replace", cut)
        with pytest.raises(BrokenError):
            rotated(place, superlink)
    rotated(place, superlink)
    assert files(place) == PAIRS
    assert private(place) == public(place)
    assert superlink.active() == {public(place): 102, public(place, 1): 101}


def test_a_half_written_pair_is_made_again(place, superlink):
    (place / "keys" / "client-0.new").write_text("half a")
    rotated(place, superlink)
    assert private(place) == public(place)
    assert files(place) == PAIRS


def test_a_key_that_a_broken_rotation_left_registered_is_unregistered_by_one_to_another_key(place, superlink):
    superlink.left, superlink.effect = 2, False  # the old key is not unregistered
    with pytest.raises(BrokenError):
        list(rotate(place / "keys", "client-0", superlink))
    superlink.left = 10**6
    assert len(superlink.active()) == 3
    write_node_key(place / "site" / "key")
    rotated(place, superlink, public=place / "site" / "key.pub")
    assert superlink.active().keys() == {public(place), public(place, 1)}
    assert files(place) == ["client-0.pub", "client-1", "client-1.pub"]


def test_a_made_key_that_is_named_from_elsewhere_keeps_its_private_half(place, superlink):
    superlink.left, superlink.effect = 1, False  # the new key is not registered
    with pytest.raises(BrokenError):
        rotated(place, superlink)
    superlink.left = 10**6
    shutil.copy(place / "keys" / "client-0.new.pub", place / "sent.pub")
    rotated(place, superlink, public=place / "sent.pub")
    assert private(place) == public(place) == read_public(place / "sent.pub")


def test_without_a_run_the_key_alone_changes(place, superlink):
    before = book(place).bound
    list(rotate(place / "keys", "client-0", superlink))
    assert book(place).bound == before
    rotated(place, superlink, public=place / "keys" / "client-0.pub")  # what the command then advises
    assert book(place).bound == {0: 102, 1: 101}
    assert private(place) == public(place)


def test_a_revoked_key_is_turned_away_and_keeps_the_client_s_place(place, superlink):
    old = public(place)
    for _ in range(2):
        (said,) = revoke(place / "keys", "client-0", superlink)
        assert said == f"{fingerprint(old)} (node 100) is unregistered, and turned away from now on"
    assert superlink.active() == {public(place, 1): 101}
    with pytest.raises(UsageError, match="bound to node 100"):
        book(place).bind(0, 101, [101])
    rotated(place, superlink)
    assert book(place).bound == {0: 102, 1: 101}
    assert superlink.active()[public(place)] == 102


def test_a_revocation_ends_a_rotation_that_broke(place, superlink):
    superlink.left, superlink.effect = 2, False  # both keys are registered
    with pytest.raises(BrokenError):
        rotated(place, superlink)
    superlink.left = 10**6
    list(revoke(place / "keys", "client-0", superlink))
    assert superlink.active() == {public(place, 1): 101}
    rotated(place, superlink)
    assert superlink.active().keys() == {public(place), public(place, 1)}


def test_what_is_not_registered_cannot_be_revoked(place, superlink):
    write_node_key(place / "keys" / "client-2")
    with pytest.raises(
        UsageError, match=r"client-2\.pub is not registered with superlink='clinic', so there is nothing"
    ):
        list(revoke(place / "keys", "client-2", superlink))


def test_a_revoked_key_never_comes_back(place, superlink):
    shutil.copy(place / "keys" / "client-0.pub", place / "old.pub")
    rotated(place, superlink)
    with pytest.raises(UsageError, match=r"old\.pub was unregistered as node 100, .* no key twice; make another key"):
        rotated(place, superlink, public=place / "old.pub")
    assert book(place).bound == {0: 102, 1: 101}


def test_no_client_gets_the_key_of_another(place, superlink):
    before = superlink.active()
    with pytest.raises(UsageError, match=r"client-1\.pub is the key of client-1, and no two clients share one"):
        rotated(place, superlink, public=place / "keys" / "client-1.pub")
    shutil.move(place / "keys" / "client-1.pub", place / "sent.pub")
    with pytest.raises(UsageError, match=r"Client 1 is bound to node 101 in .*, whose key is one of these keys"):
        rotated(place, superlink, public=place / "sent.pub")
    assert (superlink.active(), book(place).bound) == (before, {0: 100, 1: 101})


def test_a_run_that_knows_the_client_by_a_third_key_is_left_alone(place, superlink):
    write_node_key(place / "third")
    book(place).rebind(0, superlink.register(read_public(place / "third.pub"), "client-0"))
    before = superlink.active()
    with pytest.raises(
        UsageError, match=r"Client 0 is bound to node 102 in .*, whose key is neither the old nor the new"
    ):
        rotated(place, superlink)
    assert (superlink.active(), book(place).bound) == (before, {0: 102, 1: 101})


def test_a_run_whose_superlink_has_lost_its_nodes_is_bound_again(place, superlink):
    book(place).rebind(0, 5)
    rotated(place, superlink)
    assert book(place).bound == {0: 102, 1: 101}


@pytest.mark.parametrize("name", ["client", "client-", "client--1", "client-01", "../client-0", "client-0.pub", "0"])
def test_a_node_is_named_by_its_client(place, superlink, name):
    with pytest.raises(UsageError, match="is not the name of a client's key; give client-0 for client 0"):
        rotated(place, superlink, name)


@pytest.mark.parametrize("content", [b"", b"ssh-rsa AAAA", b"\xff\x00", "private"])
def test_what_is_no_public_key_is_refused_and_not_quoted(place, superlink, content):
    path = place / "new.pub"
    path.write_bytes((place / "keys" / "client-0").read_bytes() if content == "private" else content)
    with pytest.raises(UsageError, match=r"new\.pub holds no public key that Flower accepts; make a pair with") as told:
        rotated(place, superlink, public=path)
    assert len(str(told.value)) < len(str(path)) + 150


def test_a_key_of_another_kind_is_refused(place, superlink):
    from cryptography.hazmat.primitives.asymmetric import ed25519
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = ed25519.Ed25519PrivateKey.generate().public_key()
    (place / "new.pub").write_bytes(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    with pytest.raises(UsageError, match="holds no public key that Flower accepts"):
        rotated(place, superlink, public=place / "new.pub")


def test_a_public_key_that_is_absent_is_named(place, superlink):
    (place / "keys" / "client-0.pub").unlink()
    with pytest.raises(UsageError, match=r"client-0\.pub cannot be read \(No such file or directory\); put the public"):
        rotated(place, superlink)
    assert "client-0.new" not in files(place)


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_a_fingerprint_is_the_one_that_ssh_keygen_shows(place):
    command = ["ssh-keygen", "-l", "-f", str(place / "keys" / "client-0.pub")]
    assert fingerprint(public(place)) in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def control(monkeypatch, tmp_path):
    """Flower's client of the control API, which answers what it is told to."""
    utils = pytest.importorskip("flwr.cli.utils")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text('[superlink.clinic]\naddress = "127.0.0.1:1"\ninsecure = true\n')
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))

    class Control:
        def __init__(self):
            self.asked, self.reply, self.is_open = [], None, True

        def __getattr__(self, method):
            def call(request):
                self.asked.append((method, request))
                if isinstance(self.reply, Exception):
                    raise self.reply
                return self.reply

            return call

        def close(self):
            self.is_open = False

    made = Control()

    def connect(connection):
        print("Using SuperLink")
        return made

    monkeypatch.setattr(utils, "init_http_client_from_connection", connect)
    return made


def test_nodes_are_those_of_flower_with_their_keys(control, capsys):
    from flwr.proto.control_pb2 import ListNodesResponse
    from flwr.proto.node_pb2 import NodeInfo

    large = 2**64 - 1
    control.reply = ListNodesResponse(
        nodes_info=[NodeInfo(node_id=large, name="client-0", status="online", public_key=b"pem")]
    )
    assert SuperLink("clinic").nodes() == [Node(large, "client-0", "online", b"pem")]
    assert not control.is_open
    assert capsys.readouterr().out == ""  # the commands print JSON


def test_keys_are_registered_and_unregistered_at_flower(control):
    from flwr.proto.control_pb2 import RegisterNodeResponse, UnregisterNodeResponse

    control.reply = RegisterNodeResponse(node_id=7)
    assert SuperLink("clinic").register(b"pem", "client-0") == 7
    control.reply = UnregisterNodeResponse()
    SuperLink("clinic").unregister(7)
    (_, registered), (method, unregistered) = control.asked
    assert (registered.public_key, registered.name) == (b"pem", "client-0")
    assert (method, unregistered.node_id) == ("UnregisterNode", 7)


def test_what_flower_complains_of_becomes_one_sentence(control):
    import httpx

    control.reply = httpx.ConnectError("refused")
    with pytest.raises(
        UsageError, match=r"superlink='clinic' could not be used \(Connection to the SuperLink is"
    ) as told:
        SuperLink("clinic").nodes()
    assert str(told.value).endswith("; check its entry in config.toml of FLWR_HOME, and that the SuperLink is running.")
    assert not control.is_open
    with pytest.raises(UsageError, match=r"superlink='absent' could not be used \(.*'absent' not found in"):
        SuperLink("absent").nodes()


def test_numbers_of_nodes_survive_json(place, superlink):
    book(place).rebind(0, 2**64 - 1)
    assert json.loads((place / "out" / "nodes.json").read_text())["0"] == str(2**64 - 1)
