"""The data sets by name, and `load`, which also takes the path of a .csv or .npz file."""

import gzip
import importlib.util
import io
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from priory.core.errors import UsageError
from priory.data import arrays, checks, files, synthetic, tables
from priory.data import schema as schemas
from priory.data.dataset import Dataset
from priory.data.federation import Federation
from priory.data.options import PartitionOptions, ReadOptions, check_names, names, takes

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Entry", "describe", "from_spec", "load"]

OWN_FILES = (".csv", ".npz")


@dataclass(frozen=True)
class Entry:
    """One line of the catalogue."""

    name: str
    examples: int | None  # None: as many as asked for
    shape: str
    classes: int | None  # None: regression
    clients: str  # natural clients, or how to get some
    licence: str
    source: str
    available: bool = True


@takes(ReadOptions)
def load(name: str | os.PathLike[str], **options: Any) -> Dataset:
    """Return the data set of that name, or the one in a .csv or .npz file.

    Args:
        name: A name that `describe` lists, `synthetic:PROBLEM[:key=value,...]`, or a path.
        options: Those of `ReadOptions`.
    """
    return read(os.fspath(name), ReadOptions.make(options))


def read(name: str, options: ReadOptions) -> Dataset:
    """Return the data set of that name or in that file."""
    suffix, given = Path(name).suffix, options.given
    if suffix in OWN_FILES and options.schema is not None:
        stated = schemas.read(options.schema)
        given = stated.arguments({key: value for key, value in given.items() if key != "schema"})
        data = stated.dataset(name)
    elif suffix == ".csv":
        options.refuse(name, "scaling")
        data = tables.from_csv(name, options)
    elif suffix == ".npz":
        options.refuse(name, "target", "client", "drop", "group", "scale")
        data = arrays.from_npz(name, task=options.task, scaling=options.scaling)
    else:
        data = _published(name, options)
    # A manifest may be run again from anywhere, so a file is named by its whole path.
    return replace(data, source={"data": str(Path(name).resolve()) if suffix in OWN_FILES else name, **given})


def from_spec(spec: dict[str, Any]) -> Federation:
    """Return the federation that `Federation.spec` describes, made again from its data set."""
    options = dict(spec)
    if options.pop("memory", False):
        raise UsageError(
            f"The data {spec['data']!r} came from memory, which no manifest can hold; pass federation= again."
        )
    name = options.pop("data", None)
    if name is None and "schema" in options:
        raise UsageError(
            f"The app was made from {options['schema']} alone and has no rows to deal; name this node's own file as "
            "data in its node-config."
        )
    if not isinstance(name, str):
        raise UsageError(f"data={name!r} names no data set; correct the manifest.")
    check_names(options, ReadOptions, PartitionOptions)
    reading = {key: options.pop(key) for key in names(ReadOptions) if key in options}
    return load(name, **reading).partition(**options)


def describe() -> list[Entry]:
    """Return the catalogue, with what can be read on this machine without a network."""
    return [
        replace(entry, available=entry.name not in files.FILES or files.available(entry.name)) for entry in CATALOGUE
    ]


def _published(name: str, options: ReadOptions) -> Dataset:
    """Return a data set of the catalogue, without the columns that are dropped."""
    is_made = name.split(":")[0] == "synthetic"
    if not is_made and name not in IMAGES and name not in TABLES:
        if Path(name).suffix or Path(name).exists():
            raise UsageError(
                f"data {name!r} is neither a data set nor a .csv or .npz file; convert it to one of those."
            )
        raise checks.unknown("data set", name, [entry.name for entry in CATALOGUE])
    options.refuse(
        name, *(key for key in names(ReadOptions) if key != "scaling" and not (key == "drop" and name in FEATURES))
    )
    if name in IMAGES:
        return _images(name, options.scaling)
    options.refuse(name, "scaling")
    data = synthetic.make(name) if is_made else TABLES[name]()
    if not options.drop:
        return data
    for column in options.drop:
        if column not in FEATURES[name]:
            raise checks.unknown(f"column of {name}", column, FEATURES[name])
    kept = [place for place, column in enumerate(FEATURES[name]) if column not in options.drop]
    if not kept:
        raise UsageError(
            f"drop={list(options.drop)} leaves {name} without a column; keep one, and choose model=intercept."
        )
    return replace(data, x=np.ascontiguousarray(data.x[:, kept]))


