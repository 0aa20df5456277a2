"""A client that answers a server: it holds its own rows and its own posterior, and sends what its method sends.

It runs the same `visit` as the simulator, on a shard that holds nothing but its own rows. Its state is written before
its answer leaves, so an answer that counts is one whose posterior is safe.
"""

import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.deploy import charter as charters
from priory.deploy import noise, wire
from priory.deploy.budget import Budget, price_of
from priory.deploy.charter import Charter
from priory.deploy.client_states import ClientStateStore, client_directory
from priory.deploy.examples import Examples
from priory.deploy.exchange import Reply, Request, digest_of, sentence
from priory.deploy.journal import LOG
from priory.deploy.node_log import NodeLog, Outcome
from priory.engine.export import save_model
from priory.engine.manifest import version_of
from priory.engine.personal import PersonalModel, Source
from priory.evaluate import ClientSlot, ClientTallies, EvaluationContext, evaluated_parts, tally_parts
from priory.fed import privacy, schedule, visit
from priory.fed.method import Message, Method
from priory.fed.shard import Shard
from priory.fed.visit import Record, RoundContext


class RowsError(UsageError):
    """The rows cannot be read, or do not have the form that the app states."""


class Client:
    """One client of a deployed federation."""

    def __init__(
        self, charter: Charter, number: int, examples: Callable[[], Examples], state: Path, app: str | None = None
    ) -> None:
        """Make the client of a number.

        Args:
            examples: Reads its rows.
            state: Directory in which it keeps what it keeps.
            app: SHA-256 of the app that it runs in, for the log.
        """
        if not 0 <= number < charter.question.num_clients:
            raise UsageError(
                f"Client {number} does not fit a federation of {charter.question.num_clients}; give its node a "
                f"partition-id from 0 to {charter.question.num_clients - 1}."
            )
        self.charter, self.number, self._state, self._read, self._app = charter, number, state, examples, app
        self._task = charter.task_of(number)
        self._blank = charter.record(number)
        self._rows: tuple[Shard, Shard] | None = None
        self.budget = Budget(client_directory(state, number), number)
        self.log = NodeLog(client_directory(state, number), number)

    def answer(self, request: Request) -> Reply:
        """Return the answer to a request, which is logged before it leaves.

        A failure is reported in one sentence and leaves the state as it was.
        """
        try:
            self._check(request)
            reply, outcome = self._answered(request)
        except UsageError as error:
            reply, outcome = Reply(self._config(request), error=sentence(str(error))), "refused"
        return self.log.admit(request, reply, outcome, self._app, self.charter.digest)

    def _answered(self, request: Request) -> tuple[Reply, Outcome]:
        """Return the answer, and whether it was given before."""
        match request.kind:
            case "hello":  # whether the rows fit the form that the app states would reveal something of them
                told = {} if self._is_private else {"examples": int(self._shards()[0].count)}
                return Reply(self._config(request) | {"client": self.number, **told}), "answered"
            case "train" if self._is_private and request.config.get("uploads", True):
                return self._train_in_private(request)
            case "train":
                return self._unpaid(request, self._trained, status=visit.KEPT), "answered"
            case "evaluate":
                return self._unpaid(request, self._evaluate), "answered"
        raise UsageError(f"kind={request.kind!r} is no request; install the same priory on all sides.")

    def _check(self, request: Request) -> None:
        """Raise unless the server has the same version and charter."""
        charters.check_version(str(request.config.get("version", "")), "The server")
        if request.config.get("charter") != self.charter.digest:
            raise UsageError(
                f"The server has charter {request.config.get('charter')} and client {self.number} has "
                f"{self.charter.digest}: their apps differ; submit the app again, so that all nodes get it."
            )
        self.budget.admit(None if self.charter.ledger is None else self.charter.ledger.mode)

    def _unpaid(self, request: Request, work: Callable[[Request], Reply], **told: int) -> Reply:
        """Return an answer that costs nothing: under privacy it is the same if the rows cannot be read."""
        try:
            return work(request)
        except RowsError:
            if not self._is_private:
                raise
            return Reply(self._config(request) | told)

    def _train_in_private(self, request: Request) -> tuple[Reply, Outcome]:
        """Return the one answer that the budget pays for: it is stored before it leaves, and given again as it is.

        Rows that cannot be read are paid for too, since the refusal reveals that.
        """
        assert self.charter.ledger is not None
        kept, t, question = self._kept(request), int(request.config["round"]), digest_of(request)
        chosen = self.charter.settings
        price = price_of(self.charter.ledger, f"{self.charter.digest} {chosen.rounds} {chosen.seed}")
        reply, made = self.budget.promise(kept.run, t, question, price), ""
        if not reply:
            made = kept.write_reply(self._trained(request))
            reply = self.budget.settle(kept.run, t, question, made)
        answer = kept.read_reply(reply)
        outcome: Outcome = "answered" if reply == made else "repeated"
        return Reply(dict(answer.config) | self._config(request), answer.arrays), outcome

    def _trained(self, request: Request) -> Reply:
        """Return the answer after one round of local work, whose state is kept."""
        charter, t = self.charter, int(request.config["round"])
        kept, down = self._kept(request), self._down(request)
        record, came_from = kept.read(t, self._blank)
        method = self._scheduled(request, t)
        root = charters.first_key(int(request.config["seed"]))
        context = charter.round_context(method, down, root, t, self.number, self._channel)
        uploads = jnp.bool_(bool(request.config.get("uploads", True)))
        after, message, info, status = _visit(context, self._shards()[0], record, jnp.int32(self.number), uploads)
        # Which rounds have a state can be asked for, so under privacy it may not depend on the rows.
        if self._is_private or not visit.is_rejected(int(status)):
            kept.write(jax.tree.map(np.asarray, after), t + 1, came_from)
        payload = jax.tree.map(np.asarray, charter.thinned(message.payload))
        # Whoever does not upload, or has nothing fit to send, says so and sends nothing.
        sends = float(message.weight) > 0
        if sends and isinstance(charter.channel, privacy.Noised):
            payload = self._noised(method, down, payload)
        arrays = wire.encode(Message(payload, message.weight)) if sends else {}
        if self._is_private:  # figures without noise, or a word on a failure, would tell what the noise hides
            told = visit.COUNTED if sends else visit.KEPT
            return Reply(self._config(request) | {"status": told}, arrays)
        metrics = {name: float(value) for name, value in info.items()}
        return Reply(self._config(request) | {"status": int(status)}, arrays, metrics)

    @cached_property
    def _channel(self) -> Any:
        """The channel of a visit; under local privacy it only clips, since noise is added to what comes out."""
        channel = self.charter.channel
        if not isinstance(channel, privacy.Noised):
            return channel
        return privacy.NoisedSum(channel.clip, channel.sd, parts=channel.parts)

    def _noised(self, method: Method, down: Any, difference: Any) -> Any:
        """Return what travels of a clipped difference: what everybody knows, plus the difference with noise."""
        ledger = self.charter.ledger
        assert ledger is not None
        stack = jax.tree.map(lambda leaf: leaf[None], difference)
        noised = noise.release(stack, ledger.clip, ledger.sd, ledger.grid, ledger.parts)
        public = jax.tree.map(np.asarray, _public(method, self._task, down, difference))
        return jax.tree.map(lambda one, other: (one + other).astype(one.dtype), public, noised)

    def _evaluate(self, request: Request) -> Reply:
        charter, t = self.charter, int(request.config["round"])
        kept, down = self._kept(request), self._down(request)
        record, _ = kept.read(t, self._blank)
        train, test = self._shards()
        root = charters.first_key(int(request.config["seed"]))
        settled = self._scheduled(request, max(t - 1, 0))
        context = EvaluationContext(charter.method, settled, self._task, down, root, jnp.int32(t))
        slot = ClientSlot(jnp.int32(self.number), jnp.asarray(record.joined), record.client)
        tallies, posterior, key = _score(context, slot, train, test)
        if request.config.get("final"):
            self._save(kept, posterior, key, t)
        sums = {} if self._is_private else wire.encode(jax.tree.map(np.asarray, tallies))
        return Reply(self._config(request), sums)

    def _save(self, kept: ClientStateStore, posterior: Any, key: Key, rounds: int) -> None:
        """Write the personal model to this client's own directory."""
        text = None if self.charter.settings.models is not None else self.charter.settings.model
        source = Source(self.charter.name, "personalise", text, str(self.number), rounds)
        model = PersonalModel(self.charter.method, self._task, posterior, self.charter.form, key, source)
        shutil.rmtree(kept.model, ignore_errors=True)
        kept.make_place()
        save_model(model, kept.model)

    @property
    def _is_private(self) -> bool:
        return privacy.is_private(self.charter.channel)

    def _kept(self, request: Request) -> ClientStateStore:
        return ClientStateStore(self._state, self.number, str(request.config.get("run", "")), self.charter.digest)

    def _down(self, request: Request) -> Any:
        return wire.decode(request.arrays, {"down": self.charter.contact(self.number).down})["down"]

    def _scheduled(self, request: Request, t: int) -> Any:
        schedules = self.charter.settings.schedules(self.charter.method)
        return schedule.resolve(self.charter.method, schedules, t, int(request.config["rounds"]))

    def _shards(self) -> tuple[Shard, Shard]:
        """The rows to learn from and those that score; read once."""
        if self._rows is None:
            own = self._own_examples()
            order = np.argsort(own.is_test, kind="stable")
            num = int((~own.is_test).sum())
            scale = None if own.scale is None else own.scale[order]
            whole = self.charter.shard(own.x[order], own.y[order], scale)
            capacity = 1 << max(num - 1, 0).bit_length()
            start, held = jnp.zeros(1, jnp.int32), len(order) - num
            train = Shard(whole.pool, start, start + num, capacity)
            test = Shard(whole.pool, start + num, start + held, 1 << max(held - 1, 0).bit_length())
            self._rows = train, test
        return self._rows

    def _own_examples(self) -> Examples:
        """Return the rows, checked; why they cannot be read is logged on this node alone, since it may quote a row."""
        try:
            own = self._read()
            if self._is_private:  # the sentences of the check count rows
                own.check(self.charter, self.number)
        except UsageError as error:
            LOG.error("client %s cannot read its rows: %s", self.number, error)
            raise RowsError(f"Client {self.number} cannot read its rows; the log of its node says why.") from None
        own.check(self.charter, self.number)
        return own

    def _config(self, request: Request) -> dict[str, Any]:
        """What every answer says: which question it answers, and by whom it was made."""
        told = {name: request.config[name] for name in ("run", "round", "attempt") if name in request.config}
        return {"kind": request.kind, "version": version_of("priory"), **told}


