"""`priory flower` as a user types it; no process of Flower's is started here."""

import builtins
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from priory.cli import main
from priory.cli.flower import COMMANDS
from priory.cli.flower import keys as keys_command
from priory.core.errors import UsageError
from priory.deploy import charter as charters
from priory.deploy.app_hash import written_hash
from priory.deploy.budget import Budget, Price
from priory.deploy.client_states import ClientStateStore
from priory.deploy.exchange import Reply, Request
from priory.deploy.gateway import traffic_of
from priory.deploy.journal import Journal
from priory.deploy.node_keys import fingerprint, read_public
from priory.deploy.node_log import NodeLog
from priory.deploy.roster import Roster
from priory.deploy.tls import write_authority, write_node_key
from priory.deploy.wire import encode
from tests.deploy.test_node_keys import FakeSuperLink

DIGITS = ["--data", "digits", "--partition", "iid", "--model", "linear", "--rounds", "2"]
CLIENTS = ["--clients", "2"]


def complaint(argv, capsys) -> str:
    """The one sentence that the command ends in."""
    assert main(["flower", *argv]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("priory: ")
    assert line.endswith((".", "?"))
    return line


def flat(text: str) -> str:
    return " ".join(text.split())


def test_alone_it_lists_its_commands_and_fails(capsys):
    assert main(["flower"]) == 2
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_its_commands(flag, capsys):
    assert main(["flower", flag]) == 0
    assert "priory flower up --nodes 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("schema", ["FILE", "--target", "--client", "--clients", "--out"]),
        ("init", ["DIR", "--authenticated", "--out", "--data", "--schema", "--rounds", "--dp"]),
        ("up", ["--nodes", "--port", "--secure", "--min-replies", "--data"]),
        ("keys", ["DIR", "--nodes", "--host", "--days", "list", "renew", "revoke"]),
        ("keys list", ["DIR", "--superlink", "--json"]),
        ("keys renew", ["DIR", "--days", "--node", "--public", "--superlink", "--out"]),
        ("keys revoke", ["DIR", "--node", "--superlink"]),
        ("status", ["DIR", "--json"]),
        ("forget", ["DIR", "--client", "--run", "--yes"]),
        ("budget", ["DIR", "--client", "--budget-epsilon", "--budget-delta", "--require", "--json"]),
        ("hash", ["DIR"]),
        ("log", ["verify DIR", "show DIR"]),
        ("log verify", ["DIR", "--client", "--head"]),
        ("log show", ["DIR", "--client", "--last"]),
    ],
)
def test_help_of_a_command_tells_its_flags(command, flags, capsys):
    assert main(["flower", *command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert [flag for flag in flags if flag not in shown] == []


@pytest.mark.parametrize("method", ["fedprox", "pfedbayes"])
def test_help_of_init_tells_the_flags_of_the_method(method, capsys):
    assert main(["flower", "init", "--method", method, "--help"]) == 0
    assert ("--mu" if method == "fedprox" else "--zeta") in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--exclude-uncertain", "--client-batch", "--newcomers", "--validation"])
def test_what_only_a_simulation_has_is_no_flag(flag, capsys):
    assert main(["flower", "init", "--help"]) == 0
    assert f"{flag} " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["statuss"], "'statuss' is not a command of priory flower; did you mean status?"),
        (["x"], "choose from schema, init, hash, up, keys, gateway, status, log, budget, forget"),
        (["init", "app", "--method", "fedavgg", *DIGITS], "did you mean fedavg?"),
        (["init", "app", "--method=pooled", *DIGITS, *CLIENTS], "pooled needs all data in one place"),
        (["init", "app", "--method"], "--method names no method; write --method pfedbayes, say"),
        (["init", "app", *DIGITS, *CLIENTS, "--cohort", "9"], "cohort=9"),
        (["init", "app", "--data", "digit"], "digits"),
        (["up", *DIGITS, "--nodes", "0"], "clients=0"),
        (["keys", "keys", "--nodes", "-1"], "nodes=-1 is too small; choose 0 or more"),
        (["keys", "keys", "--days", "0"], "days=0"),
        (["keys", "keys", "--host", "not a host"], "not a host"),
        (["keys", "list", "absent"], "absent holds neither certificates nor public keys; name the directory"),
        (
            ["keys", "renew", "absent"],
            "absent lacks ca.crt, ca.key, server.pem, without which the server certificate cannot",
        ),
        (["keys", "renew", "absent", "--public", "x.pub"], "public='x.pub' is for the key of a node; give --node"),
        (["keys", "renew", "absent", "--out", "x"], "out='x' is for the key of a node; give --node client-0"),
        (["keys", "renew", "absent", "--node", "client-0", "--days", "9"], "days=9 is for the server certificate"),
        (["keys", "renew", "absent", "--node", "client-0"], "none is named; give --superlink NAME"),
        (["keys", "renew", "keys", "--node", "x", "--superlink", "s"], "node='x' is not the name of a client's key"),
        (["keys", "renew", "keys", "--node", "client-0", "--out", "x"], "out='x' has no nodes.json"),
        (["keys", "revoke", "keys", "--superlink", "s"], "node is missing, and only keys of nodes can be revoked"),
        (["keys", "revoke", "keys", "--node", "client-0"], "none is named; give --superlink NAME"),
        (["status", "absent"], "status.json cannot be read (No such file or directory)"),
        (["forget", "absent", "--client", "3"], "is no directory, so there is nothing to forget"),
        (["hash", "absent"], "absent does not contain a Priory app"),
        (["log", "vérify", "state"], "'vérify' is not a command of priory flower log; choose from verify, show"),
        (["log", "verify", "state"], "state has no log of any client; name the state directory of a node"),
        (["log", "verify", "state", "--client", "3"], "log.jsonl cannot be read (No such file or directory)"),
        (["log", "show", "state", "--client", "-1"], "client=-1 must be 0 or more"),
        (["log", "show", "state", "--last", "0"], "last=0 is too small; choose 1 or more"),
        (["budget", "state", "--client", "-1"], "client=-1 must be 0 or more"),
        (["budget", "typo", "--client", "3"], "typo does not exist; name the state directory of the node"),
        (["budget", ".", "--client", "3", "--budget-delta", "1e-5"], "give --budget-epsilon as well"),
        (["budget", ".", "--client", "3", "--budget-epsilon", "2"], "needs a δ before the first run"),
        (["budget", ".", "--client", "3", "--budget-epsilon", "-2", "--budget-delta", "1e-5"], "must be 0"),
    ],
    ids=lambda value: " ".join(value[:4]) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_ends_in_one_sentence(argv, sentence, capsys):
    assert sentence in complaint(argv, capsys)
    assert os.listdir() == []


