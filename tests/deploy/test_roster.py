"""Who speaks for whom: a client belongs to one node, and keys decide where nodes have any."""

import json
import subprocess
import sys

import pytest

from priory.core.errors import UsageError
from priory.deploy.roster import Roster


def roster(place, authenticated=False) -> Roster:
    return Roster.open(place, authenticated)


def test_nobody_is_known_at_first(tmp_path):
    assert roster(tmp_path).bound == {}


@pytest.mark.parametrize("authenticated", [False, True])
def test_a_second_node_that_claims_a_client_is_refused_while_the_first_is_there(tmp_path, authenticated):
    book = roster(tmp_path, authenticated)
    book.bind(0, 7, present=[7, 8])
    with pytest.raises(UsageError, match="Node 8 says that it is client 0, which is bound to node 7; give it another"):
        book.bind(0, 8, present=[7, 8])
    assert book.bound == {0: 7}


def test_without_keys_a_client_passes_on_when_its_node_is_gone(tmp_path):
    book = roster(tmp_path)
    book.bind(0, 7, present=[7])
    book.bind(0, 8, present=[8])
    assert roster(tmp_path).bound == {0: 8}


def test_with_keys_a_client_stays_with_the_first_key_for_good(tmp_path):
    roster(tmp_path, authenticated=True).bind(0, 7, present=[7])
    with pytest.raises(UsageError, match="bound to node 7"):
        roster(tmp_path, authenticated=True).bind(0, 8, present=[8])


def test_a_node_that_comes_back_is_known_to_the_next_server(tmp_path):
    number = 2**63 + 12345  # Flower's numbers are that large
    roster(tmp_path, authenticated=True).bind(1, number, present=[number])
    again = roster(tmp_path, authenticated=True)
    again.bind(1, number, present=[number])
    assert again.bound == {1: number}


def test_nothing_is_written_where_nothing_changes(tmp_path):
    book = roster(tmp_path)
    book.bind(0, 7, present=[7])
    (tmp_path / "nodes.json").unlink()
    book.bind(0, 7, present=[7])
    assert not (tmp_path / "nodes.json").exists()


def test_an_operator_can_read_and_mend_it(tmp_path):
    book = roster(tmp_path, authenticated=True)
    book.bind(0, 7, present=[7])
    assert json.loads((tmp_path / "nodes.json").read_text()) == {"0": "7"}
    (tmp_path / "nodes.json").write_text("{}")
    roster(tmp_path, authenticated=True).bind(0, 8, present=[8])


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"0": null}', '{"a": 1}', '{"0": Infinity}', '{"0": [1]}', "[" * 9999]
)
def test_a_damaged_file_is_refused_with_a_remedy(tmp_path, text):
    (tmp_path / "nodes.json").write_text(text)
    with pytest.raises(
        UsageError, match=r"nodes\.json is damaged; delete it, and nodes are bound to clients as they come"
    ):
        roster(tmp_path)


def test_a_running_server_follows_a_client_that_was_given_to_another_node(tmp_path):
    book = roster(tmp_path, authenticated=True)
    for client, node in ((0, 7), (1, 8)):
        book.bind(client, node, present=[7, 8])
    roster(tmp_path, authenticated=True).rebind(0, 9)
    with pytest.raises(UsageError, match="bound to node 9"):
        book.bind(0, 7, present=[7, 8, 9])
    book.bind(0, 9, present=[7, 8, 9])
    book.bind(2, 5, present=[5])
    assert json.loads((tmp_path / "nodes.json").read_text()) == {"0": "9", "1": "8", "2": "5"}


def test_a_file_that_is_deleted_under_a_running_server_frees_no_client(tmp_path):
    book = roster(tmp_path, authenticated=True)
    book.bind(0, 7, present=[7])
    (tmp_path / "nodes.json").unlink()
    with pytest.raises(UsageError, match="bound to node 7"):
        book.bind(0, 8, present=[8])


def test_a_node_is_refused_while_the_file_is_damaged_and_nothing_is_overwritten(tmp_path):
    book = roster(tmp_path, authenticated=True)
    book.bind(0, 7, present=[7])
    (tmp_path / "nodes.json").write_text("{")
    with pytest.raises(UsageError, match="is damaged"):
        book.bind(1, 8, present=[8])
    assert (tmp_path / "nodes.json").read_text() == "{"


BINDER = """
import sys
from pathlib import Path
from priory.deploy.roster import Roster
book = Roster.open(Path(sys.argv[1]), authenticated=True)
for client in range(int(sys.argv[2]), int(sys.argv[3])):
    book.bind(client, 100 + client, present=[])
"""


def test_two_processes_that_bind_at_once_lose_nothing(tmp_path):
    started = [
        subprocess.Popen([sys.executable, "-c", BINDER, str(tmp_path), str(first), str(first + 40)])
        for first in (0, 40)
    ]
    assert [process.wait(60) for process in started] == [0, 0]
    assert roster(tmp_path).bound == {client: 100 + client for client in range(80)}
