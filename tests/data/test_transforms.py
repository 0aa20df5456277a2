"""Transforms: what each client sees agrees with the truth that is kept."""

from dataclasses import replace

import numpy as np
import pytest

from priory.core.errors import UsageError
from priory.data import from_arrays, load
from priory.data.arrays import dataset
from priory.data.corruptions import CORRUPTIONS

KINDS = [kind for kind in CORRUPTIONS if kind != "none"]


def plain_and(transform, **options):
    data = load("digits")
    options = {"clients": 10, **options}
    return data.partition("iid", **options), data.partition("iid", transform=transform, **options)


def rows_of(federation, client):
    return slice(federation.train.start[client], federation.test.start[client] + federation.test.count[client])


def test_invert_half_inverts_exactly_the_clients_of_cluster_one():
    plain, inverted = plain_and("invert-half")
    assert inverted.truth["cluster"].sum() == 5
    for client, cluster in enumerate(inverted.truth["cluster"]):
        rows = rows_of(plain, client)
        expected = 16 - plain.x[rows] if cluster else plain.x[rows]
        assert (inverted.x[rows] == expected).all()
    assert inverted.x.dtype == np.uint8


def test_newcomers_keep_the_cluster_they_would_have_had():
    _, without = plain_and("invert-half")
    _, with_them = plain_and("invert-half", newcomers=0.4)
    cluster = dict(zip(without.clients, without.truth["cluster"], strict=True))
    assert [cluster[name] for name in with_them.clients] == with_them.truth["cluster"].tolist()
    assert with_them.truth["cluster"][6:].sum() == 2


def test_rotation_follows_the_truth():
    plain, turned = plain_and("rotate-by-client")
    assert set(turned.truth["rotation"]) > {0, 90}
    for client, degrees in enumerate(turned.truth["rotation"]):
        rows = rows_of(plain, client)
        assert (turned.x[rows] == np.rot90(plain.x[rows], degrees // 90, axes=(1, 2))).all()


def test_newcomers_keep_the_rotation_they_would_have_had():
    _, without = plain_and("rotate-by-client")
    _, with_them = plain_and("rotate-by-client", newcomers=0.4)
    rotation = dict(zip(without.clients, without.truth["rotation"], strict=True))
    assert [rotation[name] for name in with_them.clients] == with_them.truth["rotation"].tolist()


def test_mix_gives_half_of_the_clients_the_other_data(monkeypatch, official):
    ours, theirs = official(), official()
    theirs = replace(theirs, name="theirs", x=255 - theirs.x)
    monkeypatch.setattr("priory.data.datasets.load", lambda name: {"theirs": theirs}[name])
    plain = ours.partition("shards:2", clients=10, validation=0.1)
    mixed = ours.partition("shards:2", clients=10, validation=0.1, transform="mix:theirs")
    assert mixed.truth["cluster"].sum() == 5
    assert (mixed.y == plain.y).all()  # same labels, same deal: only the pictures differ
    for client, cluster in enumerate(mixed.truth["cluster"]):
        rows = rows_of(plain, client)
        assert (mixed.x[rows] == (255 - plain.x[rows] if cluster else plain.x[rows])).all()


def test_mix_refuses_another_shape():
    x, y = np.zeros((8, 4, 4, 1), np.uint8), np.arange(8) % 2
    with pytest.raises(UsageError, match="mix:digits"):
        dataset(x, y).partition("iid", clients=2, transform="mix:digits")


def test_corruption_follows_the_truth_and_newcomers_meet_other_kinds():
    plain, corrupted = plain_and("corrupt-by-client", clients=40, newcomers=0.25)
    kinds, severity = corrupted.truth["corruption"], corrupted.truth["severity"]
    assert set(kinds[:30]) == {"none", "noise", "blur", "contrast"}
    assert set(kinds[30:]) <= {"brightness", "pixelate", "jpeg"}
    for client in range(40):
        rows = rows_of(plain, client)
        assert (severity[client] == 0) == (kinds[client] == "none") == bool((corrupted.x[rows] == plain.x[rows]).all())
    assert corrupted.x.dtype == np.uint8
    assert corrupted.x.max() <= 16


def test_corruption_takes_a_severity_and_kinds():
    _, corrupted = plain_and("corrupt-by-client:5:blur/jpeg,noise", newcomers=0.5)
    assert set(corrupted.truth["severity"]) == {5}
    assert set(corrupted.truth["corruption"][:5]) == {"blur"}
    assert set(corrupted.truth["corruption"][5:]) <= {"jpeg", "noise"}


def test_several_transforms_compose():
    _, both = plain_and(("invert-half", "rotate-by-client"))
    assert {"cluster", "rotation"} <= set(both.truth)


@pytest.mark.parametrize("kind", KINDS)
def test_a_corruption_grows_with_its_severity(kind):
    x = np.random.default_rng(0).beta(0.3, 0.3, size=(20, 28, 28, 1)).astype(np.float32)
    error = [np.square(CORRUPTIONS[kind](x, level, np.random.default_rng(1)) - x).mean() for level in range(5)]
    assert 0 < error[0] < error[4]
    assert (np.diff(error) > 0).all()


@pytest.mark.parametrize("kind", ["blur", "contrast", "pixelate", "jpeg"])
def test_a_flat_grey_picture_survives(kind):
    x = np.full((1, 28, 28, 3), 128 / 255, np.float32)  # 128 is the level JPEG codes as zero
    assert np.allclose(CORRUPTIONS[kind](x, 4, np.random.default_rng(0)), x, atol=1e-4)


def test_noise_has_the_published_deviation():
    x = np.zeros((100, 28, 28, 1), np.float32)
    noise = CORRUPTIONS["noise"](x, 4, np.random.default_rng(0))
    assert abs(noise.std() - 0.1) < 4 * 0.1 / np.sqrt(2 * noise.size)  # 4 standard errors


def test_pixelate_to_half_size_averages_blocks_of_four():
    from priory.data.corruptions import _shrink_and_stretch

    matrix = _shrink_and_stretch(4, 2)
    assert matrix.tolist() == [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]]


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        ("invert-half:2", "takes none"),
        ("mix", "mix:DATASET"),
        ("mix:digitz", "did you mean 'digits'"),
        ("corrupt-by-client:9", "1 to 5"),
        ("corrupt-by-client:fog", "corruption 'fog'"),
        (("rotate-by-client", "rotate-by-client"), "give each once"),
        (("invert-half", "mix:digits"), "one of invert-half and mix"),
        ("rotate", "transform 'rotate'"),
    ],
)
def test_a_bad_transform_ends_in_one_sentence(transform, words):
    with pytest.raises(UsageError) as caught:
        load("digits").partition("iid", clients=4, transform=transform)
    assert words in str(caught.value)


def test_only_square_pictures_are_rotated():
    x = np.zeros((4, 2, 3, 1), np.uint8)
    with pytest.raises(UsageError, match="square images"):
        from_arrays(x, [0, 1, 0, 1], [0, 0, 1, 1], transform="rotate-by-client")
