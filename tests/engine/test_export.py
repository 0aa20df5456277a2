"""A personal model on disk: it comes back with the same bits, whatever the method, and damage is named."""

import dataclasses
import errno
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import priory
from priory.bayes import gaussian
from priory.core import rng
from priory.core.struct import struct
from priory.core.trees import path_of
from priory.data.form import Form
from priory.engine.personal import PersonalModel, Source
from priory.fed.capabilities import SharedModel, Unlabelled
from priory.fed.method import Task
from priory.methods import REGISTRY
from priory.models.likelihood import Categorical
from priory.models.model import Head, parse
from tests.methods.problems import COUNTS, aligned_task, tiny_shards
from tests.older import edit_json

TEXT = "mlp:4"
MODEL = parse(TEXT, input_shape=(5,), num_outputs=3)
TASK = Task(MODEL, Categorical(3), (5,), len(COUNTS), sum(COUNTS), Head(MODEL.last_layer((5,))), aligned_task().public)
FORM = Form("tiny", (5,), np.float32(0.25), np.float32(2), 3, ("a", "b", "c"), None, {})
SHARDS = tiny_shards()
X = np.random.default_rng(1).normal(size=(6, 5)).astype(np.float32)


def a_model(method, verb: str = "personalise", name: str | None = None) -> PersonalModel:
    """A posterior of the structure that a verb gives the first of three clients; its numbers are drawn, not learned."""

    def made(key):
        key_init, key_client, key_post = jax.random.split(key, 3)
        down, data = method.broadcast(method.init_server(TASK, key_init)), SHARDS.of(jnp.int32(0))
        if verb == "population":
            return method.population(TASK, down, None, key_post)
        if verb == "infer":
            return method.infer(TASK, down, data, key_post)
        return method.personalise(TASK, down, method.init_client(TASK, down, key_client), data, key_post)

    draw = np.random.default_rng(0)

    def drawn(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(draw.integers(0, 2, leaf.shape).astype(leaf.dtype))
        return jnp.asarray(draw.uniform(0.1, 0.9, leaf.shape).astype(leaf.dtype))  # all parameters have a value there

    posterior = jax.tree.map(drawn, jax.eval_shape(made, rng.root(0)))
    source = Source(name or priory.methods.name_of(method), verb, TEXT, "a", 3)
    return PersonalModel(method, TASK, posterior, FORM, rng.root(1), source, np.array([0.1, 0.7, 0.2]))


def same(one: PersonalModel, other: PersonalModel, x) -> None:
    """Raises unless two models say the same, to the bit."""
    first, second = one.predict(x), other.predict(x)
    assert np.isfinite(first.probabilities).all()
    for name in ("probabilities", "label", "mean", "sd", "entropy", "epistemic", "calibration"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)


WAYS = [
    (name, verb)
    for name, cls in REGISTRY.items()
    for verb, has in (
        ("personalise", True),
        ("infer", issubclass(cls, Unlabelled)),
        ("population", issubclass(cls, SharedModel)),
    )
    if has
]


@pytest.mark.parametrize(("name", "verb"), WAYS)
def test_a_model_comes_back_with_the_same_bits(name, verb, tmp_path):
    model = a_model(REGISTRY[name](), verb)
    back = priory.load_model(priory.save_model(model, tmp_path / "model"))
    same(model, back, X)
    assert (back.source, back.task.is_head, back.form.classes) == (model.source, TASK.is_head, FORM.classes)
    assert jax.tree.structure(back.posterior) == jax.tree.structure(model.posterior)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["model.json", "weights.safetensors"]


def test_hyper_parameters_come_back(tmp_path):
    method = priory.PFedBayes(zeta=0.3, samples=7)
    assert priory.load_model(priory.save_model(a_model(method), tmp_path / "m")).method == method


def test_a_network_and_a_method_that_only_python_knows_are_given_again(tmp_path):
    @struct
    class Own(priory.FedAvg):
        pass

    model = a_model(Own(), name="own")
    model = dataclasses.replace(model, source=dataclasses.replace(model.source, model=None))
    path = priory.save_model(model, tmp_path / "m")
    with pytest.raises(priory.UsageError, match="was made with a method that a file cannot hold; pass method= again"):
        priory.load_model(path)
    with pytest.raises(priory.UsageError, match="was made with a model that a file cannot hold; pass model= again"):
        priory.load_model(path, method=Own())
    same(model, priory.load_model(path, method=Own(), model=MODEL), X)


def test_a_description_of_another_posterior_is_refused(tmp_path):
    path = priory.save_model(a_model(priory.FedAvg()), tmp_path / "m")
    table = json.loads((path / "model.json").read_text())
    edit_json(path / "model.json", task=table["task"] | {"model": "mlp:5"})
    with pytest.raises(priory.UsageError, match=r"do not fit the posterior that .* describes"):
        priory.load_model(path)


def test_a_model_is_never_overwritten_and_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    model = a_model(priory.PFedBayes())
    priory.save_model(model, tmp_path / "m")
    before = (tmp_path / "m" / "model.json").read_text()
    with pytest.raises(priory.UsageError, match="exists already and is never overwritten"):
        priory.save_model(a_model(priory.FedAvg()), tmp_path / "m")
    assert (tmp_path / "m" / "model.json").read_text() == before

    def full(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(priory.UsageError, match=r"other cannot be written \(No space left on device\)"):
        priory.save_model(model, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_draws_have_the_moments_of_the_posterior():
    model, num = a_model(priory.PFedBayes()), 400
    found = model.inference_data(draws=num).posterior["Dense_0.kernel"]
    assert found.sizes == {"chain": 1, "draw": num, "client": 1, "Dense_0.kernel_dim_0": 5, "Dense_0.kernel_dim_1": 4}
    belief = jax.jit(gaussian.of)(model.posterior.weights)
    mean, sd = (np.asarray(tree["Dense_0"]["kernel"]) for tree in (belief.mean, belief.sd))
    assert np.abs(found.mean(["chain", "draw", "client"]).values - mean).max() < 5 * sd.max() / num**0.5


def test_random_effects_come_with_their_chains():
    model = a_model(priory.FedPop())
    found = model.inference_data(draws=3).posterior
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.method.effects(TASK, model.posterior)):
        values = found[path_of(path).replace("/", ".")].values
        assert values.shape[:3] == (*leaf.shape[:2], 1)
        np.testing.assert_array_equal(values[:, :, 0].reshape(leaf.shape), leaf)


def test_a_point_estimate_has_no_draws(tmp_path):
    with pytest.raises(priory.UsageError, match="fedavg has no posterior to draw from"):
        priory.save_model(a_model(priory.FedAvg()), tmp_path / "m", draws=10)
    with pytest.raises(priory.UsageError, match="draws=-1 is below 1"):
        a_model(priory.PFedBayes()).inference_data(draws=-1)
    assert not (tmp_path / "m").exists()


@pytest.mark.slow  # a run of two architectures
def test_each_client_takes_its_own_network_along(begin, federation, tmp_path):
    run = begin(priory.Local(), model=None, models="linear,mlp:4")
    for client, text in ((0, "linear"), (3, "mlp:4")):
        model = run.client(client)
        assert model.source.model == text
        same(model, priory.load_model(priory.save_model(model, tmp_path / text)), federation.x[:5])
