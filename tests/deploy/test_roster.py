"""Who speaks for whom: a client belongs to one node, and keys decide where nodes have any."""

import json

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
    with pytest.raises(UsageError, match=r"nodes\.json is damaged; delete it, and nodes are bound to clients anew"):
        roster(tmp_path)
