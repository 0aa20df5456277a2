import dataclasses

import jax
import jax.numpy as jnp
import pytest

from priory.core import memory, trees
from priory.core.errors import UsageError
from priory.engine import demand
from priory.engine.prepared import prepare
from priory.engine.settings import Settings
from priory.fed.local import Work
from priory.methods.fedavg import FedAvg
from priory.methods.local import Local

PLAIN = Settings(model="linear")


def limited(monkeypatch, num_bytes: int) -> None:
    monkeypatch.setattr(memory, "total", lambda: num_bytes)


def product(size: int):
    """The traced program that multiplies two matrices of that size in a loop."""

    def multiply(a):
        return jax.lax.fori_loop(0, 2, lambda _, b: (b @ b) * 0 + b, a).sum()

    return jax.jit(multiply).trace(jax.ShapeDtypeStruct((size, size), jnp.float32))


def test_a_matrix_inside_a_loop_counts(monkeypatch):
    limited(monkeypatch, 4 * 50**2)
    demand.check_program(product(50), FedAvg(), PLAIN)
    with pytest.raises(UsageError, match=r"An array of shape \(51, 51\) in a round needs at least"):
        demand.check_program(product(51), FedAvg(), PLAIN)


def test_a_fused_array_does_not_count(monkeypatch):
    limited(monkeypatch, 1)
    traced = jax.jit(lambda a: (a[:, None] * a[None, :]).sum()).trace(jax.ShapeDtypeStruct((9,), jnp.float32))
    demand.check_program(traced, FedAvg(), PLAIN)


def test_the_number_that_is_too_large_is_named(monkeypatch):
    limited(monkeypatch, 4 * 50**2)
    with pytest.raises(UsageError, match="batch-size=51 needs at least"):
        demand.check_program(product(51), FedAvg(work=Work(batch_size=51)), PLAIN)


@pytest.mark.parametrize("name", demand.SIZES)
def test_a_size_of_the_run_that_is_too_large_is_named(monkeypatch, name):
    limited(monkeypatch, 4 * 50**2)
    chosen = dataclasses.replace(PLAIN, **{name: 51})
    with pytest.raises(UsageError, match=f"{name.replace('_', '-')}=51 needs at least"):
        demand.check_program(product(51), FedAvg(), chosen)


@pytest.mark.parametrize("name", ["seed", "rounds", "onboard_visits", "eval_every", "resident_bytes"])
def test_a_setting_that_is_no_length_is_not_named(monkeypatch, name):
    limited(monkeypatch, 4 * 50**2)
    with pytest.raises(UsageError, match=r"An array of shape \(51, 51\) in a round needs at least"):
        demand.check_program(product(51), FedAvg(), dataclasses.replace(PLAIN, **{name: 51}))


def test_numbers_that_are_too_large_together_are_blamed_on_none_where_the_method_has_none():
    with pytest.raises(UsageError, match=r"^The numbers of this run exceed"), demand.counting(object()):
        raise OverflowError


@pytest.mark.parametrize("value", [2**31, -(2**31)])
def test_a_number_beyond_what_is_counted_is_refused(value):
    with pytest.raises(UsageError, match=rf"batch-size={value} exceeds the 32-bit limit"):
        demand.check_numbers(FedAvg(work=Work(batch_size=value)), PLAIN)


@pytest.mark.parametrize(
    ("work", "named"),
    [(Work(epochs=2**31 - 1), "epochs=2147483647"), (Work(steps=600_000_001), "steps=600000001")],
)
def test_local_work_that_takes_too_long_at_any_speed_is_refused(work, named):
    with pytest.raises(UsageError, match=rf"{named} keeps each client busy for more than \d+ minutes in every round"):
        demand.check_numbers(FedAvg(work=work), PLAIN)
    demand.check_numbers(FedAvg(work=Work(steps=600_000_000)), PLAIN)


def test_the_largest_number_that_is_counted_is_not_refused():
    demand.check_numbers(FedAvg(work=Work(batch_size=2**31 - 1)), dataclasses.replace(PLAIN, rounds=2**31 - 1))


def test_records_on_disk_count_only_for_the_clients_of_a_round(monkeypatch, federation):
    """So a million clients need no more memory than a cohort."""
    resident = dataclasses.replace(PLAIN, cohort=2)
    stored = dataclasses.replace(resident, resident_bytes=0)
    ready = prepare(Local(), federation, stored)
    server = ready.first_server()
    monkeypatch.setattr(demand, "check_program", lambda *_: None)
    limited(monkeypatch, trees.num_bytes(server) + 3 * trees.num_bytes(ready.record))
    prepare(Local(), federation, stored)
    with pytest.raises(UsageError, match=r"of 6 clients needs at least"):
        prepare(Local(), federation, resident)
