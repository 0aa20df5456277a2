"""Schedules: what they parse from, what they are worth, and the one field that they touch."""

import jax
import jax.numpy as jnp
import pytest

import priory
from priory.core.errors import UsageError
from priory.fed.schedule import Schedule, find, parse, resolve


@pytest.mark.parametrize("text", ["step-size=step:0.1@0.5,0.75", "lam=cosine:0", "mu=linear:0.25", "a-b-c=step:2@0.1"])
def test_a_schedule_prints_as_it_is_parsed(text):
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


def test_the_end_of_a_smooth_schedule_is_zero_when_nothing_is_said():
    assert parse("lam=cosine") == Schedule("lam", "cosine", 0.0)


@pytest.mark.parametrize(
    "text",
    [
        *("", "lam", "lam=", "=cosine", "lam=cubic", "lam=cosine:-1", "lam=cosine:1e", "lam=linear:0.1.2"),
        *("lam=step:0.1", "lam=step:x@0.5", "lam=step:0.1@", "lam=step:0.1@0.5,"),
        *("lam=step:-1@0.5", "lam=step:0.1@1.5", "lam=step:0.1@0"),
    ],
)
def test_a_bad_schedule_ends_in_a_sentence(text):
    with pytest.raises(UsageError, match=r"schedule=.*; write FIELD=step:FACTOR@FRACTION"):
        parse(text)


def values(text, rounds):
    return [float(parse(text).at(t, rounds)) for t in range(rounds)]


def test_a_step_multiplies_at_each_milestone():
    assert values("lam=step:0.5@0.25,0.75", 8) == [1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("rounds", [50, 100, 300])
def test_a_step_happens_in_the_round_that_its_decimals_name(rounds):
    for percent in range(1, 100):
        factors = jax.vmap(lambda t, p=percent: Schedule("lam", "step", 0.5, (p / 100,)).at(t, rounds))(
            jnp.arange(rounds)
        )
        assert int(jnp.sum(factors == 1)) == percent * rounds // 100


def test_linear_and_cosine_go_from_one_to_the_end():
    """The end belongs to the round after the last one, as in Optax: no round is wasted on a rate of 0."""
    assert values("lam=linear:0.2", 4) == pytest.approx([1, 0.8, 0.6, 0.4])
    assert values("lam=cosine", 4) == pytest.approx([1, 0.8535534, 0.5, 0.1464466], abs=1e-6)
    assert values("lam=cosine:0.5", 2) == pytest.approx([1, 0.75])


def test_a_run_of_one_round_is_at_the_start_of_its_schedule():
    assert values("lam=linear", 1) == [1]


def test_resolving_changes_the_named_field_and_no_other():
    method = priory.FedAvg(optimiser=priory.Optimiser(step_size=0.4, weight_decay=0.3))
    changed = resolve(method, (parse("step-size=linear"),), 2, 4)
    assert float(changed.optimiser.step_size) == pytest.approx(0.2)
    restored = priory.core.struct.replace(
        changed, optimiser=priory.core.struct.replace(changed.optimiser, step_size=0.4)
    )
    assert restored == method


def test_several_schedules_act_together():
    changed = resolve(priory.Ditto(lam=2.0), (parse("lam=linear"), parse("step-size=step:0.5@0.1")), 3, 4)
    assert (float(changed.lam), float(changed.optimiser.step_size)) == pytest.approx((0.5, 0.05))


def test_a_round_number_may_be_traced():
    at = jax.jit(lambda t: resolve(priory.Ditto(), (parse("lam=step:0.1@0.5"),), t, 10).lam)
    assert [float(at(t)) for t in (4, 5)] == pytest.approx([1.0, 0.1])


@pytest.mark.parametrize("name", ["lam", "step_size", "optimiser.weight_decay"])
def test_a_number_is_found_by_its_name_or_its_path(name):
    assert ".".join(find(priory.Ditto(), name)).endswith(name)


@pytest.mark.parametrize("name", ["batch_size", "momentum", "rate"])
def test_what_is_static_or_unknown_cannot_be_scheduled(name):
    sentence = rf"{name.replace('_', '-')} is not a number that can change during a run; choose from lam, step-size"
    with pytest.raises(UsageError, match=sentence):
        find(priory.Ditto(), name)