def test_init_writes_an_app_of_the_method_and_says_how_to_run_it(capsys):
    assert (
        main(["flower", "init", "my-app", "--method", "fedprox", "--mu", "0.5", *DIGITS, *CLIENTS, "--seed", "3"]) == 0
    )
    shown = flat(capsys.readouterr().out)
    assert "fedprox for 2 clients on digits, in my-app:" in shown
    assert "flwr run my-app local --stream --federation-config 'num-supernodes=2'" in shown
    charter = charters.load(Path("my-app/my_app"))
    assert (charter.name, charter.method.mu, charter.question.num_clients) == ("fedprox", 0.5, 2)
    assert charter.settings.eval_every == 0
    table = tomllib.loads(Path("my-app/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert (table["rounds"], table["seed"], table["out"]) == (2, 3, "~/priory-runs/my-app")
    assert table["authenticated"] is False


def test_init_never_writes_over_an_app(capsys):
    argv = ["init", "app", "--method", "fedavg", *DIGITS, *CLIENTS]
    assert main(["flower", *argv, "--out", "/srv/out", "--authenticated"]) == 0
    before = {path: path.read_bytes() for path in Path("app").rglob("*") if path.is_file()}
    assert b'out = "/srv/out"' in before[Path("app/pyproject.toml")]
    assert b"authenticated = true" in before[Path("app/pyproject.toml")]
    capsys.readouterr()
    assert "app exists and is not empty" in complaint(argv, capsys)
    assert {path: path.read_bytes() for path in Path("app").rglob("*") if path.is_file()} == before


def test_keys_are_made_for_a_server_and_its_nodes(capsys):
    assert main(["flower", "keys", "keys", "--nodes", "2", "--host", "fed.example.org", "10.0.0.7"]) == 0
    names = ["ca.crt", "ca.key", "client-0", "client-0.pub", "client-1", "client-1.pub", "server.key", "server.pem"]
    names.append("superexec.secret")
    assert sorted(os.listdir("keys")) == names
    assert f"{', '.join(names)} in keys" in flat(capsys.readouterr().out)
    for name in ("ca.key", "server.key", "client-0", "superexec.secret"):
        assert stat.S_IMODE(Path("keys", name).stat().st_mode) == 0o600


def test_a_gateway_is_written_for_an_app(capsys):
    assert main(["flower", "init", "clinic", *DIGITS, *CLIENTS]) == 0
    assert main(["flower", "keys", "keys"]) == 0
    capsys.readouterr()
    assert main(["flower", "gateway", "gateway", "--app", "clinic", "--keys", "keys", "--listen", "0.0.0.0:9000"]) == 0
    said, config = flat(capsys.readouterr().out), Path("gateway/nginx.conf").read_text()
    limit = traffic_of(charters.load(Path("clinic/clinic"))).body
    assert f"limits: {limit} bytes per request" in said
    assert f"client_max_body_size {limit};" in config
    assert "listen 0.0.0.0:9000;" in config
    assert "listen 127.0.0.1:8001 ssl proxy_protocol;" in config
    assert "server 127.0.0.1:8000;" in config
    assert "@" not in config
    assert "start: nginx -p gateway -c nginx.conf" in " ".join(said.split())


def test_a_gateway_needs_an_app(capsys):
    assert main(["flower", "keys", "keys"]) == 0
    said = complaint(["gateway", "gateway", "--app", "none", "--keys", "keys"], capsys)
    assert "none does not contain a Priory app" in said
    assert not Path("gateway").exists()


def test_keys_are_never_overwritten(capsys):
    assert main(["flower", "keys", "keys"]) == 0
    before = Path("keys/ca.key").read_bytes()
    capsys.readouterr()
    complaint(["keys", "keys"], capsys)
    assert Path("keys/ca.key").read_bytes() == before


def test_a_directory_with_the_name_of_a_command_is_written_with_its_place(capsys):
    assert main(["flower", "keys", "./list"]) == 0
    assert Path("list/ca.crt").exists()


def listed(capsys, *argv):
    """The exit code and the JSON object of `keys list`."""
    code = main(["flower", "keys", "list", "keys", "--json", *argv])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def made(capsys):
    """A set of keys for two nodes."""
    assert main(["flower", "keys", "keys", "--nodes", "2", "--host", "fed.example.org"]) == 0
    capsys.readouterr()


def test_list_shows_certificates_and_keys_and_when_they_expire(made, capsys):
    assert main(["flower", "keys", "list", "keys"]) == 0
    authority, server, first, second = capsys.readouterr().out.splitlines()
    assert authority.startswith("ca.crt      until 20")
    assert authority.endswith(", 3649 days")
    assert server.endswith(", 364 days  localhost, 127.0.0.1, fed.example.org")
    assert first == f"client-0    {fingerprint(read_public(Path('keys/client-0.pub')))}"
    assert second.startswith("client-1    SHA256:")
    assert "BEGIN" not in "".join((authority, server, first, second))


def test_list_is_one_json_object_for_monitors(made, capsys):
    code, table = listed(capsys)
    assert (code, table["warnings"]) == (0, [])
    assert [(one["file"], one["days"], one["hosts"]) for one in table["certificates"]] == [
        ("ca.crt", 3649, []),
        ("server.pem", 364, ["localhost", "127.0.0.1", "fed.example.org"]),
    ]
    assert [(one["name"], one["node"], one["status"]) for one in table["keys"]] == [
        ("client-0", None, None),
        ("client-1", None, None),
    ]


def test_list_serves_a_node_that_has_the_authority_s_certificate_alone(made, capsys):
    Path("site").mkdir()
    shutil.copy("keys/ca.crt", "site")
    assert main(["flower", "keys", "list", "site"]) == 0


def test_list_warns_of_what_expires_soon_by_its_exit_code_and_renew_ends_the_warning(capsys):
    assert main(["flower", "keys", "keys", "--days", "30"]) == 0
    capsys.readouterr()
    assert main(["flower", "keys", "list", "keys"]) == 1
    warning = capsys.readouterr().out.splitlines()[-1]
    assert warning.startswith("warning: keys/server.pem expires in 29 days, on 20")
    assert warning.endswith("; renew the certificate with `priory flower keys renew keys`.")
    assert listed(capsys)[0] == 1
    assert main(["flower", "keys", "renew", "keys"]) == 0
    said = flat(capsys.readouterr().out)
    assert "keys/server.pem and server.key are new, valid until 20" in said
    assert "restart the SuperLink" in said
    assert "warning" not in said
    assert listed(capsys)[0] == 0


def test_list_warns_of_an_expired_certificate_once(capsys):
    write_authority(Path("keys"), days=1, start=datetime.now(UTC) - timedelta(days=2))
    code, table = listed(capsys)
    assert code == 1
    (warning,) = table["warnings"]
    assert "keys/server.pem expired on 20" in warning


def test_list_warns_of_a_pair_that_was_torn_apart(made, capsys):
    main(["flower", "keys", "other"])
    shutil.copy("other/server.key", "keys/server.key")
    capsys.readouterr()
    code, table = listed(capsys)
    assert code == 1
    assert "keys/server.key does not belong to server.pem" in table["warnings"][0]
    assert main(["flower", "keys", "renew", "keys", "--days", "90"]) == 0
    capsys.readouterr()
    code, table = listed(capsys)
    assert (code, table["certificates"][1]["days"]) == (0, 89)


@pytest.fixture
def superlink(made, monkeypatch):
    """A SuperLink that knows both nodes, whose clients take part in a run."""
    fake = FakeSuperLink()

    def named(name):
        assert name == fake.name
        return fake

    monkeypatch.setattr(keys_command, "SuperLink", named)
    Path("runs/x/server").mkdir(parents=True)
    for client in (0, 1):
        node = fake.register(read_public(Path(f"keys/client-{client}.pub")), f"client-{client}")
        Roster.open(Path("runs/x/server"), True).bind(client, node, [])
    return fake


def test_list_shows_what_the_superlink_knows(superlink, capsys):
    write_node_key(Path("keys/client-2"))
    write_node_key(Path("elsewhere"))
    superlink.register(read_public(Path("elsewhere.pub")), "")
    superlink.unregister(101)
    _, table = listed(capsys, "--superlink", "clinic")
    assert [(one["name"], one["node"], one["status"]) for one in table["keys"]] == [
        ("client-0", "100", "registered"),
        ("client-1", "101", "unregistered"),
        ("client-2", None, "not registered"),
        ("-", "102", "registered, with a key that is not in this directory"),
    ]
    assert main(["flower", "keys", "list", "keys", "--superlink", "clinic"]) == 0
    assert ", node 100" in capsys.readouterr().out


NODE = ["--node", "client-0", "--superlink", "clinic"]


def test_renew_gives_a_client_the_key_that_it_sends(superlink, capsys):
    write_node_key(Path("site/key"))
    sent = ["--public", "site/key.pub"]
    assert main(["flower", "keys", "renew", "keys", *NODE, *sent, "--out", "runs/x"]) == 0
    said = flat(capsys.readouterr().out)
    assert "client 0 is bound to node 102 in runs/x/server/nodes.json" in said
    assert "(node 100) is unregistered" in said
    assert "client 0 starts its SuperNode again with --auth-supernode-private-key and the new private key" in said
    assert "send keys/client-0" not in said
    assert Roster.open(Path("runs/x/server"), True).bound == {0: 102, 1: 101}


def test_renew_makes_a_key_and_says_what_a_run_that_it_was_not_told_of_needs(superlink, capsys):
    assert main(["flower", "keys", "renew", "keys", *NODE]) == 0
    said = flat(capsys.readouterr().out)
    assert "send keys/client-0 to client 0 over a secure channel, then delete it here" in said
    assert "keys renew keys --node client-0 --public keys/client-0.pub --superlink clinic --out OUT" in said
    again = [*NODE, "--public", "keys/client-0.pub", "--out", "runs/x/server"]
    assert main(["flower", "keys", "renew", "keys", *again]) == 0
    assert Roster.open(Path("runs/x/server"), True).bound == {0: 102, 1: 101}
    assert superlink.active().keys() == {read_public(Path(f"keys/client-{client}.pub")) for client in (0, 1)}


def test_revoke_turns_a_key_away_and_says_how_the_client_gets_another(superlink, capsys):
    assert main(["flower", "keys", "revoke", "keys", *NODE]) == 0
    said = flat(capsys.readouterr().out)
    assert "(node 100) is unregistered, and turned away from now on" in said
    assert "keeps the place of client 0 for a new key: priory flower keys renew keys --node client-0 --public" in said
    assert list(superlink.active().values()) == [101]
    assert Roster.open(Path("runs/x/server"), True).bound == {0: 100, 1: 101}


# What an app tells of the data.

COLUMNS = ["--target", "outcome", "--client", "hospital"]
PRIVATE = ["--dp", "central", "--dp-epsilon", "4", "--dp-delta", "1e-3"]
FEDAVG = ["--method", "fedavg", "--model", "linear", "--rounds", "2"]


def write_visits(other: bool = False) -> None:
    """Write the rows of two hospitals, or the same with another row: larger, with a gap and of another category."""
    rows = [f"{'ew'[i % 2]},{20 + i},{'fm'[i % 3 > 0]},{1 + i / 8},{'no' if i % 4 < 2 else 'yes'}" for i in range(40)]
    if other:
        rows[17] = "w,9999,x,,yes"
    Path("visits.csv").write_text("\n".join(["hospital,age,sex,dose,outcome", *rows]) + "\n")


def drafted(reviewed: bool = True) -> None:
    """Write the rows and the draft of their schema, as the user leaves it after the review."""
    write_visits()
    assert main(["flower", "schema", "visits.csv", *COLUMNS]) == 0
    if reviewed:
        draft = Path("schema.toml").read_text()
        Path("schema.toml").write_text(draft.replace("reviewed = false", "reviewed = true"))


def files_of(directory: str) -> dict[str, bytes]:
    """The contents of all files in a directory, by their place in it."""
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in Path(directory).rglob("*") if path.is_file()
    }


def test_schema_drafts_a_file_that_is_not_reviewed(capsys):
    drafted(reviewed=False)
    table = tomllib.loads(Path("schema.toml").read_text())
    assert table["reviewed"] is False
    assert table["columns"]["sex"] == {"kind": "category", "categories": ["f", "m"], "missing": False}
    shown = flat(capsys.readouterr().out)
    assert "visits: 40 rows, 5 columns hospital client 2 names" in shown
    assert "priory flower init DIR --schema schema.toml" in shown


def test_schema_never_writes_over_a_file(capsys):
    write_visits()
    Path("mine.toml").write_text("mine")
    argv = ["schema", "visits.csv", *COLUMNS, "--out", "mine.toml"]
    assert "mine.toml exists, and no schema is overwritten; choose another --out" in complaint(argv, capsys)
    assert Path("mine.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["digits"], "'digits' must be a .csv or .npz file"),
        (["absent.csv", *COLUMNS], "absent.csv does not exist"),
        (["visits.csv", *COLUMNS[:2]], "visits.csv does not say which client a row is of; give --clients N"),
        (["visits.csv", *COLUMNS, "--out", "absent/schema.toml"], "absent/schema.toml cannot be written (No such file"),
    ],
    ids=["public", "absent", "no client", "no directory"],
)
def test_a_schema_that_cannot_be_drafted_ends_in_one_sentence(argv, sentence, capsys):
    write_visits()
    assert sentence in complaint(["schema", *argv], capsys)
    assert os.listdir() == ["visits.csv"]


