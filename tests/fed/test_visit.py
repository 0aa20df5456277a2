"""One client's part of a round, apart from what the simulator makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.core import rng
from priory.fed import screen, visit
from priory.fed.privacy import Noised
from priory.methods.fedavg import FedAvg
from priory.models.model import Params
from tests.methods.problems import aligned_task, tiny_shards

TASK, SHARDS, ROOT = aligned_task(), tiny_shards(), rng.root(3)
METHOD = FedAvg()
DOWN = jax.jit(TASK.init)(rng.root(4))


@jax.jit
def _visited(channel, down, uploads, options):
    record = visit.Record(jnp.bool_(False), (), ())
    context = visit.RoundContext(METHOD, TASK, channel, down, ROOT, jnp.int32(0), **options)
    return visit.visit(context, SHARDS.of(jnp.int32(1)), record, jnp.int32(1), uploads)


def visited(channel=None, down: Params = DOWN, uploads=True, **options):
    return _visited(channel, down, uploads, options)


def same(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [(screen.LIMITS, ""), (screen.Limits(norm=1e-6), "norm"), (screen.Limits(1e-6, weight=1.0), "weight")],
)
def test_a_status_tells_the_reason(limits, reason):
    record, message, _, status, _ = visited(limits=limits)
    assert visit.reason_of(int(status)) == reason
    assert bool(visit.is_rejected(status)) == (not bool(record.joined)) == (float(message.weight) == 0) == bool(reason)


def test_an_update_that_is_not_finite_is_called_so():
    spoilt = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), DOWN)
    assert visit.reason_of(int(visited(down=spoilt)[3])) == "not finite"


def test_a_private_channel_hears_everybody_and_has_limits_of_its_own():
    _, message, _, status, _ = visited(Noised(1.0, 0.1), limits=screen.Limits(norm=1e-6, weight=0.5))
    assert int(status) == visit.COUNTED
    assert float(message.weight) == 1


@pytest.mark.parametrize(("uploads", "status"), [(True, visit.COUNTED), (False, visit.KEPT)])
def test_whoever_ran_without_being_rejected_has_no_reason(uploads, status):
    found = int(visited(uploads=uploads)[3])
    assert found == status
    assert visit.reason_of(found) == ""
