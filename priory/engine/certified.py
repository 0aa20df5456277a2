"""Certificates of a run's newcomers, and of a client that took part under the prior of a run that held it out."""

import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from priory import certificate
from priory.certificate import TOOK_PART, Certificate
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.data import Federation
from priory.fed.method import Task
from priory.fed.shard import Shard
from priory.store import RunDirectory

Run = Any  # `engine.run.Run`, which imports this file
MOST_KNOWN = 0.1  # share of a client's rows that may equal some of the participants' by chance
WITHOUT_LABELS = "it was made without labels, and a certificate counts errors on them; give `onboard` x and y"
WITHOUT_ROWS = "the rows that it was made from are not kept with it; ask for it when the client is onboarded"


@dataclass(frozen=True)
class Basis:
    """What a certificate needs beside a model: what was broadcast, the client's rows, and where its draws come from.

    Attributes:
        federation: Of those that took part, none of whose rows may be the client's.
    """

    down: Any
    data: Shard
    federation: Federation
    root: Key
    completed: int
    place: int


def basis_of(run: Run, data: Shard, place: int) -> Basis:
    """The basis of a client that took no part in the run."""
    return Basis(run.method.broadcast(run.server), data, run.federation, run.root, run.completed, place)


def certify(
    method: Any, task: Task, posterior: Any, basis: Basis, delta: float, draws: int, client: str | None = None
) -> Certificate:
    """The certificate of a posterior; the method has been checked.

    Raises `UsageError` where more rows than a few are ones that participants trained on.
    """
    known, num = known_rows(basis.federation, basis.data), int(basis.data.count)
    if known > MOST_KNOWN * num:
        raise UsageError(
            f"{known} of the client's {num} rows are among those that participants trained on, so that the prior "
            "has seen them; certify a client that took no part."
        )
    t, place = jnp.int32(basis.completed), jnp.int32(basis.place)
    counts = certificate.counts_of(method, task, basis.down, posterior, basis.data, basis.root, t, place, num=draws)
    return certificate.conclude(counts, delta, method.certifies, client, basis.completed, known)


def known_rows(federation: Federation, data: Shard) -> int:
    """How many rows of a client equal, label included, ones that participants trained on.

    Some do by chance, where inputs have few values.
    """
    start, count = int(data.start[0]), int(data.count)
    own = slice(start, start + count)
    assert data.pool.y is not None
    return _known(_trained_on(federation), np.asarray(data.pool.x[own]), np.asarray(data.pool.y[own]), federation)


def _trained_on(federation: Federation) -> set[bytes]:
    split, num = federation.train, federation.num_clients
    return {
        x.tobytes() + y.tobytes()
        for start, rows in zip(split.start[:num], split.count[:num], strict=True)
        for x, y in zip(federation.x[start : start + rows], federation.y[start : start + rows], strict=True)
    }


def _known(seen: set[bytes], x: np.ndarray, y: np.ndarray, federation: Federation) -> int:
    x, y = x.astype(federation.x.dtype), y.astype(federation.y.dtype)
    return sum(one.tobytes() + label.tobytes() in seen for one, label in zip(x, y, strict=True))


def of_newcomers(run: Run, delta: float, draws: int) -> dict[str, Certificate]:
    """The certificates of all newcomers with training rows, by name; written down where the run has a directory."""
    certificate.check(run.method, run.name, run.task, delta, draws)
    ids = certificate.check_newcomers(run.federation)
    found = _of_each(run, ids, delta, draws)
    if run.path is not None and jax.process_index() == 0:
        try:
            RunDirectory(run.path).write_certificates({name: one.to_json() for name, one in found.items()})
        except OSError as error:
            warnings.warn(f"{run.path}/certificates.json was not written ({error.strerror}).", stacklevel=3)
    return found


def of_client(run: Run, client: int | str, prior: Run | None, delta: float, draws: int) -> Certificate:
    """The certificate of a newcomer, or of a client that took part under the prior of a run that held it out."""
    certificate.check(run.method, run.name, run.task, delta, draws)
    index = run.federation.index(client)
    if index >= run.task.num_clients:
        if prior is not None:
            raise UsageError(f"client={client} was held out of this run, which is prior enough; leave `prior` out.")
        return _of_each(run, np.array([index]), delta, draws)[run.federation.clients[index]]
    if prior is None:
        raise UsageError(f"client={client} has no certificate: {TOOK_PART}.")
    name = run.federation.clients[index]
    _check_prior(run, prior, name)
    place = prior.federation.index(name)
    basis = basis_of(prior, prior.train.of(jnp.int32(place)), place)
    return certify(prior.method, prior.task, run.client(index).posterior, basis, delta, draws, name)


def _of_each(run: Run, ids: np.ndarray, delta: float, draws: int) -> dict[str, Certificate]:
    counts, found = run.session.counts(ids, draws), {}
    federation, seen, failed = run.federation, _trained_on(run.federation), []
    for i, index in enumerate(ids):
        name, own = federation.clients[index], jax.tree.map(lambda leaf, i=i: leaf[i], counts)
        rows = federation.rows(int(index), "train")
        known = _known(seen, federation.x[rows], federation.y[rows], federation)
        try:
            found[name] = certificate.conclude(own, delta, run.method.certifies, name, run.completed, known)
        except UsageError as error:  # of this client alone
            failed.append(str(error))
    if not found:
        raise UsageError(failed[0])
    for sentence in failed:
        warnings.warn(sentence, stacklevel=4)
    return found


def _check_prior(run: Run, prior: Run, name: str) -> None:
    """Raise where a run cannot be the prior of a client of another."""
    if name not in prior.federation.clients[prior.task.num_clients :]:
        raise UsageError(f"client={name} is no newcomer of the run given as `prior`; give one that held it out.")
    outlines: list[Any] = [
        (jax.tree.structure(one.method), one.task.model, one.task.input_shape) for one in (run, prior)
    ]
    if outlines[0] != outlines[1]:
        raise UsageError("`prior` has another method, model or form of inputs; give a run that agrees in all three.")
    own, held_out = (one.federation.y[one.federation.rows(name, "train")] for one in (run, prior))
    if not np.array_equal(own, held_out):
        raise UsageError(f"client={name} has other training rows in `prior`; make both federations from the same data.")