@pytest.mark.parametrize("rows", [[], ["--data", "visits.csv"]], ids=["schema alone", "with data"])
@pytest.mark.parametrize("private", [[], PRIVATE], ids=["", "dp"])
def test_nothing_in_an_app_of_a_schema_depends_on_the_rows(rows, private):
    drafted()
    argv = [*FEDAVG, *private, "--schema", "schema.toml", *rows]
    assert main(["flower", "init", "one/app", *argv]) == 0
    write_visits(other=True)
    assert main(["flower", "init", "two/app", *argv]) == 0
    assert files_of("one") == files_of("two")


def test_an_app_without_a_schema_depends_on_the_rows():
    for place, other in (("one", False), ("two", True)):
        write_visits(other)
        assert main(["flower", "init", f"{place}/app", *FEDAVG, "--data", "visits.csv", *COLUMNS]) == 0
    one, two = files_of("one"), files_of("two")
    assert [name for name in one if one[name] != two[name]] == ["app/app/problem.json"]


@pytest.mark.parametrize("command", [["init", "app"], ["up"]], ids=lambda command: command[0])
@pytest.mark.parametrize("private", [PRIVATE, ["--dp", "local", *PRIVATE[2:]]], ids=["central", "local"])
def test_privacy_without_a_reviewed_schema_writes_nothing(command, private, capsys):
    drafted(reviewed=False)
    np.savez("scans.npz", x=np.zeros((9, 4)), y=np.arange(9) % 2, client=np.arange(9) % 3)
    argv = [*command, *FEDAVG, *private]
    before = sorted(os.listdir())
    capsys.readouterr()
    for data in (["visits.csv", *COLUMNS], ["scans.npz"]):
        assert f"draft a schema with `priory flower schema {data[0]}`" in complaint([*argv, "--data", *data], capsys)
    for rows in ([], ["--data", "visits.csv"]):
        told = complaint([*argv, "--schema", "schema.toml", *rows], capsys)
        assert "schema.toml states reviewed = false" in told
    assert sorted(os.listdir()) == before


