"""kNN-Per: the global model beside a vote of the nearest of a client's own examples.

Marfoq, Neglia, Kameni and Vidal, Personalized Federated Learning through Local Memorization, ICML 2022,
arXiv:2111.09360.

    p_k(y | x) = λ_k p_kNN(y | x) + (1 − λ_k) p_w(y | x)
    p_kNN(y | x) ∝ Σ_i 1{y_i = y} exp(−‖φ(x_i) − φ(x)‖² / (d s)),   i over the k nearest neighbours of x

Server keeps   w^t   the global weights; broadcast as they are
Client keeps   nothing between rounds; its datastore (φ(x_i), y_i) is made when it predicts, and never travels
Client sends   w_k   its weights after local training, weighted by n_k

φ(x) is what the last layer of the network sees, of dimension d: the network must end in a dense layer.

Differs from the paper: λ_k is the one of a grid under which the client's examples are likeliest, each predicted by the
vote of all others; the paper has a validation part that nobody trains on, and the global model was trained on these.
The grid ends before 1, since a vote alone gives probability 0 to classes without a neighbour. The datastore has room
for `capacity` examples, drawn at random where a client has more, so that all clients' models have one shape. A client
without examples has λ_k = 0.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import SharedModel
from priory.fed.checks import at_least, check_fields, positive
from priory.fed.local import Optimiser, Work, fit
from priory.fed.method import Info, Message, Method, Predictive, Task
from priory.fed.shard import Shard
from priory.methods._blocks.embedding import Embedding
from priory.models.features import Split
from priory.models.likelihood import Categorical
from priory.models.model import Params

BLOCK = 256  # queries whose distances to the datastore are held at once
TINY = float(jnp.finfo(jnp.float32).tiny)


@struct
class Datastore:
    """A client's own examples.

    Attributes:
        features: φ(x_i), (capacity, d).
        labels: y_i, (capacity,).
        count: How many there are; rows beyond are zeros.
    """

    features: Array
    labels: Array
    count: Array


@struct
class Neighbours:
    """A personal model: the global network, the client's datastore, and λ_k."""

    params: Params
    store: Datastore
    lam: Array


