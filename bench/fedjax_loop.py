"""FedAvg in FedJAX: `fedjax.algorithms.fed_avg` on data in memory, as its EMNIST example is written.

    python bench/fedjax_loop.py emnist-cnn [--rounds 8]

Prints one JSON line. Clients run one after another, a jitted step for each batch: its backend on a CPU. Needs fedjax in
an environment of its own.
"""

import time

import fedjax
import fedjax.algorithms
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from works import Work, answer


def seconds_of_rounds(work: Work, rounds: int) -> list[float]:
    """Seconds of each round but the first, which compiles."""
    data = fedjax.InMemoryFederatedData(
        {b"%d" % client: dict(zip("xy", work.inputs(client), strict=True)) for client in range(work.clients)}
    )
    model = fedjax.create_model_from_haiku(
        transformed_forward_pass=hk.transform(lambda batch: forward(work, batch["x"])),
        sample_batch={"x": np.zeros((1, 28, 28, 1), np.float32), "y": np.zeros(1, np.int32)},
        train_loss=lambda batch, scores: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], scores),
        eval_metrics={},
    )
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        grad_fn=fedjax.model_grad(model),
        client_optimizer=fedjax.optimizers.sgd(work.step_size, momentum=work.momentum or None),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch, num_epochs=1),
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, num_clients=work.cohort, seed=0)
    state, seconds = algorithm.init(model.init(jax.random.PRNGKey(0))), []
    for t in range(rounds + 1):
        started = time.perf_counter()
        sampler.set_round_num(t)
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def forward(work: Work, x: jax.Array) -> jax.Array:
    """The network of a work."""
    if work.network == "cnn":
        for channels in (32, 64):
            x = jax.nn.relu(hk.Conv2D(channels, (5, 5))(x))
            x = hk.MaxPool((1, 2, 2, 1), (1, 2, 2, 1), "VALID")(x)
    x = jnp.reshape(x, (x.shape[0], -1))
    return hk.Linear(work.classes)(jax.nn.relu(hk.Linear(256 if work.network == "mlp" else 128)(x)))


if __name__ == "__main__":
    answer(__doc__, seconds_of_rounds)