def test_a_method_that_bounds_its_messages_is_private_without_the_flag(capsys):
    np.savez("scans.npz", x=np.zeros((40, 4)), y=np.arange(40) % 2, client=np.arange(40) % 2)
    argv = ["init", "app", "--method", "fedbnn", "--model", "linear", "--dp-epsilon", "5", "--dp-delta", "1e-3"]
    told = complaint([*argv, "--data", "scans.npz", "--align", "own:8"], capsys)
    assert "draft a schema with `priory flower schema scans.npz`" in told


def test_privacy_needs_no_schema_for_public_data():
    assert main(["flower", "init", "app", *FEDAVG, *PRIVATE, "--data", "heart_disease"]) == 0


def test_init_prints_what_is_shared(capsys):
    write_visits()
    assert main(["flower", "init", "app", *FEDAVG, "--data", "visits.csv", *COLUMNS]) == 0
    shown = flat(capsys.readouterr().out)
    assert (
        "shared with the server and every node: names of 5 columns, mean and deviation of 2, categories of 1" in shown
    )
    assert "read from the rows of visits.csv; --schema shares values that you state" in shown


def test_an_app_of_a_schema_alone_is_not_run_in_simulation(capsys):
    drafted()
    capsys.readouterr()
    assert main(["flower", "init", "app", *FEDAVG, "--schema", "schema.toml"]) == 0
    shown = flat(capsys.readouterr().out)
    assert "fedavg for 2 clients on visits, in app" in shown
    assert "flwr run" not in shown
    assert "run it on a SuperLink" in shown
    assert "all as stated in schema.toml (reviewed)" in shown
    spec: dict = {}
    exec(Path("app/app/rows.py").read_text(), spec)
    charter = charters.load(Path("app/app"))
    assert len(spec["examples"]({"data": "visits.csv"}, charter).x) == 40
    with pytest.raises(
        UsageError, match=r"was made from .*schema\.toml alone and has no rows to deal; name this node's"
    ):
        spec["examples"]({"partition-id": 0}, charter)


