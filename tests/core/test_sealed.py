"""Text that carries its checksum: no flipped bit changes what is read."""

import json
import math
import tomllib
from collections.abc import Iterator

import pytest

from priory.core.sealed import SealError, is_as_written, sealed, sealed_lines, unsealed

TABLE = {"b": 1.5, "a": [1, None, True], "name": 'Łódź "x"\\', "inner": {"z": 1e-05, "y": {}}}
LINES = 'rounds = 3\n\n[data]\nname = "x # y"\n'


def flips(raw: bytes) -> Iterator[bytes]:
    """The bytes with each bit flipped, one after another."""
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_table_comes_back_without_its_checksum(indent):
    text = sealed(TABLE, indent)
    assert unsealed(text) == unsealed(text.encode()) == TABLE
    assert list(json.loads(text)) == [*TABLE, "sha256"]


def test_keys_that_are_numbers_and_values_that_are_not_finite_come_back_as_json_has_them():
    assert unsealed(sealed({10: 1, 9: (2, 3)})) == {"10": 1, "9": [2, 3]}
    found = unsealed(sealed({"a": math.nan, "b": -math.inf}))
    assert math.isnan(found["a"])
    assert found["b"] == -math.inf


@pytest.mark.parametrize("indent", [None, 2])
def test_every_flipped_bit_of_a_table_is_found_or_changes_nothing(indent):
    found = 0
    for raw in flips(sealed(TABLE, indent).encode()):
        try:
            assert unsealed(raw) == TABLE
        except ValueError:
            found += 1
    assert found > 0


@pytest.mark.parametrize("value", [{"a": 1}, [1, 2], 3, None, {"sum": "0" * 64}])
def test_what_has_no_checksum_is_read_as_it_is(value):
    assert unsealed(json.dumps(value)) == value


def test_a_table_that_was_edited_is_refused():
    with pytest.raises(SealError, match="does not match its checksum"):
        unsealed(sealed(TABLE).replace("1.5", "1.6"))


def test_json_that_is_nested_too_deeply_is_no_json():
    with pytest.raises(ValueError, match="nested too deeply"):
        unsealed("[" * 100_000)


def test_a_table_may_have_a_key_of_that_name():
    for table in ({"sha256": {"bound": 0.1}}, {"sha256": "x", "sha256_": 1}):
        assert unsealed(sealed(table)) == table
    assert unsealed('{"sha256": {"bound": 0.1}}') == {"sha256": {"bound": 0.1}}


def test_lines_are_as_they_were_written():
    text = sealed_lines(LINES)
    assert text.startswith(LINES)
    assert is_as_written(text.encode())
    assert is_as_written(text.rstrip("\n").encode())
    assert is_as_written(LINES.encode())  # of an older version
    assert tomllib.loads(text) == tomllib.loads(LINES)


@pytest.mark.parametrize("edit", [lambda text: text.replace("3", "4"), lambda text: text + "[more]\n"])
def test_lines_that_were_edited_are_not_as_they_were_written(edit):
    assert not is_as_written(edit(sealed_lines(LINES)).encode())


def test_every_flipped_bit_of_lines_is_found_or_changes_nothing():
    found = 0
    for raw in flips(sealed_lines(LINES).encode()):
        try:
            table = tomllib.loads(raw.decode())
        except ValueError:
            continue
        found += not is_as_written(raw)
        assert not is_as_written(raw) or table == tomllib.loads(LINES)
    assert found > 0
