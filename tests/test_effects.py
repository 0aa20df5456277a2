"""The random effects of a run: right where they are known, the same however computed, readable by people and ArviZ."""

import dataclasses
import sys
from typing import Any, ClassVar

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

import priory
from priory import effects, methods
from priory.cli import effect_tables, main
from priory.core.struct import static, struct
from priory.fed.capabilities import AdviceWarning, MixedEffects
from priory.fed.method import Message, Method, point
from tests.states import prepared_as

MEAN, SD = 0.5, 2.0
SIZES = (4, 9, 1, 25, 16, 6)


@struct
class Exact(Method, MixedEffects):
    """y ~ N(z_k, 1) and z_k ~ N(MEAN, SD²), nothing to learn: the draws are exact, so each summary has a closed form.

    Attributes:
        width: Further coordinates, all with the posterior of the first.
        correlation: Of a draw with the next.
        apart: Distance between the means of the chains.
        known: Draws of the population, which shift and stretch it a little.
    """

    width: int = static(default=2)
    chains: int = static(default=4)
    draws: int = static(default=1000)
    known: int = static(default=1)
    correlation: float = 0.0
    apart: float = 0.0

    linear: ClassVar[bool] = True

    def client_update(self, task, down, client, data, key):
        return client, Message(jnp.float32(0), data.count.astype(jnp.float32)), {}

    def aggregate(self, task, server, messages, key):
        return server, {}

    def personalise(self, task, down, client, data, key):
        batch = data.padded()
        precision = data.count + 1 / SD**2
        mean = (jnp.sum(batch.mask * batch.y) + MEAN / SD**2) / precision
        noise = jax.random.normal(key, (self.draws, self.chains, 1 + self.width))
        mixed = jnp.sqrt(1 - self.correlation**2)
        _, rest = jax.lax.scan(lambda z, e: 2 * (self.correlation * z + mixed * e,), noise[0], noise[1:])
        z = jnp.concatenate([noise[:1], rest]).swapaxes(0, 1) / jnp.sqrt(precision) + mean
        z = z + self.apart * jnp.arange(self.chains)[:, None, None]
        return down, {"layer": {"bias": z[..., :1], "kernel": z[..., 1:, None]}}

    def predict(self, task, posterior, x, key):
        return point(task.model.apply(posterior[0], x)[0])

    def effects(self, task, posterior):
        return posterior[1]

    def population_effects(self, task, down):
        def like_a_draw(values):
            values = jnp.broadcast_to(values[:, None], (self.known, 1 + self.width))
            return {"layer": {"bias": values[:, :1], "kernel": values[:, 1:, None]}}

        wobble = jnp.linspace(0, 1, self.known)
        return like_a_draw(MEAN + wobble), like_a_draw(SD * (1 + wobble))

    def fixed_effects(self, task, down):
        return down.weights


@pytest.fixture(scope="module")
def arrays():
    draw = np.random.default_rng(0)
    client = np.repeat([f"school {k}" for k in range(len(SIZES))], SIZES)
    y = draw.normal(size=len(client)) + np.repeat(draw.normal(MEAN, SD, len(SIZES)), SIZES)
    return {"x": np.zeros((len(y), 2)), "y": y, "client": client}


@pytest.fixture(scope="module")
def federation(arrays):
    return priory.data.from_arrays(**arrays, task="regression", test=0.0)


@pytest.fixture(scope="module")
def simulate(federation):
    """A run that is stopped before its first round, since no round changes the effects of `Exact`."""

    def run(method=None, data=federation, **options):
        chosen = {"model": "linear", "scale": 1.0, "rounds": 1, "eval_every": 0, "stop": lambda: True} | options
        return priory.simulate(method or Exact(), data, **chosen)

    return run


def closed_form(federation):
    """Posterior mean and standard deviation of each client."""
    num = federation.num_clients
    totals = np.array([federation.y[federation.rows(k)].sum() for k in range(num)])
    precision = federation.train.count[:num] + 1 / SD**2
    return (totals + MEAN / SD**2) / precision, precision**-0.5