@struct
class KNNPer(Method[Params, Params, tuple[()], Params, Neighbours], SharedModel[Params, Neighbours]):
    """kNN-Per.

    Attributes:
        neighbours: k, examples that vote.
        lam: λ, share of the vote in predictions; None lets each client choose.
        grid: How many values of λ a client chooses from: 0, 1/grid, 2/grid and so on, below 1.
        kernel_scale: s, the squared distance per feature at which a neighbour's voice has fallen to 1/e.
        capacity: Examples that a datastore has room for.
        optimiser: Local solver.
        work: Local work of a round; its batch size is also that of the embedding.
    """

    neighbours: int = static(default=10)
    lam: float | None = None
    grid: int = static(default=10)
    kernel_scale: float = 1.0
    capacity: int = static(default=1024)
    optimiser: Optimiser = Optimiser()
    work: Work = Work()

    about: ClassVar[About] = About(
        paper=Paper(
            "Marfoq et al.",
            "Personalized Federated Learning through Local Memorization",
            2022,
            venue="ICML",
            arxiv="2111.09360",
        ),
        keeps="nothing; it embeds its examples when it predicts",
        sends="its weights",
    )
    linear: ClassVar[bool] = True

    def check(self) -> None:
        at_least("neighbours", self.neighbours, 1)
        if self.lam is not None and not 0 <= self.lam <= 1:
            raise UsageError(f"lam={self.lam} lies outside [0, 1]; choose a share such as 0.5, or leave it to clients.")
        at_least("grid", self.grid, 2)
        positive("kernel-scale", self.kernel_scale)
        if self.capacity < self.neighbours:
            raise UsageError(
                f"capacity={self.capacity} has no room for neighbours={self.neighbours}; choose a larger capacity or "
                "fewer neighbours."
            )
        check_fields(self)

    def init_server(self, task: Task, key: Key) -> Params:
        _split(task)  # said before anything is trained
        return task.init(key)

    def client_update(
        self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key
    ) -> tuple[tuple[()], Message[Params], Info]:
        params, loss = fit(task.nll, down, data, self.optimiser, self.work, key)
        return client, Message(params, weight=data.count.astype("float32")), {"loss": loss}

    def personalise(self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key) -> Neighbours:
        del client
        store = self._stored(task, down, data, key)  # Algorithm 1, the datastore
        lam = self._chosen(task, down, store) if self.lam is None else self.lam
        return Neighbours(down, store, jnp.where(store.count > 0, lam, 0.0))

    def population(self, task: Task, down: Params, data: Shard | None, key: Key) -> Neighbours:
        del data, key
        width = Embedding(task).width
        nobody = Datastore(
            jnp.zeros((self.capacity, width)), jnp.zeros(self.capacity, jnp.int32), jnp.zeros((), jnp.int32)
        )
        return Neighbours(down, nobody, jnp.zeros(()))

    def predict(self, task: Task, posterior: Neighbours, x: Array, key: Key) -> Predictive:
        del key
        split = _split(task)
        head, body = trees.partition(posterior.params.weights, task.is_head)
        seen, _ = split.features(Params(body, posterior.params.stats), head, x)
        nobody = jnp.full(x.shape[0], -1)
        vote = self._vote(posterior.store, seen, nobody, _num_classes(task))
        # Logarithms stay finite: a component of weight 0 still has a place in sums over the mixture.
        log_weights = jnp.log(jnp.maximum(jnp.stack([1 - posterior.lam, posterior.lam]), TINY))
        outputs = jnp.stack([split.outputs(head, seen), vote])  # Algorithm 1, p_w and p_kNN
        return Predictive(outputs, jnp.broadcast_to(log_weights[:, None], outputs.shape[:2]))

    def _stored(self, task: Task, params: Params, data: Shard, key: Key) -> Datastore:
        """Return the datastore, its examples in random order."""
        split, order = _split(task), data.order(key)
        head, body = trees.partition(params.weights, task.is_head)
        count = jnp.minimum(data.count, self.capacity)
        size = min(self.work.batch_size, self.capacity)
        room = -(-self.capacity // size) * size

        def fill(i: Array, rows: tuple[Array, Array]) -> tuple[Array, Array]:
            batch = data.take(order, i, size)
            assert batch.y is not None
            there = (i * size + jnp.arange(size)) < count
            found, _ = split.features(Params(body, params.stats), head, batch.x)
            features, labels = jnp.where(there[:, None], found, 0.0), jnp.where(there, batch.y, 0)
            put = jax.lax.dynamic_update_slice_in_dim
            return put(rows[0], features, i * size, axis=0), put(rows[1], labels, i * size, axis=0)

        empty = jnp.zeros((room, Embedding(task).width)), jnp.zeros(room, jnp.int32)
        features, labels = jax.lax.fori_loop(0, (count + size - 1) // size, fill, empty)
        return Datastore(features[: self.capacity], labels[: self.capacity], count)

    def _chosen(self, task: Task, params: Params, store: Datastore) -> Array:
        """Return the λ of the grid under which a client's examples, each by the vote of all others, are likeliest."""
        split, num_classes = _split(task), _num_classes(task)
        head, _ = trees.partition(params.weights, task.is_head)
        lams = jnp.arange(self.grid) / self.grid
        log_lam, log_rest = jnp.log(jnp.maximum(lams, TINY))[:, None], jnp.log(1 - lams)[:, None]
        size = min(BLOCK, self.capacity)

        def add(i: Array, total: Array) -> Array:
            place = i * size + jnp.arange(size)
            row = place % self.capacity
            seen, labels = store.features[row], store.labels[row]
            vote = jnp.take_along_axis(self._vote(store, seen, row, num_classes), labels[:, None], axis=1)[:, 0]
            model = task.likelihood.log_prob(split.outputs(head, seen), labels)
            log_prob = jnp.logaddexp(log_lam + vote[None], log_rest + model[None])
            return total + jnp.sum(jnp.where(place < store.count, log_prob, 0.0), axis=1)

        total = jax.lax.fori_loop(0, (store.count + size - 1) // size, add, jnp.zeros(self.grid))
        return lams[jnp.argmax(total)]  # the least of those that tie

    def _vote(self, store: Datastore, seen: Array, silent: Array, num_classes: int) -> Array:
        """Return log p_kNN for each class, (queries, classes); `silent` is the row that each query leaves out."""
        row = jnp.arange(self.capacity)
        length = jnp.sum(jnp.square(store.features), axis=1)

        def one(query: tuple[Array, Array]) -> Array:
            at, without = query
            # −‖a − b‖² plus ‖query‖², which all have in common and the normalisation takes out.
            near = jnp.where((row < store.count) & (row != without), 2 * store.features @ at - length, -jnp.inf)
            near, who = jax.lax.top_k(near, self.neighbours)
            voices = jax.nn.softmax(jnp.maximum(near / (at.shape[0] * self.kernel_scale), -1e30))
            # Fewer than k are fine, and so are none, who say nothing.
            return jnp.zeros(num_classes).at[store.labels[who]].add(jnp.where(jnp.isfinite(near), voices, 0.0))

        return jnp.log(jnp.maximum(jax.lax.map(one, (seen, silent), batch_size=BLOCK), TINY))


def _split(task: Task) -> Split:
    """Return the network in two parts, its last layer and the layers before."""
    _num_classes(task)
    return Embedding(task).split


def _num_classes(task: Task) -> int:
    if not isinstance(task.likelihood, Categorical):
        raise UsageError(
            "knn-per lets neighbours vote for classes, and the data are a regression; choose a method such as ditto."
        )
    return task.likelihood.num_classes
