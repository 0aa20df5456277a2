"""Where the files of a data set are: this package, `PRIORY_DATA`, the user's cache, the hub; all checksummed."""

import hashlib
import io
import os
from pathlib import Path

import numpy as np

from priory.core.errors import UsageError, explain_os_errors
from priory.core.files import write_atomically

__all__ = ["FILES", "HUB", "SHIPPED", "available", "fetch", "fetched", "locate", "read"]

# The files in this package, which PRIORY_DATA never replaces; its README.md has their sources, licences and citations.
SHIPPED = Path(__file__).parent / "shipped"

FILES: dict[str, dict[str, str]] = {
    "mnist": {
        "mnist/train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "mnist/train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "mnist/t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "mnist/t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    "mnist_writers": {
        "mnist/train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "mnist/train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "mnist/writers.npz": "9cb6a46f6056f20ab91252a94ba9c2b889a25859b98e1ff6b7324b9f96deda80",
    },
    "fashion_mnist": {
        "fashion_mnist/train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "fashion_mnist/train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "fashion_mnist/t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "fashion_mnist/t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
    "cifar10": {"cifar10_26k.npz": "9adf3047d659a413a4881c0b71c14680532b6fffc580951b0335eed265e4f9d8"},
    "cifar100": {"cifar100_26k.npz": "c9a51ef9a8e90520fb6ebe504b449dc1b0d27f520d27fcaa564bf65a54c17311"},
    "heart_disease": {"heart_disease.csv": "faa4910e53dbdba7ae8cb45fc70e9e8032a1002ecdf874b7bbd5b1c8e9cade87"},
    "radon": {"radon_minnesota.csv": "2238a1bf9cd149e8cd02dbf41f62077cfb52c8ca1668045053268a77ac06ce07"},
}

# Repository, image column, label column on the hub.
HUB: dict[str, tuple[str, str, str]] = {
    "mnist": ("ylecun/mnist", "image", "label"),
    "fashion_mnist": ("zalando-datasets/fashion_mnist", "image", "label"),
    "cifar10": ("uoft-cs/cifar10", "img", "label"),
    "cifar100": ("uoft-cs/cifar100", "img", "fine_label"),
}


def locate(name: str) -> Path | None:
    """Return the first of PRIORY_DATA and the cache that has all files of the data set; None when neither has."""
    given = os.environ.get("PRIORY_DATA")
    if given and not Path(given).is_dir():
        raise UsageError(f"PRIORY_DATA={given} is not a directory; set it to the directory that holds the data files.")
    places = [Path(given), cache()] if given else [cache()]
    return next((place for place in places if _holds(place, name)), None)


def available(name: str) -> bool:
    """Return whether the data set can be read without a network."""
    given = os.environ.get("PRIORY_DATA")
    places = [SHIPPED, cache()] + ([Path(given)] if given else [])
    return any(_holds(place, name) for place in places) or _fetched_path(name).exists()


def read(directory: Path, name: str, file: str) -> bytes:
    """Return the bytes of one file of the data set, checked against its sha256."""
    path = directory / file
    with explain_os_errors(f"{path} cannot be read", "; make it readable"):
        content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != FILES[name][file]:
        remedy = "install Priory again" if directory == SHIPPED else "replace it with the published file"
        raise UsageError(f"{path} is damaged: its sha256 is not that of {name}; {remedy}.")
    return content


def fetched(name: str) -> dict[str, np.ndarray]:
    """Return x_train, y_train, x_test, y_test (uint8 NHWC) from the cache, or from the hub and then cached."""
    path = _fetched_path(name)
    if not path.exists():
        _store(path, _fetch_or_explain(name))
    content = path.read_bytes()
    note = path.with_suffix(".sha256")
    if not note.exists() or note.read_text().strip() != hashlib.sha256(content).hexdigest():
        raise UsageError(f"{path} is damaged: its sha256 is not the one noted beside it; delete it to fetch it again.")
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def fetch(name: str) -> dict[str, np.ndarray]:
    """Return the official parts as arrays, through the package `datasets`."""
    from datasets import load_dataset

    repository, image, label = HUB[name]
    arrays = {}
    for part, rows in load_dataset(repository).items():
        x = np.stack([np.asarray(picture, np.uint8) for picture in rows[image]])
        arrays[f"x_{part}"] = x[..., None] if x.ndim == 3 else x
        arrays[f"y_{part}"] = np.asarray(rows[label], np.uint8)
    return arrays


def cache() -> Path:
    """Return the user's cache directory for this package."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "priory"


def _holds(directory: Path, name: str) -> bool:
    return name in FILES and all((directory / file).is_file() for file in FILES[name])


def _fetched_path(name: str) -> Path:
    return cache() / "fetched" / f"{name}.npz"


def _absent(name: str, reason: str = "") -> UsageError:
    """Return the error for a data set that is nowhere, with what to set."""
    directory = Path(os.environ.get("PRIORY_DATA") or cache())
    missing = next((file for file in FILES[name] if not (directory / file).is_file()), "its files")
    places = "PRIORY_DATA (not set)" if "PRIORY_DATA" not in os.environ else f"PRIORY_DATA={directory}"
    return UsageError(
        f"data set {name!r} is in neither {places} nor the cache {cache()}{reason}; "
        f"set PRIORY_DATA to a directory that holds {missing}."
    )


def _fetch_or_explain(name: str) -> dict[str, np.ndarray]:
    if name not in HUB:
        raise _absent(name)
    try:
        return fetch(name)
    except ImportError:
        raise _absent(name, ", and the package `datasets`, which could fetch it, is not installed") from None
    except Exception as error:  # whatever the hub, the network or the decoder raises, the remedy is the same
        raise _absent(name, f", and fetching it failed ({type(error).__name__})") from None


def _store(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write the arrays and their checksum; the file itself appears last and whole."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    content = buffer.getvalue()
    with explain_os_errors(f"{path} cannot be written", "; set XDG_CACHE_HOME to a writable directory"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".sha256").write_text(hashlib.sha256(content).hexdigest() + "\n")
        write_atomically(path, content)