def test_estimates_and_intervals_are_those_of_the_normal_posterior(simulate, federation):
    method = Exact()
    found, size = simulate(method).effects(level=0.8), method.chains * method.draws
    mean, sd = closed_form(federation)
    assert_within_errors(found.mean[:, 0], mean, sd / np.sqrt(size))
    assert_within_errors(found.sd[:, 0], sd, sd / np.sqrt(2 * size))
    for end, share in ((found.low, 0.1), (found.high, 0.9)):
        error = np.sqrt(share * (1 - share) / size) / norm.pdf(norm.ppf(share)) * sd  # of a quantile
        assert_within_errors(end[:, 0], mean + norm.ppf(share) * sd, error)


def assert_within_errors(found, truth, error):
    assert np.max(np.abs(found - truth) / error) < 4.5


def test_the_draws_are_those_that_an_evaluation_predicts_with(simulate, federation):
    run = simulate()
    draws = run.effects(draws=True).draws["layer"]["bias"]
    for place, name in enumerate(federation.clients):
        np.testing.assert_array_equal(draws[place], run.client(name).posterior[1]["layer"]["bias"])


@pytest.mark.parametrize(("correlation", "apart"), [(0.0, 0.0), (0.9, 0.0), (0.5, 0.3)])
def test_diagnostics_are_those_of_arviz(simulate, correlation, apart):
    """The same definition, rank-normalised and split; the two end Geyer's sum of autocorrelations a term apart."""
    run = simulate(Exact(correlation=correlation, apart=apart))
    found = loud_effects(run, draws=True)
    told = arviz.summary(run.inference_data(found), kind="diagnostics", round_to="none")
    order = [f"layer.{name}[{client}" for client in found.clients for name in ("bias", "kernel")]
    told = told.loc[[row for start in order for row in told.index if row.startswith(start)]]
    np.testing.assert_allclose(found.rhat.ravel(), told["r_hat"], rtol=1e-5)
    np.testing.assert_allclose(found.ess.ravel(), told["ess_bulk"], rtol=0.02)


