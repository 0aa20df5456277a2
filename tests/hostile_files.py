"""Bad contents of files by format, each with a part of the sentence that it ends in."""

import io
import json
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from priory.core.sealed import COMMENT, KEY, sealed, sealed_lines

GOOD = "y,c,a\n" + "".join(f"{row % 2},{'uv'[row % 2]},{row % 7 + 0.5}\n" for row in range(40))
BODY = GOOD.partition("\n")[2]


def forge(file: Path, old: str, new: str) -> None:
    """Change the text of a file as a stranger would, who gives it a new checksum where it had one."""
    text = file.read_text()
    assert old in text
    text = text.replace(old, new)
    if file.suffix == ".json":
        table = json.loads(text)
        del table[KEY]
        text = sealed(table, indent=2)
    elif COMMENT in text:
        text = sealed_lines(text.partition(COMMENT)[0])
    file.write_text(text)


def rows(make: Callable[[int], str], num: int = 12, header: str = "y,c,a") -> str:
    return header + "\n" + "".join(make(row) + "\n" for row in range(num))


# The contents of a CSV file with target y and client c, and a part of the sentence.
CSV: dict[str, tuple[str | bytes, str]] = {
    "an empty file": ("", "is empty"),
    "only blank lines": ("\n\n\n", "is empty"),
    "only a header": ("y,c,a\n", "has no rows"),
    "only a byte order mark": (b"\xef\xbb\xbf", "is empty"),
    "no target": (rows(lambda row: f"u,{row}", header="c,a"), "column 'y' is not known"),
    "no client": (rows(lambda row: f"{row % 2},{row}", header="y,a"), "column 'c' is not known"),
    "a target in other letters": (GOOD.replace("y,c,a", "Y,c,a"), "column 'y' is not known"),
    "a target with a full-width name": (GOOD.replace("y,c,a", "\uff59,c,a"), "column 'y' is not known"),
    "two columns of one name": (rows(lambda row: f"{row % 2},u,1,2", header="y,c,a,a"), "two columns named 'a'"),
    "two targets": (rows(lambda row: f"{row % 2},u,1,2", header="y,c,y,a"), "two columns named 'y'"),
    "a column without a name": (rows(lambda row: f"{row % 2},u,1,2", header="y,c,,a"), "has no name for column 3"),
    "no header": (BODY, "is not known"),
    "a row that is longer than the header": (GOOD + "1,u,1,2\n", "cannot be read as CSV"),
    "a row that is longer than all others": (rows(lambda row: "1,u,1" + ",2" * row), "cannot be read as CSV"),
    "a header that is shorter than the rows": (rows(lambda row: f"{row % 2},u,1,2"), "cannot be read as CSV"),
    "rows without a target": (GOOD + "1\n,u\n", "missing in 1 of"),
    "a row without a client": (GOOD + "1\n", "missing in 1 of"),
    "semicolons": (GOOD.replace(",", ";"), "separated by semicolons"),
    "tabs": (GOOD.replace(",", "\t"), "separated by tabs"),
    "bars": (GOOD.replace(",", "|"), "separated by bars"),
    "UTF-16": (GOOD.encode("utf-16"), "cannot be read as CSV"),
    "UTF-32": (GOOD.encode("utf-32"), "cannot be read as CSV"),
    "Latin-1": (GOOD.replace("u,", "\xfc,").encode("latin-1"), "save it as comma-separated UTF-8"),
    "a Latin-1 header": (GOOD.replace("a\n", "\xe4\n", 1).encode("latin-1"), "UTF-8"),
    "an image": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "cannot be read as CSV"),
    "a zip file": (b"PK\x03\x04" + bytes(100), "is not known"),
    "NUL bytes alone": (b"\x00" * 1000, "is not known"),
    "a NUL byte in the header": (GOOD.replace("y,c", "y\x00,c"), "column 'y' is not known"),
    "a quote that is never closed": (GOOD + '1,u,"5\n', "cannot be read as CSV"),
    "a quote in the header that is never closed": (GOOD.replace("y,c,a", '"y,c,a'), "priory:"),
    "HTML": ("<!doctype html><html><body>404, not found</body></html>\n", "is not known"),
    "JSON": ('{"y": [1, 2], "c": ["u", "v"]}\n', "is not known"),
    "an infinite cell": (GOOD + "1,u,inf\n", "is infinite in 1 rows"),
    "a negative infinite cell": (GOOD + "1,u,-inf\n", "is infinite in 1 rows"),
    "a cell above single precision": (GOOD + "1,u,1e39\n", "beyond single precision"),
    "a cell above double precision": (GOOD + "1,u,1e400\n", "is infinite in 1 rows"),
    "an integer of 400 digits": (GOOD + f"1,u,{'9' * 400}\n", "column 'a'"),
    "an integer of 10,000 digits": (GOOD + f"1,u,{'9' * 10_000}\n", "column 'a'"),
    "integers of 25 digits in every row": (rows(lambda row: f"{row % 2},u,{row}{'7' * 45}"), "column 'a'"),
    "no value in a column": (rows(lambda row: f"{row % 2},u,", 12), "has no value in any row"),
    "names in a column": (rows(lambda row: f"{row % 2},u,name{row}", 40), "like an identifier"),
    "dates in a column": (rows(lambda row: f"{row % 2},u,2024-03-{row + 1:02}"), "holds dates"),
    "digits of another script": (
        rows(lambda row: f"{row % 2},u,{chr(0x660 + row % 10) * (row + 1)}", 40),
        "column 'a'",
    ),
    "as many classes as rows": (rows(lambda row: f"class{row},u,{row}.5", 40), "with 40 different values"),
    "a missing class": (GOOD + ",u,1\n", "NaN or infinite in 1 of 41 rows"),
    "a class called nan": (GOOD + "nan,u,1\n", "NaN or infinite in 1 of 41 rows"),
    "no feature": (rows(lambda row: f"{row % 2},u", header="y,c"), "no column is left"),
}