@jax.jit
def _visit(
    context: RoundContext, data: Shard, record: Record, client: Array, uploads: Array
) -> tuple[Record, Message, dict[str, Array], Array]:
    return visit.visit(context, data, record, client, uploads)[:4]


_public = jax.jit(privacy.public_reference)


@jax.jit
def _score(context: EvaluationContext, slot: ClientSlot, train: Shard, test: Shard) -> tuple[ClientTallies, Any, Key]:
    """The sums over a client's held-out rows, and its posterior with the key that predicts with it."""
    parts = evaluated_parts(context, slot, train, batched=False)
    posterior, key = parts["personal"]
    return tally_parts(context, parts, test), posterior, jax.random.clone(key)


def tallies_like(charter: Charter) -> ClientTallies:
    """The shapes of what a client answers when it is asked for its scores."""
    method, task, shard = charter.method, charter.tasks[0], charter.empty_shards.of(jnp.int32(0))
    root = charters.first_key(0)

    def scored() -> ClientTallies:
        down = trees.zeros(charter.contact().down)
        context = EvaluationContext(method, method, task, down, root, jnp.int32(0))
        state = method.init_client(task, down, jax.random.clone(root))
        return _score(context, ClientSlot(jnp.int32(0), jnp.bool_(False), state), shard, shard)[0]

    return jax.eval_shape(scored)
