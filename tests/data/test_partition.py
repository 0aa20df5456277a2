"""Partitions: who gets which classes, and that nobody shares a row."""

from dataclasses import replace

import numpy as np
import pytest

from priory.core.errors import UsageError
from priory.data import load
from priory.data.arrays import dataset
from priory.data.partition import Partition, deal, held_classes, parse

SPECS = ("iid", "dirichlet:0.3", "shards:2", "classes:2", "classes:2:paired")


def class_sets(federation, part):
    return [set(federation.y[federation.rows(client, part)].tolist()) for client in range(len(federation.clients))]


@pytest.mark.parametrize("spec", SPECS)
def test_own_splits_are_disjoint_and_complete(numbered, ids, spec):
    federation = numbered().partition(spec, clients=10, validation=0.2)
    rows = [row for part in ("train", "validation", "test") for row in ids(federation, part)]
    assert sorted(rows) == list(range(120))


@pytest.mark.parametrize("spec", SPECS)
def test_the_official_parts_are_never_mixed(official, spec):
    data = official()
    federation = data.partition(spec, clients=10)
    assert (federation.train.total, federation.test.total) == (600, 200)


@pytest.mark.parametrize("spec", ["dirichlet:0.1", "shards:2", "classes:3", "classes:5:paired"])
def test_nobody_is_tested_on_a_class_it_never_saw(official, spec):
    federation = official().partition(spec, clients=20)
    trained, tested = class_sets(federation, "train"), class_sets(federation, "test")
    assert all(test <= train for train, test in zip(trained, tested, strict=True))


@pytest.mark.parametrize("spec", ["shards:2", "classes:3", "classes:5:paired"])
def test_train_and_test_have_the_same_classes_when_there_are_enough_rows(official, spec):
    federation = official().partition(spec, clients=10)
    assert class_sets(federation, "train") == class_sets(federation, "test")


def test_every_client_gets_exactly_its_number_of_equal_shards(official):
    federation = official().partition("shards:5", clients=20)  # 60 rows a class, 10 shards a class, 6 rows a shard
    for client in range(20):
        counts = np.bincount(federation.y[federation.rows(client)], minlength=10)
        assert counts.sum() == 30
        assert (counts % 6 == 0).all()


def test_odd_rows_make_some_shards_one_longer():
    label = np.repeat([0, 1], [13, 12])
    owner = deal(parse("shards:1"), label, 4, 2, 1, np.random.default_rng(0))
    assert sorted(np.bincount(owner)) == [6, 6, 6, 7]


def test_a_class_split_gives_k_classes_and_even_holders():
    held = held_classes(Partition("classes", 3), 40, 10, np.random.default_rng(1))
    assert (held.sum(axis=1) == 3).all()
    assert (held.sum(axis=0) == 12).all()


def test_random_class_pairs_are_all_about_as_likely():
    held = held_classes(Partition("classes", 2), 20_000, 4, np.random.default_rng(2))
    pairs = np.unique(held @ (1 << np.arange(4)), return_counts=True)[1]
    expected, error = 20_000 / 6, np.sqrt(20_000 * (1 / 6) * (5 / 6))
    assert len(pairs) == 6
    assert np.abs(pairs - expected).max() < 4 * error  # 4 standard errors of independent draws


def test_coarse_classes_are_dealt_whole_and_the_fine_ones_within_them_at_random(official):
    """Dirichlet of next to nothing gives each coarse class to one client, with all its fine classes."""
    data = official()
    coarse = replace(data, coarse=data.y % 2)
    federation = coarse.partition("dirichlet:0.001:coarse", clients=2, seed=3)
    held = class_sets(federation, "train")
    assert all(len({label % 2 for label in own}) == 1 and len(own) == data.num_classes / 2 for own in held)
    assert class_sets(federation, "test") == held


def test_paired_classes_follow_the_published_rule(official):
    sets = class_sets(official().partition("classes:5:paired", clients=10), "train")
    assert sets == [{(5 * client + j) % 10 for j in range(5)} for client in range(10)]


def test_dirichlet_leaves_nobody_below_the_bar(official):
    federation = official().partition("dirichlet:0.01", clients=30, min_examples=7)
    assert federation.train.count.min() >= 7
    assert federation.train.total == 600


def test_dirichlet_can_use_up_every_row():
    label = np.arange(100) % 4
    owner = deal(parse("dirichlet:0.05"), label, 20, 4, 5, np.random.default_rng(0))
    assert np.bincount(owner).tolist() == [5] * 20


def test_the_bar_counts_training_rows_after_the_own_test_split(numbered):
    federation = numbered(400).partition("dirichlet:0.02", clients=20, test=0.3, min_examples=5)
    assert federation.train.count.min() >= 5


def test_dirichlet_shares_have_the_right_variance():
    label = np.zeros(1_000_000, np.int32)
    owner = deal(parse("dirichlet:2"), label, 1000, 1, 0, np.random.default_rng(3))
    share = np.bincount(owner, minlength=1000) / len(label)
    variance = (1 / 1000) * (1 - 1 / 1000) / (1000 * 2 + 1)  # of Dirichlet(2, ..., 2)
    assert abs(share.var() / variance - 1) < 5 * np.sqrt(5 / 1000)  # a gamma(2) has kurtosis 6: 5 standard errors


def test_iid_clients_differ_by_at_most_one_row(official):
    federation = official().partition("iid", clients=7)
    assert np.ptp(federation.train.count) <= 1