def header(shape: object, descr: object = "<f8", version: tuple[int, int] = (1, 0), text: str | None = None) -> bytes:
    """The header of an array, which may declare anything."""
    if text is None:
        text = repr({"descr": descr, "fortran_order": False, "shape": shape})
    raw = text.encode("latin-1") + b"\n"
    return npy.magic(*version) + struct.pack("<H" if version == (1, 0) else "<I", len(raw)) + raw


def array(value: object) -> bytes:
    written = io.BytesIO()
    np.save(written, np.asarray(value), allow_pickle=True)
    return written.getvalue()


ARRAYS = {
    "x": array(np.arange(24.0).reshape(12, 2)),
    "y": array(np.arange(12) % 2),
    "client": array(np.arange(12) // 6),
}


def archive(method: int = zipfile.ZIP_STORED, **changed: bytes | None) -> bytes:
    """A .npz file with these members in place of good ones; None leaves one out."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", method) as file:
        for name, raw in (ARRAYS | changed).items():
            if raw is not None:
                file.writestr(f"{name}.npy", raw)
    return written.getvalue()


def bomb(gigabytes: int) -> bytes:
    """A small file whose directory declares many gigabytes of an array, as its header does."""
    raw, num = header((gigabytes << 27,)), gigabytes << 30
    small = archive(x=raw + bytes(100))
    at = small.index(b"PK\x01\x02")
    true = struct.pack("<I", len(raw) + 100)
    assert small[at + 24 : at + 28] == true
    size = (len(raw) + num) & 0xFFFFFFFF
    return small[: at + 24] + struct.pack("<I", size) + small[at + 28 :]


def twice() -> bytes:
    written = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(written, "w") as file:
        warnings.simplefilter("ignore")  # of the second x
        for name in ("x", *ARRAYS):
            file.writestr(f"{name}.npy", ARRAYS[name])
    return written.getvalue()


def encrypted() -> bytes:
    raw = bytearray(archive())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        raw[raw.index(mark) + place] |= 1
    return bytes(raw)


def damaged(at: int) -> bytes:
    raw = bytearray(archive(zipfile.ZIP_DEFLATED))
    raw[at] ^= 0xFF
    return bytes(raw)


NPZ: dict[str, tuple[Callable[[], bytes], str]] = {
    "an empty file": (lambda: b"", "cannot be read"),
    "text": (lambda: b"x,y,client\n", "cannot be read"),
    "an array without an archive": (lambda: ARRAYS["x"], "cannot be read"),
    "an array of 10^15 rows without an archive": (lambda: header((10**15,)), "cannot be read"),
    "a pickle": (lambda: b"\x80\x04K\x01.", "cannot be read"),
    "an archive cut in half": (lambda: archive()[: len(archive()) // 2], "cannot be read"),
    "an archive without its last byte": (lambda: archive()[:-1], "cannot be read"),
    "an archive without its beginning": (lambda: archive()[200:], "cannot be read"),
    "an archive without members": (lambda: archive(x=None, y=None, client=None), "no array 'x', only nothing"),
    "no x": (lambda: archive(x=None), "no array 'x'"),
    "no y": (lambda: archive(y=None), "no array 'y'"),
    "x twice": (twice, "two arrays have the same name"),
    "a password": (encrypted, "cannot be read"),
    "bzip2": (lambda: archive(zipfile.ZIP_BZIP2), "compressed in a way that NumPy does not use"),
    "LZMA": (lambda: archive(zipfile.ZIP_LZMA), "compressed in a way that NumPy does not use"),
    "a damaged array": (lambda: damaged(90), "cannot be read"),
    "10^15 rows": (lambda: archive(x=header((10**15, 2))), "declares shape (1000000000000000, 2)"),
    "10^15 labels": (lambda: archive(y=header((10**15,), "<i8")), "declares shape (1000000000000000,)"),
    "10^15 columns": (lambda: archive(x=header((1, 10**15))), "declares shape"),
    "10^200 rows": (lambda: archive(x=header((10**200, 2))), "declares shape"),
    "a thousand axes": (lambda: archive(x=header((1,) * 1000)), "cannot be read"),
    "10^15 rows of nothing": (lambda: archive(x=header((10**15,), "<U0")), "declares shape"),
    "10^15 rows without columns": (lambda: archive(x=header((10**15, 0))), "which holds no numbers"),
    "a negative number of rows": (lambda: archive(x=header((-1, 2))), "declares shape (-1, 2)"),
    "two negative axes": (lambda: archive(x=header((-4, -6)) + bytes(192)), "declares shape (-4, -6)"),
    "a row too few": (lambda: archive(x=header((12, 2)) + bytes(184)), "and the file has 184 bytes of it"),
    "a row too many": (lambda: archive(x=header((12, 2)) + bytes(208)), "and the file has 208 bytes of it"),
    "a shape of text": (lambda: archive(x=header("12")), "shape is not valid"),
    "a shape of fractions": (lambda: archive(x=header((1.5, 2.0))), "shape is not valid"),
    "an unknown type": (lambda: archive(x=header((12, 2), "<q9")), "not a valid dtype descriptor"),
    "objects": (lambda: archive(x=array(np.array([{}, []], object))), "holds object"),
    "labels that are objects": (lambda: archive(y=array(np.array(["a", None] * 6, object))), "holds object"),
    "fields": (lambda: archive(x=array(np.zeros(12, [("a", "<f8"), ("b", "O")]))), "numbers or text are expected"),
    "fields with names of other scripts": (lambda: archive(x=header((12,), version=(3, 0))), "has fields"),
    "raw bytes": (lambda: archive(x=array(np.zeros((12, 2), "V8"))), "numbers or text are expected"),
    "a header that is cut": (lambda: archive(x=ARRAYS["x"][:20]), "cannot be read"),
    "a header of another version": (lambda: archive(x=b"\x93NUMPY\x09\x00" + bytes(100)), "cannot be read"),
    "a header that is code": (lambda: archive(x=header(0, text="__import__('os').abort()")), "cannot be read"),
    "a header of nested brackets": (lambda: archive(x=header(0, text="(" * 9000)), "cannot be read"),
    "a header of a megabyte": (lambda: archive(x=header(0, version=(2, 0), text=" " * 10**6)), "cannot be read"),
    "a header without a shape": (lambda: archive(x=header(0, text="{'descr': '<f8'}")), "cannot be read"),
    "a header that declares 4 GB of itself": (
        lambda: archive(x=npy.magic(2, 0) + struct.pack("<I", 0xFFFFFFFF)),
        "cannot be read",
    ),
    "no header": (lambda: archive(x=b"twelve"), "cannot be read"),
    "a directory that declares 3 GB": (lambda: bomb(3), "cannot be read"),
    "an array of text": (lambda: archive(x=array([["a", "b"]] * 12)), "which is not numeric"),
    "complex numbers": (lambda: archive(x=array(np.zeros((12, 2), complex))), "which is not numeric"),
    "dates": (lambda: archive(x=array(np.zeros((12, 2), "M8[s]"))), "which is not numeric"),
    "NaN": (lambda: archive(x=array(np.full((12, 2), np.nan))), "NaN or infinite in 12 of 12 rows"),
    "infinity": (lambda: archive(x=array(np.full((12, 2), np.inf))), "NaN or infinite in 12 of 12 rows"),
    "numbers above single precision": (lambda: archive(x=array(np.full((12, 2), 1e300))), "beyond single precision"),
    "no rows": (lambda: archive(x=array(np.zeros((0, 2)))), "which holds no numbers"),
    "labels of another length": (lambda: archive(y=array([0, 1])), "y has 2 rows and x has 12"),
    "labels in a table": (lambda: archive(y=array(np.zeros((12, 2)))), "y has shape (12, 2)"),
    "clients of another length": (lambda: archive(client=array([0])), "client has 1 rows and x has 12"),
    "labels that are NaN": (lambda: archive(y=array(np.full(12, np.nan))), "in 12 of 12 rows"),
}

MANIFEST = '[method]\nname = "fedavg"\n[run]\nmodel = "linear"\n[data]\ndata = "digits"\nclients = 5\n'
TOML: dict[str, tuple[str | bytes, str]] = {
    "an empty file": ("", "has no [method] table"),
    "text": ("not TOML [", "is not valid TOML"),
    "bytes": (bytes(range(128, 256)), "is not valid TOML"),
    "UTF-16": (MANIFEST.encode("utf-16"), "is not valid TOML"),
    "a NUL byte": (MANIFEST + "\0", "is not valid TOML"),
    "lists in 100,000 lists": ("a = " + "[" * 100_000, "nested too deeply"),
    "tables in 100,000 tables": ("a = " + "{a=" * 100_000, "nested too deeply"),
    "a key of 100,000 parts": (".".join("a" * 100_000) + " = 1", "a key has more than 200 parts"),
    "a quoted key of 100,000 parts": (".".join(['"a.b"'] * 100_000) + " = 1", "a key has more than 200 parts"),
    "a table of 100,000 parts": (f"[{'.'.join('a' * 100_000)}]", "a key has more than 200 parts"),
    "an integer of 10,000 digits": ("a = " + "9" * 10_000, "is not valid TOML"),
    "17 MB": ("# " + "x" * 17_000_000, "more than 16 MiB"),
    "a table twice": (MANIFEST + "[run]\n", "is not valid TOML"),
    "a word for a table": ('method = "fedavg"\nrun = 1\ndata = 2\n', "has no [method] table"),
    "an unknown method": (MANIFEST.replace("fedavg", "fedavgg"), "did you mean fedavg?"),
    "a method that is a list": (MANIFEST.replace('"fedavg"', '["fedavg"]'), "is not registered"),
    "an unknown setting": (MANIFEST.replace("[data]", "spin = 1\n[data]"), "spin is not a setting"),
    "an unknown hyper-parameter": (MANIFEST.replace("[run]", "spin = 1\n[run]"), "spin is not a field"),
    "a list for a hyper-parameter": (MANIFEST.replace("[run]", "work = [1]\n[run]"), "correct the manifest"),
    "code for a model": (MANIFEST.replace("linear", "os:abort"), "--trust-code"),
    "code among models": (MANIFEST.replace('model = "linear"', 'models = "mlp:4,8,os:abort"'), "--trust-code"),
    "a number for a model": (MANIFEST.replace('"linear"', "3"), "is not text"),
    "a list for a model": (MANIFEST.replace('"linear"', '["os:abort"]'), "is not text"),
    "an unknown data set": (MANIFEST.replace("digits", "digit"), "'digits'"),
    "a date for rounds": (MANIFEST.replace("[data]", "rounds = 2024-01-01\n[data]"), "is not a whole number"),
    "rounds that are infinite": (MANIFEST.replace("[data]", "rounds = inf\n[data]"), "is not a whole number"),
}


def tensors(head: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(head) if length is None else length) + head + data


def tensor(shape: object, kind: str = "F32", offsets: object = (0, 4)) -> bytes:
    return tensors(json.dumps({"a": {"dtype": kind, "shape": shape, "data_offsets": offsets}}).encode(), data=bytes(4))


SAFETENSORS: dict[str, bytes] = {
    "an empty file": b"",
    "three bytes": b"abc",
    "a header of 2^63 bytes": tensors(b"{}", 2**63),
    "a header of 2^64 - 1 bytes": tensors(b"{}", 2**64 - 1),
    "a header of 50 MB in a small file": tensors(b"{}", 50_000_000),
    "a header that is longer than the file": tensors(b"{}", 100),
    "a header of no bytes": tensors(b""),
    "a header that is no JSON": tensors(b"{{{{"),
    "a header that is a list": tensors(b"[1, 2]"),
    "a header of 100,000 lists": tensors(b"[" * 100_000),
    "a header that is no text": tensors(bytes(range(128, 256))),
    "a tensor of 10^15 rows": tensor([10**15]),
    "a tensor of 2^64 rows": tensor([2**64]),
    "a tensor with a negative axis": tensor([-1]),
    "a tensor behind the end": tensor([1], offsets=(0, 10**12)),
    "a tensor that ends before it begins": tensor([1], offsets=(4, 0)),
    "a tensor of an unknown type": tensor([1], "F31"),
    "the tensors of something else": tensor([1]),
}
WORDS = {
    "a list": "[]",
    "a number": "1",
    "nothing": "",
    "lists in 100,000 lists": "[" * 100_000,
    "objects in 100,000 objects": '{"a":' * 100_000,
    "an integer of 10,000 digits": "9" * 10_000,
    "bytes that are no text": b"\xff\xfe",
    "text": "not JSON",
    "half of an object": '{"format": 1',
    "another format": '{"format": 99}',
    "NaN for the format": '{"format": NaN}',
    "nothing but a format": '{"format": 1}',
    "a list for the task": '{"format": 1, "weights": {"sha256": ""}, "task": []}',
}
