"""The registry, and the hyper-parameters that every method refuses."""

import dataclasses
import inspect
import io
import re
import tokenize
from pathlib import Path

import pytest

import priory
from priory import (
    Ditto,
    FedAvg,
    FedBABU,
    FedOpt,
    FedProx,
    FedRep,
    Local,
    Optimiser,
    RandomGroups,
    UsageError,
    Work,
    methods,
)
from priory.core.struct import replace
from priory.engine import manifest
from tests.methods.problems import ALL_METHODS, METHODS


@pytest.mark.parametrize("name", ALL_METHODS)
def test_every_field_of_a_method_is_documented(name):
    cls = METHODS[name]
    text = cls.__doc__ or ""
    for field in dataclasses.fields(cls):
        assert f"{field.name}:" in text


@pytest.mark.parametrize("name", ALL_METHODS)
def test_a_method_equals_its_twin_and_hashes_alike(name):
    cls = METHODS[name]
    assert cls() == cls()
    assert hash(cls()) == hash(cls())


@pytest.mark.parametrize("name", ALL_METHODS)
def test_a_method_declares_what_its_client_keeps_and_sends(name):
    about = METHODS[name].about
    assert about.keeps
    assert about.sends


@pytest.mark.parametrize("name", [name for name in methods.REGISTRY if METHODS[name].about.paper != "baseline"])
def test_the_paper_that_a_method_declares_is_the_one_its_module_cites(name):
    paper = METHODS[name].about.paper
    cited = " ".join((inspect.getmodule(METHODS[name]).__doc__ or "").split())
    first_author = re.split(r" et al\.| and ", paper.authors)[0]
    for part in (first_author, paper.title, paper.venue, f"arXiv:{paper.arxiv}"):
        assert part in cited
    assert paper.arxiv
    assert f"{paper.venue} {paper.year}" in cited if paper.venue else 2000 + int(paper.arxiv[:2]) == paper.year


@pytest.mark.parametrize("name", [name for name in methods.REGISTRY if METHODS[name].about.paper != "baseline"])
def test_a_comment_in_the_code_of_a_method_names_an_equation_or_a_step_of_its_paper(name):
    lines = io.StringIO(inspect.getsource(METHODS[name])).readline
    comments = [token.string for token in tokenize.generate_tokens(lines) if token.type == tokenize.COMMENT]
    assert any(re.search(r"eqs?\. \(|Algorithm \d|appendix [A-Z]\.\d", comment) for comment in comments)


def test_an_unknown_method_is_answered_with_its_neighbour():
    with pytest.raises(UsageError, match=r"fedporx.*did you mean fedprox"):
        methods.get("fedporx")


@pytest.mark.parametrize(
    ("cls", "name", "method"),
    [
        ("FedAdam", "fedadam", FedOpt("adam")),
        ("FedYogi", "fedyogi", FedOpt("yogi")),
        ("Preset", "preset", RandomGroups(predict_with="group")),
        ("Ensemble", "ensemble", RandomGroups(predict_with="all")),
    ],
)
def test_an_old_name_warns_where_it_is_typed_and_not_where_a_file_holds_it(cls, name, method):
    with pytest.warns(DeprecationWarning, match=f"{name} is now {methods.name_of(method)}"):
        assert methods.make(name) == method
    with pytest.warns(DeprecationWarning, match=f"{cls} is now {methods.name_of(method)}") as caught:
        made = getattr(priory, cls)(finetune_epochs=3)
    assert caught[0].filename == __file__  # Python shows it only to whoever wrote the name
    assert made == replace(method, finetune_epochs=3)
    table = {"method": {"name": name, "finetune_epochs": 3}}
    assert manifest.read_method(table, Path("manifest.toml"), trust_code=False) == made


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (FedProx(mu=-1.0), "mu=-1.0"),
        (FedProx(mu=float("nan")), "mu=nan"),
        (Ditto(lam=-0.1), "lam=-0.1"),
        (FedAvg(finetune_epochs=-1), "finetune-epochs=-1"),
        (FedBABU(finetune_step_size=0.0), "finetune-step-size=0.0"),
        (FedRep(head_epochs=-2), "head-epochs=-2"),
        (Local(optimiser=Optimiser(step_size=0.0)), "step-size=0.0"),
        (Local(optimiser=Optimiser(step_size=float("inf"))), "step-size=inf"),
        (Local(optimiser=Optimiser(momentum=1.0)), "momentum=1.0"),
        (Local(optimiser=Optimiser("adam", momentum=0.9)), "momentum=0.9 belongs to sgd"),
        (Local(optimiser=Optimiser(weight_decay=-1.0)), "weight-decay=-1.0"),
        (Local(optimiser=Optimiser(clip=0.0)), "clip=0.0"),
        (Local(work=Work(batch_size=0)), "batch-size=0"),
        (Local(work=Work(steps=0)), "steps=0"),
        (Local(work=Work(epochs=-1)), "epochs=-1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_hyper_parameter_ends_in_one_sentence(method, says):
    with pytest.raises(UsageError) as caught:
        method.check()
    assert says in str(caught.value)
    assert str(caught.value).endswith(".")