@pytest.mark.parametrize(("per_class", "counts"), [("50/950", (250, 4750)), ((200, 800), (1000, 4000))])
def test_per_class_counts_are_those_asked_for(per_class, counts):
    y = np.repeat(np.arange(10), 6313)
    federation = dataset(np.arange(len(y))[:, None], y).partition("classes:5:paired", clients=10, per_class=per_class)
    assert set(federation.train.count) == {counts[0]}
    assert set(federation.test.count) == {counts[1]}
    assert len(np.unique(federation.x)) == len(federation.x)


@pytest.mark.parametrize(("per_class", "counts"), [("50/950", (250, 4750)), ("900/300", (4500, 1500))])
def test_the_pfedbayes_settings_fit_mnist(data_dir, per_class, counts):
    federation = load("mnist").partition("classes:5:paired", clients=10, per_class=per_class)
    assert (set(federation.train.count), set(federation.test.count)) == ({counts[0]}, {counts[1]})


def test_sizes_give_each_share_of_the_clients_its_number_of_rows(numbered, ids):
    data = numbered(400)
    federation = data.partition("iid", clients=20, sizes="0.9=5,0.1=10")
    assert sorted(federation.train.count) == [5] * 18 + [10] * 2
    assert ids(federation, "test") == ids(data.partition("iid", clients=20), "test")


def test_natural_clients_keep_their_rows(numbered, ids):
    federation = numbered(6, client=["b", "a", "b", "b", "a", "b"]).partition(test=0.0)
    assert federation.clients == ("a", "b")
    assert ids(federation, "train", "b") == [0, 2, 3, 5]


def test_fewer_natural_clients_are_drawn_whole(numbered, ids):
    client = np.repeat(np.arange(12), 10)
    whole = numbered(client=client).partition()
    some = numbered(client=client).partition(clients=5)
    assert len(some.clients) == 5
    assert all(ids(some, "train", name) == ids(whole, "train", name) for name in some.clients)


def test_natural_clients_below_the_bar_are_left_out(numbered):
    client = ["few"] * 3 + ["many"] * 117
    assert numbered(client=client).partition(min_examples=10).clients == ("many",)


def test_one_example_trains_and_is_not_tested(numbered):
    federation = numbered(11, client=["one"] + ["ten"] * 10).partition()
    index = federation.index("one")
    assert (federation.train.count[index], federation.test.count[index]) == (1, 0)


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("dirichlett:0.3", {}, "did you mean 'dirichlet"),
        ("dirichlet", {}, "dirichlet:A"),
        ("dirichlet:x", {}, "'x'"),
        ("dirichlet:-1", {}, "'-1'"),
        ("dirichlet:nan", {}, "'nan'"),
        ("dirichlet:0.3:4", {}, "malformed"),
        ("iid:3", {}, "takes none"),
        ("shards:1.5", {}, "whole number"),
        ("shards:3", {"clients": 3}, "do not divide"),
        ("shards:40", {"clients": 4}, "smallest class has 30"),
        ("classes:5", {}, "choose K from 1 to 4"),
        ("classes:2:pared", {}, "classes:K:paired"),
        ("dirichlet:0.3:course", {}, "dirichlet:A:coarse"),
        ("dirichlet:0.3:coarse", {}, "has none; write 'dirichlet:0.3'"),
        ("natural", {}, "needs clients"),
        ("iid", {"clients": None}, "give clients=N"),
        ("iid", {"clients": 0}, "clients=0"),
        ("iid", {"clients": 2.5}, "not a whole number"),
        ("iid", {"clients": 121}, "at most 120"),
        ("iid", {"clients": 100, "min_examples": 3}, "for each client"),
        ("iid", {"seed": -1}, "seed=-1"),
        ("iid", {"test": 1.0}, "test=1.0"),
        ("iid", {"validation": -0.1}, "validation=-0.1"),
        ("iid", {"newcomers": "many"}, "newcomers='many'"),
        ("iid", {"clients": 1, "newcomers": 0.5}, "one must take part"),
        ("iid", {"min_examples": 0}, "min_examples=0"),
        ("iid", {"per_class": "50"}, "TRAIN/TEST"),
        ("iid", {"per_class": "0/5"}, "1 or more"),
        ("iid", {"per_class": "10/10"}, "there are 30"),
        ("shards:2", {"per_class": "1/1"}, "classes:K"),
        ("iid", {"sizes": "0.9"}, "malformed"),
        ("iid", {"sizes": "0.9=5,0.2=1"}, "add up to 1.1"),
        ("iid", {"sizes": "1=x"}, "'x'"),
        ("iid", {"sizes": "1=500"}, "it has 10"),
        ("iid", {"transform": "invert-half"}, "uint8 images"),
        ("iid", {"transform": "invert-all"}, "did you mean 'invert-half'"),
    ],
)
def test_a_bad_request_ends_in_one_sentence(numbered, spec, options, words):
    with pytest.raises(UsageError) as caught:
        numbered().partition(spec, **{"clients": 10, **options})
    assert words in str(caught.value)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_a_client_without_training_examples_is_named():
    data = dataset(np.zeros((4, 1)), [0, 1, 2, 2])
    with pytest.raises(UsageError, match="client 3 has 0 training examples"):
        data.partition("classes:1:paired", clients=4)


def test_regression_cannot_be_dealt_by_class():
    with pytest.raises(UsageError, match="is a regression"):
        load("eight_schools").partition("dirichlet:1", clients=2)