def test_a_simulated_node_of_a_schema_gets_its_part_of_the_data():
    drafted()
    assert main(["flower", "init", "app", *FEDAVG, "--schema", "schema.toml", "--data", "visits.csv"]) == 0
    spec: dict = {}
    exec(Path("app/app/rows.py").read_text(), spec)
    charter = charters.load(Path("app/app"))
    own = spec["examples"]({"partition-id": 1}, charter)
    own.check(charter, 1)
    whole = spec["examples"]({"data": "visits.csv"}, charter)
    assert {row.tobytes() for row in own.x} < {row.tobytes() for row in whole.x}


def test_rows_without_clients_are_dealt_to_as_many_as_the_schema_states():
    drafted()
    text = Path("schema.toml").read_text().replace('client = "hospital"\n', "").replace("clients = 2", "clients = 5")
    Path("schema.toml").write_text(text)
    assert main(["flower", "init", "app", *FEDAVG, "--schema", "schema.toml", "--data", "visits.csv"]) == 0
    assert "'clients': 5" in Path("app/app/rows.py").read_text()
    assert charters.load(Path("app/app")).question.num_clients == 5


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["init", "app"], "Give --data NAME or FILE, or --schema FILE for an app without rows"),
        (["init", "app", "--schema", "absent.toml"], "absent.toml cannot be read (No such file or directory); draft"),
        (["init", "app", "--schema", "schema.toml", "--clients", "2"], "clients=2 describes rows, and --schema stands"),
        (["init", "app", "--schema", "schema.toml", "--scale", "error"], "scale='error' describes rows"),
        (["init", "app", "--schema", "schema.toml", "--align", "own:3"], "align='own:3' describes rows"),
        (["init", "app", "--schema", "schema.toml", "--data", "digits"], "does not apply to data 'digits'"),
        (
            ["init", "app", "--schema", "more.toml", "--data", "visits.csv"],
            "visits.csv has 2 clients, and more.toml sta",
        ),
        (
            ["init", "app", "--schema", "schema.toml", "--data", "visits.csv", "--target", "sex"],
            "target='sex' contradicts",
        ),
        (["up", "--schema", "schema.toml"], "--schema alone has no rows to deal to nodes; give --data as well"),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else "",
)
def test_a_schema_that_does_not_fit_ends_in_one_sentence(argv, sentence, capsys):
    drafted()
    Path("more.toml").write_text(Path("schema.toml").read_text().replace("clients = 2", "clients = 3"))
    before = sorted(os.listdir())
    capsys.readouterr()
    assert sentence in complaint([*argv, *FEDAVG], capsys)
    assert sorted(os.listdir()) == before


