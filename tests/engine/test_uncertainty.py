"""What a run says of its uncertainty: the same scores as its summary, kept in its directory, for every kind of run."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import priory
from priory.core.errors import UsageError
from priory.core.sealed import unsealed
from priory.core.struct import struct
from priory.evaluate import LEVELS
from priory.fed.method import Predictive
from priory.uncertainty import Uncertainty, foreign_inputs

PARTS = {
    "personal": "personal",
    "global": "population",
    "newcomers": "newcomers",
    "newcomers_global": "newcomers_global",
}


@struct
class TwoParts(priory.FedAvg):
    """FedAvg whose predictive has two components that disagree: the network, and one that is half as sure."""

    def predict(self, task: Any, posterior: Any, x: Any, key: Any) -> Predictive:
        del key
        outputs = task.model.apply(posterior, x)[0]
        return Predictive(jnp.stack([outputs, outputs / 2]), jnp.full((2, x.shape[0]), np.log(0.5)))


@pytest.fixture(scope="module")
def held_out(arrays: dict[str, np.ndarray]) -> priory.data.Federation:
    """Four clients that take part and two that come later, all with validation rows."""
    return priory.data.from_arrays(**arrays, test=0.2, validation=0.3, newcomers=0.3, seed=0)


@pytest.fixture(scope="module")
def bayesian(simulate: Any, held_out: priory.data.Federation) -> Any:
    """A run whose predictive has several components; scores and tables agree from the start, so no round is run."""
    return simulate(TwoParts(), held_out, rounds=0)


@pytest.fixture
def written(begin: Any, held_out: priory.data.Federation, tmp_path: Any) -> Any:
    """A run with a directory; nothing but its models is asked for, so it is not evaluated."""
    return begin(TwoParts(), held_out, out=tmp_path / "run")


@pytest.fixture(scope="module")
def regression(simulate: Any, arrays: dict[str, np.ndarray]) -> Any:
    """A run on real targets."""
    y = arrays["x"].sum(axis=1)
    data = priory.data.from_arrays(
        arrays["x"], y, arrays["client"], task="regression", test=0.2, validation=0.3, seed=0
    )
    return simulate(TwoParts(), data, rounds=0)


def summary_of(run: Any) -> dict[str, Any]:
    return {part: getattr(run, name) for part, name in PARTS.items() if getattr(run, name) is not None}


def test_scores_are_those_of_the_summary(bayesian):
    found, expected = bayesian.uncertainty(bootstrap=0), summary_of(bayesian)
    assert set(found.parts) == set(expected)
    assert {"personal", "newcomers"} <= set(expected)
    for part, scores in expected.items():
        pooled = found.parts[part].pooled
        for name in ("accuracy", "nll", "brier", "ece", "mce"):
            np.testing.assert_allclose(pooled[name].value, getattr(scores, name), rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(pooled["entropy"].value, scores.uncertainty, rtol=1e-5)
        np.testing.assert_allclose(found.parts[part].clients["nll"], scores.per_client["nll"], rtol=1e-5)


@pytest.mark.slow  # classification is tested above
def test_scores_of_a_regression_are_those_of_the_summary(regression):
    pooled = regression.uncertainty(bootstrap=0).parts["personal"].pooled
    for name in ("rmse", "nll", "coverage_90"):
        np.testing.assert_allclose(pooled[name].value, getattr(regression.personal, name), rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(pooled["sharpness"].value, regression.personal.uncertainty, rtol=1e-5)
    assert pooled["epistemic"].value > 0


def test_y_is_covered_exactly_when_it_is_between_the_ends(regression):
    test = regression.evaluator.answers(None)["personal"].test
    rows = test.rows
    for place, level in enumerate(LEVELS):
        inside = (rows.low[:, place] <= test.y) & (test.y <= rows.high[:, place])
        np.testing.assert_array_equal(inside, np.abs(rows.cdf - 0.5) <= level / 2)


def test_a_point_method_has_no_epistemic_uncertainty_and_a_bayesian_one_has(begin, bayesian, held_out):
    point = begin(priory.FedAvg(), held_out).uncertainty(bootstrap=0).parts["personal"]
    assert point.pooled["epistemic"].value == 0.0
    assert point.epistemic.count[0] == point.clients["test"].sum()
    assert bayesian.uncertainty(bootstrap=0).parts["personal"].pooled["epistemic"].value > 1e-6


def test_inputs_of_the_same_kind_are_not_foreign(bayesian):
    found = bayesian.uncertainty(ood=bayesian.federation.x, bootstrap=0)
    own, foreign = found.parts["personal"].clients["test"].sum(), found.ood.examples
    assert foreign == len(bayesian.federation.x)
    error = np.sqrt((1 / own + 1 / foreign) / 12)  # of the AUROC of two samples of one kind
    assert abs(found.ood.auroc.value - 0.5) < 4 * error


def test_at_most_a_thousand_foreign_inputs_are_asked_about(bayesian):
    assert len(foreign_inputs(bayesian.federation, np.zeros((1500, 3), np.float32)).x) == 1000


def test_a_second_data_set_gives_its_name(bayesian, arrays):
    other = priory.data.arrays.dataset(arrays["x"] - 3, arrays["y"], name="elsewhere")
    assert bayesian.uncertainty(ood=other, bootstrap=0).ood.data == "elsewhere"


@pytest.mark.parametrize(
    ("ood", "word"),
    [
        (np.zeros((4, 7), np.float32), "shape"),
        (np.zeros((0, 3), np.float32), "at least one"),
        (np.zeros((4, 3), np.uint8), "uint8"),
    ],
    ids=["shape", "empty", "type"],
)
def test_inputs_that_do_not_fit_are_refused(bayesian, ood, word):
    with pytest.raises(UsageError, match=word):
        bayesian.uncertainty(ood=ood)


def test_a_directory_keeps_the_tables_and_a_later_call_reads_them(written, held_out, tmp_path, monkeypatch):
    run, first = written, written.uncertainty(bootstrap=5)
    kept = unsealed((tmp_path / "run" / "uncertainty.json").read_text())
    assert kept == first.to_json()
    monkeypatch.setattr(type(run.evaluator), "answers", lambda *_: pytest.fail("it is computed again"))
    again = priory.load(tmp_path / "run", federation=held_out, method=TwoParts()).uncertainty(bootstrap=5)
    assert again.to_json() == first.to_json()


def test_other_arguments_are_computed_anew(written):
    written.uncertainty(bootstrap=5)
    assert written.uncertainty(bootstrap=5, level=0.5).parts["personal"].sets.level == 0.5
    assert written.uncertainty(bootstrap=6).bootstrap == 6


def test_tables_with_foreign_inputs_serve_a_call_without_and_stay(written, held_out, tmp_path, monkeypatch):
    run, far = written, held_out.x + 5
    run.uncertainty(ood=far, bootstrap=5)
    before = (tmp_path / "run" / "uncertainty.json").read_bytes()
    monkeypatch.setattr(type(run.evaluator), "answers", lambda *_: pytest.fail("it is computed again"))
    assert run.uncertainty(bootstrap=5).ood is None
    assert run.uncertainty(ood=far, bootstrap=5).ood.examples == len(far)
    assert (tmp_path / "run" / "uncertainty.json").read_bytes() == before


def test_a_damaged_file_is_named_and_left_alone(written):
    path = written.path / "uncertainty.json"
    path.write_text("{")
    with pytest.raises(UsageError, match=r"uncertainty\.json is damaged"):
        written.uncertainty(bootstrap=0)
    assert path.read_text() == "{"


def test_a_file_of_another_version_is_computed_anew(written):
    (written.path / "uncertainty.json").write_text('{"kind": "classification", "parts": {}}')
    assert isinstance(written.uncertainty(bootstrap=0), Uncertainty)


def test_keys_of_other_rows_are_not_those_of_the_evaluation():
    import jax

    from priory.core import rng
    from priory.core.rng import Stream
    from priory.evaluate import BESIDE

    own = jax.random.key_data(jax.random.split(rng.key(rng.root(0), Stream.EVALUATION, 4, 2), 3))
    beside = jax.random.key_data(jax.random.split(rng.key(rng.root(0), Stream.EVALUATION, 4, 2, BESIDE), 4))
    assert len({tuple(key.tolist()) for key in np.concatenate([own, beside])}) == 7
