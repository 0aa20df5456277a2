"""A personal model on disk: it comes back with the same bits, whatever the method, and damage is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import priory
from priory.core import rng
from priory.data.form import Form
from priory.engine.personal import PersonalModel, Source
from priory.fed.method import Population, Task, Unlabelled
from priory.methods import REGISTRY
from priory.models.likelihood import Categorical
from priory.models.model import Head, parse
from tests.methods.problems import COUNTS, aligned_task, tiny_shards

TEXT = "mlp:4"
MODEL = parse(TEXT, input_shape=(5,), num_outputs=3)
TASK = Task(MODEL, Categorical(3), (5,), len(COUNTS), sum(COUNTS), Head(MODEL.last_layer((5,))), aligned_task().public)
FORM = Form("tiny", (5,), np.float32(0.25), np.float32(2), 3, ("a", "b", "c"), None, {})
X = np.random.default_rng(1).normal(size=(6, 5)).astype(np.float32)


def a_model(method, verb: str = "personalise", name: str | None = None) -> PersonalModel:
    """What a verb makes of the first of three clients, before any round."""

    @jax.jit
    def made(key):
        key_init, key_client, key_post = jax.random.split(key, 3)
        down, data = method.broadcast(method.init(TASK, key_init)), tiny_shards().of(jnp.int32(0))
        if verb == "population":
            return method.population(TASK, down, None, key_post)
        if verb == "infer":
            return method.infer(TASK, down, data, key_post)
        return method.personalise(TASK, down, method.enrol(TASK, down, key_client), data, key_post)

    source = Source(name or priory.methods.name_of(method), verb, TEXT, "a", 3)
    return PersonalModel(method, TASK, made(rng.root(0)), FORM, rng.root(1), source, np.array([0.1, 0.7, 0.2]))


def same(one: PersonalModel, other: PersonalModel, x) -> None:
    """Raises unless two models say the same, to the bit."""
    first, second = one.predict(x), other.predict(x)
    for name in ("probabilities", "label", "mean", "sd", "entropy", "epistemic", "calibration"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)


WAYS = [
    (name, verb)
    for name, cls in REGISTRY.items()
    for verb, has in (
        ("personalise", True),
        ("infer", issubclass(cls, Unlabelled)),
        ("population", issubclass(cls, Population)),
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