def loud_effects(run, **options):
    """The effects; whether they came with a warning is another test's business."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(effects.Effects, "warning", None)
        return run.effects(**options)


def test_a_coordinate_is_named_by_its_path_and_its_place_in_it(simulate):
    names = simulate().effects().names
    assert names == ("layer/bias", "layer/kernel[0]", "layer/kernel[1]")
    assert effects.names_of({"a": {"b": np.zeros((2, 1, 2))}}, num_axes=0) == tuple(
        f"a/b[{i},0,{j}]" for i in range(2) for j in range(2)
    )
    assert effects.names_of(np.zeros(3)) == ("effect",)


def test_a_client_is_told_with_the_number_of_its_training_examples(simulate, federation):
    found = simulate().effects()
    assert found.clients == tuple(f"school {k}" for k in range(6))
    np.testing.assert_array_equal(found.examples, SIZES)


def test_draws_are_kept_on_request_only(simulate):
    run = simulate()
    assert run.effects().draws is None
    draws = run.effects(draws=True).draws["layer"]
    assert (draws["bias"].shape, draws["kernel"].shape) == ((6, 4, 1000, 1), (6, 4, 1000, 2, 1))


def test_chains_that_disagree_are_counted_with_the_worst_and_the_remedy(simulate):
    run = simulate(Exact(apart=0.05))
    with pytest.warns(AdviceWarning, match=r"^R-hat is above 1.01 for \d of 6 clients \(worst .*; take more draws"):
        found = run.effects()
    num = np.sum((found.rhat > 1.01).any(axis=1))
    assert 0 < num < 6  # a wide posterior hides what is apart
    assert f"R-hat is above 1.01 for {num} of 6 clients (worst {found.rhat.max():.3g})" in found.warning


def test_few_draws_are_counted_with_the_least_and_the_remedy(simulate):
    run = simulate(Exact(chains=2, draws=100))
    with pytest.warns(AdviceWarning, match=r"size is below 400 for 6 of 6 clients \(worst \d+\), .*; take more draws"):
        found = run.effects()
    assert f"(worst {found.ess.min():.0f})" in found.warning


@pytest.mark.parametrize("draws", [1, 3])
def test_chains_too_short_to_split_have_no_diagnostics(simulate, draws):
    run = simulate(Exact(draws=draws))
    with pytest.warns(AdviceWarning, match=r"for 6 of 6 clients \(worst undefined\) and .* \(worst undefined\)"):
        found = run.effects()
    assert np.isnan(found.rhat).all()
    assert np.isnan(found.ess).all()


def test_chains_that_mixed_give_no_warning(simulate):
    assert simulate().effects().warning is None


def test_a_point_estimate_of_the_population_is_one_draw(simulate):
    population = simulate().effects().population
    assert population.is_point
    np.testing.assert_allclose((population.mean, population.sd), ([[MEAN] * 3], [[SD] * 3]), rtol=1e-6)


def test_draws_of_the_population_have_central_intervals(simulate):
    population = simulate(Exact(known=101)).effects().population
    assert not population.is_point
    mean, sd = population.intervals(0.9)
    np.testing.assert_allclose(mean[:, 0], [MEAN + 0.05, MEAN + 0.95], rtol=1e-5)
    np.testing.assert_allclose(sd[:, 0], [SD * 1.05, SD * 1.95], rtol=1e-5)


def test_effects_do_not_depend_on_the_number_of_pieces(simulate, monkeypatch):
    run = simulate(stop=lambda: False)
    whole = run.effects()
    monkeypatch.setattr("priory.engine.prepared.EVALUATION_BYTES", 1)
    assert len(run.evaluator.pieces(np.arange(6))) == 3
    assert_same(run.effects(), whole)


@pytest.mark.slow  # programs for another number of clients
def test_effects_do_not_depend_on_how_many_clients_run_at_once(simulate):
    run = simulate()
    plan = dataclasses.replace(run.evaluator.ready.plan, client_batch=2)
    together = prepared_as(run, plan=plan)
    assert (run.evaluator.ready.plan.chunk, plan.chunk) == (1, 2)
    np.testing.assert_allclose(together.effects().mean, run.effects().mean, rtol=1e-5)


def test_a_loaded_run_has_the_effects_of_the_run_in_memory(simulate, federation, tmp_path):
    run = simulate(out=tmp_path / "run")
    assert_same(priory.load(tmp_path / "run", federation=federation, method=Exact()).effects(), run.effects())


def assert_same(one, other):
    for name in ("mean", "sd", "low", "high", "rhat", "ess"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_newcomers_have_no_effects(simulate):
    y, client = np.arange(12.0), np.repeat(np.arange(6), 2)
    held_out = priory.data.from_arrays(np.zeros((12, 1)), y, client, task="regression", test=0.0, newcomers=0.3, seed=0)
    found = simulate(data=held_out).effects()
    assert held_out.num_newcomers == 2
    assert (found.clients, found.mean.shape) == (held_out.clients[:4], (4, 3))


def test_a_level_that_is_no_probability_is_refused(simulate):
    with pytest.raises(priory.UsageError, match=r"level=90 is no probability of an interval; choose a number between"):
        simulate().effects(level=90)


def test_a_method_without_effects_is_refused(simulate):
    run = simulate(priory.FedAvg())
    with pytest.raises(priory.UsageError, match=r"fedavg has no random effects, since .*; choose a method for mixed"):
        run.effects()


def test_inference_data_survive_netcdf(simulate, federation, tmp_path):
    run = simulate()
    found = run.effects(draws=True)
    run.inference_data().to_netcdf(tmp_path / "draws.nc")
    posterior = arviz.from_netcdf(tmp_path / "draws.nc").posterior
    assert posterior["layer.bias"].dims == ("chain", "draw", "client")
    assert posterior["layer.kernel"].shape == (4, 1000, 6, 2)
    assert tuple(posterior["client"].values) == federation.clients
    assert posterior.attrs["method"] == "exact"
    second = posterior["layer.kernel"].sel(client="school 1")
    np.testing.assert_array_equal(second, found.draws["layer"]["kernel"][1, ..., 0])


def test_effects_without_draws_have_no_inference_data(simulate):
    run = simulate()
    with pytest.raises(priory.UsageError, match=r"without their draws; ask for `effects\(draws=True\)`"):
        run.inference_data(run.effects())


def test_a_missing_arviz_is_named_with_its_extra(simulate, monkeypatch):
    run = simulate()
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(priory.UsageError, match=r"ArviZ is not installed; install `priory\[arviz\]`"):
        run.inference_data()


# The federation above: its programs serve here too.
TINY = ["--data", "schools.npz", "--task", "regression", "--test", "0", "--scale", "1", "--model", "linear"]
TINY += ["--rounds", "0", "--out", "a"]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys, arrays):
    """What a command prints; `exact` is a method meanwhile."""
    monkeypatch.setitem(methods.REGISTRY, "exact", Exact)
    monkeypatch.chdir(tmp_path)
    np.savez("schools.npz", **arrays)
    jax.devices()  # settles their number for the whole process

    def run(*argv: Any, code: int = 0) -> str:
        assert main(list(argv)) == code, capsys.readouterr().err
        shown = capsys.readouterr()
        return shown.out if code == 0 else shown.err

    return run


def test_a_run_with_few_random_effects_ends_with_their_table(command):
    shown = command("run", "exact", *TINY)
    assert "layer/kernel[1]" in shown
    assert effect_tables.POINT in " ".join(shown.split())


def test_a_run_with_several_random_effects_ends_without_their_table(command):
    assert "layer/" not in command("run", "exact", *TINY, "--width", "4")


def test_a_run_of_many_clients_names_the_command_instead_of_a_table(command, monkeypatch):
    monkeypatch.setattr(effect_tables, "MOST_CLIENTS", 5)
    shown = command("run", "exact", *TINY)
    assert "for the random effects of 6 clients: priory effects a" in shown
    assert "R-hat" not in shown


def test_the_table_shows_population_and_clients(command):
    command("run", "exact", *TINY, "--known", "101")
    found, shown = priory.load("a").effects(level=0.5), command("effects", "a", "--level", "0.5")
    rows = [line.split() for line in shown.splitlines()]
    assert "50 % interval" in shown
    for i, name in enumerate(found.names):
        assert [name, "1.000", "(0.750,", "1.250)", "3.000", "(2.500,", "3.500)"] in rows
        for k, client in enumerate(found.clients):
            who = [*client.split(), str(found.examples[k])] if i == 0 else []
            numbers = [f"{found.mean[k, i]:.3f}", f"({found.low[k, i]:.3f},", f"{found.high[k, i]:.3f})"]
            mixed = [f"{found.rhat[k, i]:.3f}", f"{found.ess[k, i]:.0f}"]
            assert [*who, name, *numbers, *mixed] in rows
    assert effect_tables.FULL in " ".join(shown.split())


def test_a_single_random_effect_has_no_column_for_its_name(simulate):
    found = simulate().effects()
    headers = [column.header for column in effect_tables.clients_table(found).columns]
    alone = effect_tables.clients_table(dataclasses.replace(found, names=found.names[:1]))
    assert [column.header for column in alone.columns] == [name for name in headers if name != "random effect"]
    assert alone.row_count == 6


def test_few_fixed_effects_are_shown_and_many_are_not(simulate):
    found = simulate().effects()
    [table] = effect_tables.fixed_tables(found)
    assert next(iter(table.columns[0].cells)) == "Dense_0/bias"
    assert table.row_count == 3
    many = dataclasses.replace(found, fixed={"kernel": np.zeros((3, 7))})
    assert effect_tables.fixed_tables(many) == []
    assert effect_tables.fixed_tables(dataclasses.replace(found, fixed=None)) == []


@pytest.mark.slow  # a network of its own
def test_more_than_eight_random_effects_are_exported_but_not_shown(command):
    command("run", "exact", *TINY, "--width", "8")
    assert "9 random effects a client are too many for a table, which holds 8; write" in command("effects", "a", code=2)
    shown = command("effects", "a", "--arviz", "draws.nc")
    assert "9 random effects a client are too many for a table, which holds 8." in shown
    assert arviz.from_netcdf("draws.nc").posterior["layer.kernel"].shape == (4, 1000, 6, 8)


def test_a_file_for_draws_in_no_directory_is_refused(command):
    command("run", "exact", *TINY)
    told = command("effects", "a", "--arviz", "nowhere/draws.nc", code=2)
    assert "arviz=nowhere/draws.nc lies in no directory that exists; make it" in told


def test_the_effects_of_a_method_that_has_none_end_in_a_sentence(command):
    command("run", "fedavg", *TINY)
    assert command("effects", "a", code=2).startswith("priory: fedavg has no random effects")