# How a run stands.


def stands(phase, place="out", **about):
    Path(place).mkdir(parents=True, exist_ok=True)
    journal = Journal(Path(place))
    told = {"run": "fedavg-1", "method": "fedavg", "round": 2, "rounds": 5, "error": ""}
    journal.stand(phase, **told | about)
    return journal


def dead_process() -> int:
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


@pytest.mark.parametrize(
    ("phase", "about", "code", "words"),
    [
        ("finished", {}, 0, "fedavg (fedavg-1): finished, round 2 of 5"),
        ("asking", {}, 0, "fedavg (fedavg-1): asking, round 2 of 5"),
        ("failed", {"error": "The disk is full."}, 1, "failed, round 2 of 5"),
        ("failed", {"error": "The disk is full."}, 1, "error: The disk is full."),
        ("asking", {"pid": "dead"}, 1, "died while asking, round 2 of 5"),
    ],
)
def test_status_tells_how_a_run_stands_in_words_and_by_its_exit_code(phase, about, code, words, capsys):
    stands(phase, **about | ({"pid": dead_process()} if "pid" in about else {}))
    assert main(["flower", "status", "out"]) == code
    assert words in flat(capsys.readouterr().out)


def test_status_tells_of_what_was_refused(capsys):
    journal = stands("asking")
    journal.tell("turned away", node="7", sentence="Another app.")
    journal.tell("refused", client=1, reason="norm", sentence="Too large.")
    assert main(["flower", "status", "out"]) == 0
    assert "2 replies or nodes refused, the last: norm Too large." in flat(capsys.readouterr().out)


def test_status_finds_the_server_of_up(capsys):
    stands("finished", "runs/x/server")
    assert main(["flower", "status", "runs/x"]) == 0


