"""Limits of what is read: the memory that is free, and the time and memory of Python's reader of TOML."""

import time

import pytest

from priory.core import memory, reading

DOTS = reading.MOST_DOTS + 100
KEY = ".".join("a" * (DOTS + 1))


@pytest.fixture
def free(monkeypatch) -> int:
    """A machine with little memory."""
    num_bytes = 4 * reading.SMALL
    monkeypatch.setattr(memory, "free", lambda: num_bytes)
    return num_bytes


def test_more_than_half_of_the_free_memory_is_refused(free):
    reading.check_memory(free // 2, "it needs")
    with pytest.raises(ValueError, match="it needs 2 MiB, and 4 MiB of memory are free"):
        reading.check_memory(free // 2 + 1, "it needs")


def test_a_small_file_is_read_however_little_memory_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "free", lambda: 0)
    (tmp_path / "small").write_bytes(bytes(reading.SMALL))
    assert len(reading.read_bytes(tmp_path / "small")) == reading.SMALL
    (tmp_path / "small").write_bytes(bytes(reading.SMALL + 1))
    with pytest.raises(OSError, match="of memory are free"):
        reading.read_bytes(tmp_path / "small")


def test_a_json_file_beyond_the_limit_is_refused_by_every_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_TEXT", 10)
    for name in ("rows.json", "rows.safetensors"):
        (tmp_path / name).write_bytes(bytes(11))
    assert len(reading.read_bytes(tmp_path / "rows.safetensors")) == 11
    with pytest.raises(OSError, match="it has 11 bytes, more than 10 bytes"):
        reading.read_bytes(tmp_path / "rows.json")


@pytest.mark.parametrize("start", ['x = "', 'x = """', "x = '", "x = '''", "#", ""])
def test_the_time_of_a_bad_string_grows_with_its_length_only(start):
    for piece in ('\\"', "\\", '"', "'", '" ', '""a', "''a", "#"):
        text = start + piece * ((1 << 20) // len(piece))
        began = time.process_time()
        reading.NO_KEYS.sub("", text)
        assert time.process_time() - began < 2


def test_a_bad_string_of_a_megabyte_is_refused_in_time():
    began = time.process_time()
    with pytest.raises(ValueError, match="Unterminated string"):
        reading.parse_toml('x = "' + '\\"' * (1 << 19))
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "text",
    [
        f"# {'.' * DOTS}\nx = 1",
        f"x = 1 # {'.' * DOTS}",
        f'x = "{"." * DOTS}"',
        f"x = '{'.' * DOTS}'",
        f'x = """\n{"." * DOTS} # "" \\""" \n"""""',
        f"x = '''\n{'.' * DOTS} # '' \"\n''''",
        f'"{"." * DOTS}" = 1',
    ],
)
def test_dots_of_comments_and_strings_do_not_count(text):
    assert len(reading.parse_toml(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        f"{KEY} = 1",
        f"[{KEY}]",
        f"# '\n{KEY} = 1",
        f"x = '#'\n{KEY} = 1",
        f'x = "\\""\n{KEY} = 1',
        f'x = {{a = """\n""", {KEY} = 1}}',
        f"x = {{a = '''\n# ''', {KEY} = 1}}",
        f'x = {{a = """"""", {KEY} = 1}}',
        KEY.replace("a", '"a.b"') + " = 1",
        ".".join("a" * 100_000) + " = 1",
    ],
)
def test_a_key_of_many_parts_is_refused_wherever_it_stands(text):
    with pytest.raises(ValueError, match=f"a key has more than {reading.MOST_DOTS} parts"):
        reading.parse_toml(text)
