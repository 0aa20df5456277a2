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
from priory.fed.capabilities import Certifies
from priory.fed.method import Method, Task
from priory.fed.shard import Shard
from priory.store import RunDirectory

Run = Any  # `engine.run.Run`, which imports this file
WITHOUT_LABELS = "it was made without labels, and a certificate counts errors on them; give `onboard` x and y"
WITHOUT_ROWS = "the rows that it was made from are not kept with it; ask for it when the client is onboarded"


@dataclass(frozen=True)
class Basis:
    """What a certificate needs beside a model: what was broadcast, the client's rows, and where its draws come from.

    Attributes:
        federation: Of those that took part, none of whose rows may be the client's.
        group: The group of each of the client's rows; None where it is not known.
    """

    down: Any
    data: Shard
    federation: Federation
    root: Key
    completed: int
    place: int
    group: np.ndarray | None


def basis_of(run: Run, data: Shard, place: int, group: np.ndarray | None) -> Basis:
    """The basis of a client that took no part in the run."""
    return Basis(run.method.broadcast(run.server), data, run.federation, run.root, run.completed, place, group)


def certify(
    method: Method, task: Task, posterior: Any, basis: Basis, delta: float, draws: int, client: str | None = None
) -> Certificate:
    """The certificate of a posterior; the method has been checked, its rows are checked here."""
    federation, data, start = basis.federation, basis.data, int(basis.data.start[0])
    own = slice(start, start + int(data.count))
    assert data.pool.y is not None
    x, y = np.asarray(data.pool.x[own]), np.asarray(data.pool.y[own])
    seen = certificate.participants_rows(federation)
    known = certificate.check_rows(federation, seen, x, y, basis.group)
    t, place = jnp.int32(basis.completed), jnp.int32(basis.place)
    counts = certificate.counts_of(method, task, basis.down, posterior, basis.data, basis.root, t, place, num=draws)
    group = federation.form.role("group")
    assert isinstance(method, Certifies)
    return certificate.conclude(counts, delta, method.certifies, client, basis.completed, known, group)


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
    group = certificate.group_of(prior.federation, place)
    basis = basis_of(prior, prior.train.of(jnp.int32(place)), place, group)
    return certify(prior.method, prior.task, run.client(index).posterior, basis, delta, draws, name)


def _of_each(run: Run, ids: np.ndarray, delta: float, draws: int) -> dict[str, Certificate]:
    federation, known, found, failed = run.federation, {}, {}, []
    seen, by = certificate.participants_rows(federation), federation.form.role("group")
    for index in map(int, ids):
        rows, group = federation.rows(index, "train"), certificate.group_of(federation, index)
        x, y, who = federation.x[rows], federation.y[rows], f"client {federation.clients[index]}"
        try:
            known[index] = certificate.check_rows(federation, seen, x, y, group, who)
        except UsageError as error:  # of this client alone
            failed.append(str(error))
    counts = run.session.counts(np.array(list(known)), draws) if known else None
    for i, (index, equal) in enumerate(known.items()):
        name, own = federation.clients[index], jax.tree.map(lambda leaf, i=i: leaf[i], counts)
        try:
            found[name] = certificate.conclude(own, delta, run.method.certifies, name, run.completed, equal, by)
        except UsageError as error:
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