def test_status_is_one_json_object_for_monitors(capsys):
    stands("failed", error="x")
    assert main(["flower", "status", "out", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["phase"], told["alive"], told["error"]) == ("failed", False, "x")


@pytest.mark.parametrize("text", ["", "{", '{"phase": "asking"}'])
def test_a_damaged_status_is_told(text, capsys):
    Path("out").mkdir()
    Path("out/status.json").write_text(text)
    assert "status.json is damaged" in complaint(["status", "out"], capsys)


def test_a_status_with_little_in_it_is_told_as_far_as_it_goes(capsys):
    Path("out").mkdir()
    Path("out/status.json").write_text('{"phase": "finished", "pid": 1}')
    assert main(["flower", "status", "out"]) == 0


# What a client keeps.


@pytest.fixture
def state():
    for run in ("run-1", "run-2"):
        ClientStateStore(Path("state"), 3, run, "digest").write({"a": np.ones(2, np.float32)}, 1, 0)
    return Path("state/client-3")


def test_forget_deletes_one_run_of_a_client(state, capsys):
    assert main(["flower", "forget", "state", "--client", "3", "--run", "run-1", "--yes"]) == 0
    assert os.listdir(state) == ["run-2"]
    assert "1 files of client 3 deleted" in capsys.readouterr().out


def test_forget_deletes_all_runs_of_a_client(state, capsys):
    assert main(["flower", "forget", "state", "--client", "3", "--yes"]) == 0
    assert not state.exists()


def test_forget_leaves_what_was_spent(state, capsys):
    Budget(state, 3).allow(2.0, 1e-5)
    assert main(["flower", "forget", "state", "--client", "3", "--yes"]) == 0
    assert sorted(os.listdir(state)) == ["budget.json", "budget.lock"]


def test_forget_leaves_the_log(state, capsys):
    answered(3, 2)
    before = (state / "log.jsonl").read_bytes()
    assert main(["flower", "forget", "state", "--client", "3", "--yes"]) == 0
    assert os.listdir(state) == ["log.jsonl"]
    assert (state / "log.jsonl").read_bytes() == before


def test_budget_tells_what_was_spent_and_sets_the_total(capsys):
    Path("state").mkdir()
    assert main(["flower", "budget", "state", "--client", "3"]) == 0
    assert "client 3 has answered nothing under differential privacy" in flat(capsys.readouterr().out)
    ledger = Budget(Path("state/client-3"), 3)
    ledger.promise("run-1", 0, "q", Price(rho=0.05, answers=3, rounds=3, epsilon=2.5, delta=1e-5))
    main(["flower", "budget", "state", "--client", "3"])
    told = flat(capsys.readouterr().out)
    assert f"ε {ledger.spent():.4g} of 2.5 spent at δ = 1e-05; the claim of its first run" in told
    assert "run-1: 1 answers, the last in round 0; ρ = 0.05 (local)" in told
    assert main(["flower", "budget", "state", "--client", "3", "--budget-epsilon", "9", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert (table["epsilon"], table["delta"], table["owned"], table["spent"]) == (9.0, 1e-5, True, ledger.spent())
    assert main(["flower", "budget", "state", "--client", "3", "--require", "local"]) == 0
    assert "its owner requires local differential privacy" in flat(capsys.readouterr().out)
    assert ledger.read().local


# The log of a client.


def answered(client, count, reason="", app="a" * 64):
    """The log of a client after so many requests."""
    log = NodeLog(Path(f"state/client-{client}"), client)
    for t in range(count):
        request = Request("train", {"run": "run-1\x1b[2J", "round": t})
        reply = Reply({}, {} if reason else encode({"a": np.full(4, 2.0)}), error=reason)
        log.admit(request, reply, "refused" if reason else "answered", app, "charter")
    return log


def verified(capsys, *argv):
    """The exit code of `log verify` and what it prints."""
    code = main(["flower", "log", "verify", "state", *argv])
    return code, capsys.readouterr().out


def test_log_alone_tells_its_commands(capsys):
    assert main(["flower", "log"]) == 2
    assert "priory flower log verify DIR" in capsys.readouterr().out


def test_log_verify_prints_the_head_of_every_client(capsys):
    heads = [answered(client, count).verify().head for client, count in ((3, 2), (10, 1))]
    code, said = verified(capsys)
    assert code == 0
    assert said.splitlines() == [
        f"client 3: 2 entries, the chain holds, head {heads[0]}",
        f"client 10: 1 entries, the chain holds, head {heads[1]}",
    ]
    assert verified(capsys, "--client", "10")[1].startswith("client 10: 1 entries")


def test_log_verify_finds_a_line_that_was_changed(capsys):
    path = answered(3, 3).path
    answered(4, 1)
    path.write_text(path.read_text().replace('"round": 1', '"round": 7'))
    code, said = verified(capsys)
    assert code == 1
    first, second = said.splitlines()
    assert first.startswith("client 3: the log is not whole, and only its first 1 entries can be trusted. Line 2 was")
    assert "the chain holds" in second


def test_log_verify_finds_a_noted_head_until_the_log_is_cut(capsys):
    log = answered(3, 2)
    head = log.verify().head
    answered(3, 2)
    assert verified(capsys, "--head", head)[0] == 0
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(lines[0])
    assert verified(capsys)[0] == 0
    code, said = verified(capsys, "--head", head)
    assert code == 1
    assert "the head that was given is not in it: lines were cut off at the end, or the log was written again" in said


def test_log_verify_tells_of_a_crash(capsys):
    log = answered(3, 2)
    with log.path.open("ab") as handle:
        handle.write(b"torn")
    code, said = verified(capsys)
    assert code == 0
    assert "client 3: 4 bytes after the last entry are of a line cut short, as a crash leaves one" in said
    answered(3, 1)
    code, said = verified(capsys)
    assert code == 0
    assert "client 3: a crash cut a line short, which was replaced by the repair in line 3" in said


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--head", "abc"], "head='abc' is not the hash of an entry; give its 64 hexadecimal digits"),
        (["--head", "0" * 64], "is of one log, and 2 clients have one here; give --client N"),
    ],
)
def test_log_verify_refuses_a_head_that_is_none(capsys, argv, sentence):
    answered(3, 1)
    answered(4, 1)
    assert sentence in complaint(["log", "verify", "state", *argv], capsys)


def test_log_show_prints_the_last_entries(capsys):
    answered(3, 2)
    answered(3, 1, app="b" * 64)
    answered(3, 1, reason="The server has another charter.", app="b" * 64)
    assert main(["flower", "log", "show", "state", "--client", "3", "--last", "3"]) == 0
    shown = capsys.readouterr().out
    client, app, first, other, second, refused = shown.splitlines()
    assert (client, app, other) == ("client 3:", f"  app {'a' * 64}", f"  app {'b' * 64}")
    assert "train     answered  round 1  174 bytes, norm 4, SHA-256 " in first
    assert "train     answered  round 0" in second
    assert refused.endswith("train     refused   round 0  run run-1\\x1b[2J  The server has another charter.")
    assert "\x1b" not in shown


def test_log_show_prints_repairs_and_whatever_else_is_in_a_log(capsys):
    log = answered(3, 1)
    log.append({"epsilon": "inf", "kind": None})
    with log.path.open("ab") as handle:
        handle.write(b"no entry\n[]\ntorn")
    answered(3, 1)
    assert main(["flower", "log", "show", "state"]) == 0
    assert "repair    replaces 4 bytes of a line cut short" in capsys.readouterr().out


def test_init_and_hash_print_the_number_that_nodes_log(capsys):
    assert main(["flower", "init", "clinic", "--method", "fedavg", *DIGITS, *CLIENTS]) == 0
    number = written_hash(Path("clinic"))
    shown = flat(capsys.readouterr().out)
    assert f"SHA-256 of the app, which every node logs: {number}" in shown
    assert "after a change: priory flower hash clinic" in shown
    with Path("clinic/clinic/rows.py").open("a") as rows:
        rows.write("# changed\n")
    assert main(["flower", "hash", "clinic"]) == 0
    changed = capsys.readouterr().out.strip()
    assert changed == written_hash(Path("clinic")) != number


def test_init_writes_an_app_where_flower_is_not_installed(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr.cli.build", None)
    assert main(["flower", "init", "clinic", "--method", "fedavg", *DIGITS, *CLIENTS]) == 0
    assert "The SHA-256 of clinic needs Flower, which is not installed" in flat(capsys.readouterr().out)


def test_init_tells_what_privacy_costs_and_how_much_of_it_the_grid(capsys):
    options = ["--method", "fedavg", *DIGITS, *CLIENTS, "--dp", "local", "--dp-epsilon", "4", "--dp-delta", "1e-3"]
    assert main(["flower", "init", "my-app", *options]) == 0
    ledger = charters.load(Path("my-app/my_app")).ledger
    assert 3.99 < ledger.spent(2) <= 4
    assert ledger.spent_if_continuous < ledger.spent(2)
    shown = flat(capsys.readouterr().out)
    assert f"local differential privacy, replace one client: 2 rounds cost ε = {ledger.spent(2):.4g}" in shown
    assert f"noise {ledger.noise:.4g} x sensitivity 2 (2 x dp-clip 1)" in shown


def test_init_tells_the_norm_of_each_part_and_advises_where_there_is_one_for_all(capsys):
    options = ["--method", "fedpop", *DIGITS, *CLIENTS, "--model", "mlp:2", "--dp", "local", "--dp-noise", "9"]
    assert main(["flower", "init", "apart", *options, "--dp-clip", "0.5,20"]) == 0
    shown = flat(capsys.readouterr().out)
    assert "noise 9 x sensitivity 2.828 (2 x sqrt(2) x dp-clip of each part: beta 0.5, phi 20)" in shown
    assert "--dp-clip BETA,PHI" not in shown
    assert charters.load(Path("apart/apart")).ledger.parts.units == (0.5, 20.0)
    assert main(["flower", "init", "together", *options, "--dp-clip", "0.5"]) == 0
    assert "--dp-clip BETA,PHI" in flat(capsys.readouterr().out)


@pytest.mark.parametrize(("answer", "left"), [("y", False), ("yes", False), ("n", True), ("", True)])
def test_forget_asks_first(state, monkeypatch, capsys, answer, left):
    asked = []
    monkeypatch.setattr(builtins, "input", lambda prompt: asked.append(prompt) or answer)
    assert main(["flower", "forget", "state", "--client", "3"]) == 0
    assert asked == ["Delete state/client-3 with all that is in it? [y/N] "]
    assert state.exists() is left


def test_forget_deletes_nothing_when_nobody_answers(state, monkeypatch, capsys):
    def nobody(prompt):
        raise EOFError

    monkeypatch.setattr(builtins, "input", nobody)
    assert "Nobody answered, so nothing was deleted" in complaint(["forget", "state", "--client", "3"], capsys)
    assert state.exists()


@pytest.mark.parametrize("run", ["..", "../client-3", "absent", "/tmp"])
def test_forget_leaves_the_directory_of_a_client_for_no_name_of_a_run(state, run, capsys):
    complaint(["forget", "state", "--client", "3", "--run", run, "--yes"], capsys)
    assert sorted(os.listdir(state)) == ["run-1", "run-2"]


# A federation on this machine.

UP = ["up", "--nodes", "2", "--method", "fedavg", *DIGITS, "--out", "here"]


@pytest.fixture
def taken():
    """A port that somebody listens on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


def test_up_refuses_a_port_in_use_and_starts_nothing(taken, capsys):
    assert f"Port {taken} on 127.0.0.1 cannot be taken" in complaint([*UP, "--port", str(taken)], capsys)
    assert not Path("here/flower").exists()


def test_up_refuses_the_directory_of_another_federation(taken, capsys):
    complaint([*UP, "--port", str(taken)], capsys)
    before = {path: path.read_bytes() for path in Path("here").rglob("*") if path.is_file()}
    again = [*UP, "--port", str(taken), "--max-norm", "7"]
    assert "out=here holds another federation; give the flags that began it" in complaint(again, capsys)
    assert {path: path.read_bytes() for path in Path("here").rglob("*") if path.is_file()} == before


def test_nothing_in_the_app_of_up_depends_on_the_rows(taken, capsys):
    drafted()
    argv = ["up", *FEDAVG, *PRIVATE, "--schema", "schema.toml", "--data", "visits.csv", "--port", str(taken)]
    apps = []
    for other in (False, True):
        write_visits(other)
        complaint([*argv, "--out", "here"], capsys)
        apps.append(files_of("here/app"))
        shutil.rmtree("here")
    assert apps[0] == apps[1]
    assert "app/problem.json" in apps[0]


def test_up_deals_every_node_its_own_rows_and_no_others(taken, capsys):
    complaint([*UP, "--port", str(taken)], capsys)
    rows = [{row.tobytes() for row in np.load(f"here/nodes/{node}/rows.npz")["x"]} for node in (0, 1)]
    assert rows[0]
    assert len(rows[0] & rows[1]) < 5  # a few images are there twice


def test_up_prints_the_number_that_nodes_log(taken, capsys):
    assert main(["flower", *UP, "--port", str(taken)]) == 2
    shown = flat(capsys.readouterr().out)
    assert f"SHA-256 of the app, which every node logs: {written_hash(Path('here/app'))}" in shown


def test_up_warns_of_a_certificate_that_expires_soon(taken, capsys):
    write_authority(Path("here/flower/certificates"), days=30)
    assert main(["flower", *UP, "--port", str(taken)]) == 2
    assert "warning: here/flower/certificates/server.pem expires in 29 days" in flat(capsys.readouterr().out)


def test_up_keeps_other_users_out(taken, capsys, open_umask):
    complaint([*UP, "--port", str(taken)], capsys)
    modes = {
        name: stat.S_IMODE(Path(name).stat().st_mode) for name in ("here", "here/nodes/1", "here/nodes/1/rows.npz")
    }
    assert modes == {"here": 0o700, "here/nodes/1": 0o700, "here/nodes/1/rows.npz": 0o600}


def test_up_leaves_the_directory_of_runs_open(taken, capsys, open_umask):
    complaint([*UP[:-1], "runs/here", "--port", str(taken)], capsys)
    assert [stat.S_IMODE(Path(name).stat().st_mode) for name in ("runs", "runs/here")] == [0o777, 0o700]
