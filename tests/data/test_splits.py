"""Splits within clients: stratified, apart, and independent of what else is asked for."""

import numpy as np
import pytest

from priory.core.errors import UsageError
from priory.data import load
from priory.data.splits import draw, hold_out


def test_a_draw_takes_classes_in_proportion():
    label = np.repeat([0, 1, 2], [60, 30, 10])
    mask = draw(np.zeros(100, int), label, np.array([20]), np.random.default_rng(0))
    assert np.bincount(label[mask]).tolist() == [12, 6, 2]


def test_a_draw_takes_exactly_what_is_wanted():
    rng = np.random.default_rng(1)
    client, label = np.arange(500) % 7, rng.integers(0, 30, 500)
    wanted = np.array([0, 1, 5, 20, 50, 70, 71])
    assert np.bincount(client[draw(client, label, wanted, rng)], minlength=7).tolist() == wanted.tolist()


def test_a_class_gives_its_last_row_only_when_no_other_can():
    label = np.array([0, 1, 2, 2, 2, 2, 2])  # shares of 3 rows: 0.43, 0.43, 2.14
    assert label[hold_out(np.zeros(7, int), label, 0.43, np.random.default_rng(0))].tolist() == [2, 2, 2]


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.99])
def test_every_client_keeps_a_row(fraction):
    client = np.repeat(np.arange(5), [1, 2, 3, 5, 50])
    mask = hold_out(client, np.zeros(len(client), int), fraction, np.random.default_rng(0))
    assert np.bincount(client[~mask], minlength=5).min() >= 1


def test_validation_comes_out_of_training_only(numbered, ids):
    without = numbered().partition("dirichlet:0.5", clients=6)
    with_it = numbered().partition("dirichlet:0.5", clients=6, validation=0.25)
    for client in range(6):
        both = ids(with_it, "train", client) + ids(with_it, "validation", client)
        assert sorted(both) == ids(without, "train", client)
        assert ids(with_it, "test", client) == ids(without, "test", client)


def test_a_training_part_too_small_for_validation_stays_whole(numbered):
    federation = numbered(2, client=["a", "b"]).partition(validation=0.5)
    assert federation.validation.total == 0


def test_newcomers_are_last_and_nobody_elses_rows_move(numbered, ids):
    without = numbered().partition("shards:2", clients=10, validation=0.1)
    with_them = numbered().partition("shards:2", clients=10, validation=0.1, newcomers=0.3)
    assert (with_them.num_clients, with_them.num_newcomers) == (7, 3)
    assert sorted(with_them.clients) == sorted(without.clients)
    for name in without.clients:
        assert all(ids(with_them, part, name) == ids(without, part, name) for part in ("train", "validation", "test"))


def test_newcomers_come_from_every_cluster():
    federation = load("synthetic:clusters:clusters=4,clients=20").partition(newcomers=0.2)
    assert sorted(federation.truth["cluster"][16:]) == [0, 1, 2, 3]


@pytest.mark.parametrize("spec", ["natural", "iid", "dirichlet:0.5"])
def test_a_group_never_straddles_a_split(numbered, ids, spec):
    group = np.repeat(np.arange(40), 3)
    data = numbered(client=group % 4, group=group)
    federation = data.partition(spec, clients=4, test=0.3, validation=0.3)
    sides = [{row // 3 for row in ids(federation, part)} for part in ("train", "validation", "test")]
    assert all(sides)
    assert sum(map(len, sides)) == 40


def test_a_group_at_two_clients_is_refused(numbered):
    data = numbered(4, client=["a", "a", "b", "b"], group=["g", "h", "h", "i"])
    with pytest.raises(UsageError, match="group 'h' has rows at the clients 'a' and 'b'"):
        data.partition()


def test_per_class_and_group_do_not_go_together(numbered):
    with pytest.raises(UsageError, match="leave out per_class or group"):
        numbered(group=np.arange(120)).partition("iid", clients=2, per_class=(1, 1))