@dataclass(frozen=True)
class _Pixels:
    """How the pixels of a data set are scaled: its usual scaling, and the mean and deviation of pixels in [0, 1]."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    pixel_max: int = 255
    scaling: str = "standard"


IMAGES = {
    "digits": _Pixels((0.3053,), (0.3760,), pixel_max=16, scaling="unit"),
    "mnist": _Pixels((0.1307,), (0.3081,)),
    "mnist_writers": _Pixels((0.1307,), (0.3081,)),
    "fashion_mnist": _Pixels((0.2860,), (0.3530,)),
    "cifar10": _Pixels((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": _Pixels((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
CLASSES = {
    "fashion_mnist": ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}


def _images(name: str, scaling: str | None) -> Dataset:
    pixels = IMAGES[name]
    shift, factor = arrays.pixel_scaling(scaling or pixels.scaling, pixels.pixel_max, pixels.mean, pixels.deviation)
    parts = _read_images(name)
    test = parts.get("x_test", parts["x_train"][:0])
    y = np.concatenate([parts["y_train"], parts.get("y_test", parts["y_train"][:0])]).astype(np.int32)
    num_classes = 100 if name == "cifar100" else 10
    client: np.ndarray | None = None
    clients: tuple[str, ...] = ()
    if "client" in parts:
        names, client = np.unique(parts["client"], return_inverse=True)
        client, clients = client.astype(np.int32), tuple(map(str, names.tolist()))
    return Dataset(
        name=name,
        x=np.concatenate([parts["x_train"], test]) if len(test) else parts["x_train"],
        y=y,
        num_classes=num_classes,
        classes=tuple(CLASSES.get(name, map(str, range(num_classes)))),
        client=client,
        clients=clients,
        coarse=parts.get("coarse"),
        official_test=np.arange(len(y)) >= len(parts["x_train"]) if len(test) else None,
        pixel_max=pixels.pixel_max,
        shift=shift,
        factor=factor,
    )


def _read_images(name: str) -> dict[str, np.ndarray]:
    """Return x_train, y_train and, where there is one, the official test part or the natural clients."""
    if name == "digits":
        # Its file is read as it is: `load_digits` would import SciPy and pandas first, which takes longer than a round.
        place = Path(str(importlib.util.find_spec("sklearn").origin)).parent  # type: ignore[union-attr]
        table = np.loadtxt(place / "datasets" / "data" / "digits.csv.gz", delimiter=",").astype(np.int64)
        return {"x_train": table[:, :-1].reshape(-1, 8, 8, 1).astype(np.uint8), "y_train": table[:, -1]}
    directory = files.locate(name)
    if directory is None:
        return files.fetched(name)
    if name.startswith("cifar"):
        return _read_cifar(files.read(directory, name, f"{name}_26k.npz"))
    folder = "mnist" if name == "mnist_writers" else name
    parts = {"train": "train"} if name == "mnist_writers" else {"train": "train", "test": "t10k"}
    result = {}
    for part, prefix in parts.items():
        images = files.read(directory, name, f"{folder}/{prefix}-images-idx3-ubyte.gz")
        labels = files.read(directory, name, f"{folder}/{prefix}-labels-idx1-ubyte.gz")
        result[f"x_{part}"] = np.frombuffer(gzip.decompress(images), np.uint8, offset=16).reshape(-1, 28, 28, 1)
        result[f"y_{part}"] = np.frombuffer(gzip.decompress(labels), np.uint8, offset=8)
    if name == "mnist_writers":
        with np.load(io.BytesIO(files.read(directory, name, "mnist/writers.npz"))) as file:
            result["client"] = file["writer_train"]
    return result


def _read_cifar(content: bytes) -> dict[str, np.ndarray]:
    """Return images from differences along both axes, green kept and red and blue less green."""
    result = {}
    with np.load(io.BytesIO(content)) as file:
        for part in ("train", "test"):
            pixels = np.cumsum(np.cumsum(file[f"d_{part}"], 2, dtype=np.uint8), 3, dtype=np.uint8)
            pixels[:, 0] += pixels[:, 1]
            pixels[:, 2] += pixels[:, 1]
            result[f"x_{part}"] = np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))
            result[f"y_{part}"] = file[f"y_{part}"]
        if "coarse_train" in file:
            result["coarse"] = np.concatenate([file["coarse_train"], file["coarse_test"]]).astype(np.int32)
    return result


def _read_table(name: str) -> "pd.DataFrame":
    import pandas as pd

    (file,) = files.FILES[name]
    return pd.read_csv(io.BytesIO(files.read(files.SHIPPED, name, file)))


def _heart_disease() -> Dataset:
    """Disease (num > 0) from 13 measurements, 4 hospitals; a cholesterol or blood pressure of 0 means not measured."""
    frame = _read_table("heart_disease")
    for column in ("chol", "trestbps"):
        frame[column] = frame[column].where(frame[column] != 0)
    data = tables.from_frame(
        frame.assign(disease=frame["num"] > 0),
        target="disease",
        client="hospital",
        drop=["num"],
        categorical=("cp", "restecg", "slope", "thal"),
        name="heart_disease",
    )
    return replace(data, classes=("healthy", "disease"))


def _radon() -> Dataset:
    """Log radon from floor (0 basement, 1 first) and log uranium of the county; both columns in their own units."""
    frame = _read_table("radon")
    x = np.stack([frame["floor"].to_numpy(float), np.log(frame["county_uranium_ppm"].to_numpy(float))], axis=1)
    data = arrays.dataset(x, frame["log_radon"].to_numpy(), frame["county"].to_numpy(), task="regression")
    return replace(data, name="radon")


def _eight_schools() -> Dataset:
    """Rubin, Estimation in parallel randomized experiments, 1981: effects of coaching with known standard errors."""
    effect, error = [28, 8, -3, 7, -1, 1, 18, 12], [15, 10, 16, 11, 9, 11, 10, 18]
    data = arrays.dataset(np.ones((8, 1)), effect, list("ABCDEFGH"), scale=error, task="regression")
    return replace(data, name="eight_schools")


TABLES: dict[str, Callable[[], Dataset]] = {
    "heart_disease": _heart_disease,
    "radon": _radon,
    "eight_schools": _eight_schools,
}

FEATURES = {"radon": ("floor", "log_uranium")}  # columns that have names, and may be dropped

JANOSI = "Janosi, Steinbrunn, Pfisterer and Detrano 1989, Heart Disease, UCI, doi.org/10.24432/C52P4X"
EPA = "US EPA survey with county uranium, Gelman and Hill 2007; columns floor, log_uranium"
CATALOGUE = (
    Entry("digits", 1797, "8x8x1", 10, "partition", "CC BY 4.0", "scikit-learn, UCI optical digits"),
    Entry("mnist", 70000, "28x28x1", 10, "partition", "CC BY-SA 3.0", "LeCun, Cortes, Burges"),
    Entry("mnist_writers", 60000, "28x28x1", 10, "539 writers", "CC BY-SA 3.0, BSD", "MNIST with QMNIST writer ids"),
    Entry("fashion_mnist", 70000, "28x28x1", 10, "partition", "MIT", "Zalando"),
    Entry("cifar10", 26000, "32x32x3", 10, "partition", "none stated", "Krizhevsky 2009; 60000 from the hub"),
    Entry("cifar100", 26000, "32x32x3", 100, "partition", "none stated", "Krizhevsky 2009; 60000 from the hub"),
    Entry("heart_disease", 920, "13 columns", 2, "4 hospitals", "CC BY 4.0", JANOSI),
    Entry("radon", 919, "2 columns", None, "85 counties", "public domain", EPA),
    Entry("eight_schools", 8, "1", None, "8 schools", "published table", "Rubin 1981"),
    Entry("synthetic:linear", None, "dim", None, "as asked", "none", "hierarchical linear regression"),
    Entry("synthetic:quadratic", None, "1", None, "as asked", "none", "one mean per client"),
    Entry("synthetic:clusters", None, "dim", 4, "as asked", "none", "Gaussian classes, clustered clients"),
    Entry("synthetic:representation", None, "dim", None, "as asked", "none", "shared linear map, own effects"),
)
