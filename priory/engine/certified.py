"""Certificates of a run's newcomers, and of a client that took part under the prior of a run that held it out."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from priory import certificate, methods
from priory.certificate import TOOK_PART, Certificate
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.data import Federation
from priory.engine.evaluator import Evaluator
from priory.engine.prepared import Prepared
from priory.fed.capabilities import Certifies
from priory.fed.method import Method, Task
from priory.fed.shard import Shard
from priory.store import CERTIFICATES, RunDirectory

WITHOUT_LABELS = "it was made without labels, and a certificate counts errors on them; give `onboard` x and y"
WITHOUT_ROWS = "the rows that it was made from are not kept with it; ask for it when the client is onboarded"


@dataclass(frozen=True)
class Basis:
    """What a certificate needs besides a model: the broadcast of a run as the prior, and the client's rows.

    It does not keep the run, whose states of clients may be large.

    Attributes:
        down: The broadcast of a run in which the client took no part.
        federation: The participants of that run, none of whose rows may be the client's.
        root: The root key of that run.
        completed: Its rounds.
        data: The client's rows.
        place: The client's number, from which the key of its draws follows.
        group: The group of each of the client's rows; None where it is not known.
    """

    method: Method
    down: Any
    federation: Federation
    root: Key
    completed: int
    data: Shard
    place: int
    group: np.ndarray | None


def basis_of(evaluator: Evaluator, data: Shard, place: int, group: np.ndarray | None) -> Basis:
    """Return the basis of a client that took no part in a run."""
    ready = evaluator.ready
    down = ready.method.broadcast(evaluator.server)
    return Basis(ready.method, down, ready.federation, ready.root, evaluator.completed, data, place, group)


def certify(
    task: Task, posterior: Any, basis: Basis, delta: float, draws: int, client: str | None = None
) -> Certificate:
    """Return the certificate of a posterior; the method has been checked, its rows are checked here."""
    method, federation, data, start = basis.method, basis.federation, basis.data, int(basis.data.start[0])
    own = slice(start, start + int(data.count))
    assert data.pool.y is not None
    x, y = np.asarray(data.pool.x[own]), np.asarray(data.pool.y[own])
    seen = certificate.participants_rows(federation)
    known = certificate.check_rows(federation, seen, x, y, basis.group)
    key = certificate.draw_key(basis.root, jnp.int32(basis.completed), jnp.int32(basis.place))
    counts = certificate.counts_of(method, task, basis.down, posterior, data, key, num=draws)
    assert isinstance(method, Certifies)
    group = federation.form.role("group")
    return certificate.conclude(counts, delta, method.certifies, client, basis.completed, known, group)


def of_newcomers(evaluator: Evaluator, path: Path | None, delta: float, draws: int) -> dict[str, Certificate]:
    """The certificates of all newcomers with training rows, by name; written down where the run has a directory."""
    _check(evaluator, delta, draws)
    ids = certificate.check_newcomers(evaluator.ready.federation)
    found = _of_each(evaluator, ids, delta, draws)
    if path is not None and jax.process_index() == 0:
        try:
            RunDirectory(path).write(CERTIFICATES, {name: one.to_json() for name, one in found.items()}, 2)
        except OSError as error:
            warnings.warn(f"{path}/certificates.json was not written ({error.strerror}).", stacklevel=3)
    return found


def of_client(
    evaluator: Evaluator,
    client: int | str,
    prior: Evaluator | None,
    posterior: Callable[[], Any],
    delta: float,
    draws: int,
) -> Certificate:
    """The certificate of a newcomer, or of a client that took part under the prior of a run that held it out.

    Args:
        posterior: Gives the posterior of a client that took part.
    """
    _check(evaluator, delta, draws)
    federation = evaluator.ready.federation
    index = federation.index(client)
    name = federation.clients[index]
    if index >= federation.num_clients:
        if prior is not None:
            raise UsageError(f"client={client} was held out of this run, which is prior enough; leave `prior` out.")
        return _of_each(evaluator, np.array([index]), delta, draws)[name]
    if prior is None:
        raise UsageError(f"client={client} has no certificate: {TOOK_PART}.")
    _check_prior(evaluator.ready, prior.ready, name)
    place = prior.ready.federation.index(name)
    group = certificate.group_of(prior.ready.federation, place)
    basis = basis_of(prior, prior.ready.train.of(jnp.int32(place)), place, group)
    return certify(prior.ready.task, posterior(), basis, delta, draws, name)


def _check(evaluator: Evaluator, delta: float, draws: int) -> None:
    """Raise unless the method gives certificates, and these numbers make sense."""
    method = evaluator.ready.method
    certificate.check(method, methods.name_of(method), evaluator.ready.task, delta, draws)


def _of_each(evaluator: Evaluator, ids: np.ndarray, delta: float, draws: int) -> dict[str, Certificate]:
    method, federation = evaluator.ready.method, evaluator.ready.federation
    assert isinstance(method, Certifies)
    known, found, failed = {}, {}, []
    seen, by = certificate.participants_rows(federation), federation.form.role("group")
    for index in map(int, ids):
        rows, group = federation.rows(index, "train"), certificate.group_of(federation, index)
        x, y, who = federation.x[rows], federation.y[rows], f"client {federation.clients[index]}"
        try:
            known[index] = certificate.check_rows(federation, seen, x, y, group, who)
        except UsageError as error:  # of this client alone
            failed.append(str(error))
    counts = evaluator.counts(np.array(list(known)), draws) if known else None
    for i, (index, equal) in enumerate(known.items()):
        name, own = federation.clients[index], jax.tree.map(lambda leaf, i=i: leaf[i], counts)
        try:
            found[name] = certificate.conclude(own, delta, method.certifies, name, evaluator.completed, equal, by)
        except UsageError as error:
            failed.append(str(error))
    if not found:
        raise UsageError(failed[0])
    for sentence in failed:
        warnings.warn(sentence, stacklevel=4)
    return found


def _check_prior(run: Prepared, prior: Prepared, name: str) -> None:
    """Raise where a run cannot be the prior of a client of another."""
    if name not in prior.federation.clients[prior.federation.num_clients :]:
        raise UsageError(f"client={name} is no newcomer of the run given as `prior`; give one that held it out.")
    outlines: list[Any] = [
        (jax.tree.structure(one.method), one.task.model, one.task.input_shape) for one in (run, prior)
    ]
    if outlines[0] != outlines[1]:
        raise UsageError("`prior` has another method, model or form of inputs; give a run that agrees in all three.")
    own, held_out = (one.federation.y[one.federation.rows(name, "train")] for one in (run, prior))
    if not np.array_equal(own, held_out):
        raise UsageError(f"client={name} has other training rows in `prior`; make both federations from the same data.")
