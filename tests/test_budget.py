"""The limits of the suite's cost: what exceeds one is named, and a slower machine may use more CPU seconds."""

import pytest

from tests import budget


@pytest.fixture
def spent(monkeypatch):
    """A budget of which a worker has used some."""
    monkeypatch.setattr("jax.monitoring.register_event_duration_secs_listener", lambda listener: None)

    def make(compilations: int, cpu: float) -> budget.Budget:
        made = budget.Budget()
        made.own = lambda: {"compilations": 0, "cpu": 0.0}
        made.of_workers = [{"compilations": compilations, "cpu": cpu}]
        return made

    return make


def test_a_suite_within_its_limits_has_nothing_to_say(spent):
    assert spent(budget.MOST_COMPILATIONS, budget.MOST_CPU_SECONDS).exceeded() == []


def test_too_many_compilations_are_named(spent):
    (sentence,) = spent(budget.MOST_COMPILATIONS + 1, 1.0).exceeded()
    assert sentence.startswith(f"{budget.MOST_COMPILATIONS + 1:,} compilations exceed the limit")


@pytest.mark.parametrize(("slowness", "exceeds"), [(0.5, True), (1.0, True), (1.9, True), (2.1, False)])
def test_twice_the_cpu_seconds_are_allowed_on_a_machine_of_half_the_speed(spent, monkeypatch, slowness, exceeds):
    monkeypatch.setattr(budget, "yardstick", lambda: slowness * budget.YARDSTICK_SECONDS)
    assert bool(spent(0, 2 * budget.MOST_CPU_SECONDS).exceeded()) == exceeds
