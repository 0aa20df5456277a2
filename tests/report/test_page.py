"""The page: what stands in it for runs of all kinds, and that nothing in it can act."""

import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest

import priory
from priory import report
from priory.certificate import Counts, conclude
from priory.core.errors import UsageError
from priory.report import clients, figures, markup, measure, numbers, page, records
from priory.stats import Estimate
from priory.store import CERTIFICATES, RunDirectory
from tests.older import edit_manifest

HOSTILE = '"><script>alert(1)</script><!--'


class Reader(HTMLParser):
    """Tags with their attributes, the text in them, and the scripts apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.scripts, self._inside = "", [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += f"{data} "


def read(*paths) -> Reader:
    return Reader(page.render(numbers.group([records.read(path) for path in paths])))


def specs_of(reader: Reader) -> dict:
    return json.loads(reader.scripts[0])


def test_names_from_the_data_are_text_and_nothing_else(written):
    plain = read(written("plain"))
    path = written("run", clients=(HOSTILE, "ward 2"), note=HOSTILE, extra={"rejected": {HOSTILE: 1}})
    hostile = read(path)
    assert [tag for tag, _ in hostile.tags].count("script") == [tag for tag, _ in plain.tags].count("script")
    assert not any(name.startswith("on") for _, attributes in hostile.tags for name in attributes)
    assert HOSTILE in hostile.text


def test_json_in_the_page_cannot_end_its_element():
    made = markup.embedded("specs", {"run": "</script><!--"})
    assert made.count("</") == 1
    assert json.loads(Reader(made).scripts[0]) == {"run": "</script><!--"}


def test_nothing_in_the_page_points_outside(written):
    reader = read(written("a"))
    links = [value for _, attributes in reader.tags for name, value in attributes.items() if name in ("src", "href")]
    assert links
    assert all(link.startswith("#") for link in links)
    (policy,) = [a["content"] for t, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")


def test_a_run_without_checkpoint_says_what_is_missing_and_how_to_get_it(written, tmp_path):
    path = written("run")
    out = report.write([path], tmp_path / "report.html")
    text = Reader(out.read_text()).text
    assert f"uncertainty was not measured. {path} has no checkpoint to measure it from; run its manifest again." in text


def test_a_run_from_python_objects_says_that_it_cannot_be_loaded(written, tmp_path):
    path = written("run")
    (path / "checkpoint").mkdir()
    out = report.write([path], tmp_path / "report.html")
    assert f"The run in {path} cannot be loaded" in Reader(out.read_text()).text


def test_foreign_inputs_that_no_model_can_be_asked_about_are_no_silence(written, tmp_path):
    np.savez(tmp_path / "noise.npz", x=np.zeros((4, 8, 8, 1), np.uint8))
    with pytest.raises(UsageError, match="no checkpoint"):
        report.write([written("run")], tmp_path / "report.html", ood=str(tmp_path / "noise.npz"))
    assert not (tmp_path / "report.html").exists()


@pytest.mark.xdist_group("command line")
def test_many_random_effects_are_said_not_to_be_looked_at(comparison, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "MOST_EFFECTS", 1)
    monkeypatch.setattr(measure, "num_coordinates", lambda *_: 2)
    monkeypatch.setattr(measure, "_has_effects", lambda name: True)
    text = Reader(report.write([comparison / "FedAvg-s0"], tmp_path / "report.html").read_text()).text
    assert "Chains were not looked at. A client has 2 random effects" in text


def test_a_score_that_is_not_finite_is_a_dash_and_the_divergence_is_told(written):
    text = read(written("a", None)).text
    assert "training diverged" in text
    assert "–" in text
    assert "nan" not in text.lower()


def test_what_the_method_and_the_run_tell_is_there(written):
    privacy = {"mode": "central", "epsilon": 2.5, "relation": "replace one client", "not_covered": "evaluations"}
    extra = {"clusters": {"ward 1": 1, "ward 2": None}, "adjusted_rand_index": 0.75, "privacy": privacy}
    reader = read(written("a", extra={**extra, "advice": {"width": "The posterior is narrow."}}))
    for words in ("replace one client", "evaluations", "0.750", "The posterior is narrow.", "cluster"):
        assert words in reader.text


def test_runs_on_different_data_are_said_not_to_compare(written):
    path = written("b", method="ditto")
    edit_manifest(path / "manifest.toml", "0" * 12, "1" * 12)
    assert "do not compare" in read(written("a"), path).text
    assert "do not compare" not in read(written("c"), written("d", method="ditto")).text


def test_a_number_and_its_error_stand_in_one_cell_that_sorts_by_the_number():
    made = markup.cell(Estimate(0.5, 0.25))
    assert made == '<td class="number" data-value="0.5">0.500 ± 0.250</td>'
    assert markup.cell(Estimate(float("nan"))) == '<td class="number">–</td>'


def test_seeds_give_means_and_paired_differences_to_the_first(written):
    runs = [written(f"{m}{s}", a, s, method=m) for m, a, s in
            (("local", 0.5, 0), ("local", 0.7, 1), ("ditto", 0.6, 0), ("ditto", 0.8, 1))]  # fmt: skip
    text = read(*runs).text
    assert "Difference to local, paired by seed" in text
    assert "0.600 ± 0.100" in text
    assert "0.100 ± 0.000" in text


@pytest.mark.xdist_group("command line")
class TestRealRuns:
    def test_every_figure_has_a_place_and_words_for_who_cannot_see_it(self, comparison, tmp_path):
        out = report.write([comparison], tmp_path / "report.html")
        reader = Reader(out.read_text())
        plots = {a["id"]: a for t, a in reader.tags if a.get("class") == "plot"}
        specs = specs_of(reader)
        assert set(plots) == {f"plot-{name}" for name in specs}
        curves = ["reliability-pooled", "reliability-best", "reliability-median", "reliability-worst"]
        assert {"rounds-accuracy", "rounds-nll", "sizes-clients", "sizes-bands", "rejection", *curves} <= set(specs)
        for attributes in plots.values():
            assert attributes["role"] == "img"
            assert re.search(r"\d\.\d", attributes["aria-label"])  # what is to be seen, in numbers

    def test_all_that_is_drawn_in_colour_has_a_shape_or_a_dash_too(self, comparison, tmp_path):
        out = report.write([comparison], tmp_path / "report.html")
        for name, spec in specs_of(Reader(out.read_text())).items():
            used = [layer.get("encoding", {}) for layer in spec["layer"]]
            if any("color" in encoding for encoding in used):
                assert any({"shape", "strokeDash"} & set(encoding) for encoding in used), name

    def test_what_is_measured_is_kept_and_equals_what_python_says(self, comparison, tmp_path):
        from priory import load

        path = tmp_path / "run"
        shutil.copytree(comparison / "PFedBayes-s0", path)
        (path / "uncertainty.json").unlink(missing_ok=True)
        told = []
        text = Reader(report.write([path], tmp_path / "report.html", told=told.append).read_text()).text
        assert told == [f"measuring the uncertainty of {path}"]
        epistemic = load(path).uncertainty().parts["personal"].pooled["epistemic"]
        assert f"{epistemic.value:.3f} ± {epistemic.standard_error:.3f}" in text
        report.write([path], tmp_path / "report.html", told=told.append)
        assert len(told) == 1  # the second time it is read

    def test_foreign_inputs_are_drawn_beside_the_test_rows_with_a_verdict(self, comparison, tmp_path):
        np.savez(tmp_path / "noise.npz", x=np.random.default_rng(0).integers(0, 17, (40, 8, 8, 1)).astype(np.uint8))
        path, told = tmp_path / "run", []
        shutil.copytree(comparison / "PFedBayes-s0", path)
        out = report.write([path], tmp_path / "report.html", ood=str(tmp_path / "noise.npz"), told=told.append)
        reader = Reader(out.read_text())
        kinds = {row["of"] for row in specs_of(reader)["epistemic-0"]["data"]["values"]}
        assert kinds == {"test rows", "foreign: inputs"}
        assert "AUROC" in reader.text
        assert re.search(r"told apart|FAILS", reader.text)

    def test_newcomers_have_rows_among_the_scores_and_the_clients(self, comparison, tmp_path):
        out = report.write([comparison], tmp_path / "report.html")
        assert out.read_text().count("newcomers, no data") > 3


def test_a_file_that_cannot_be_is_refused_before_anything_is_read(tmp_path):
    for out in (tmp_path, tmp_path / "nowhere" / "report.html"):
        with pytest.raises(UsageError, match="name a file such as"):
            report.write([tmp_path / "no run"], out)


def test_without_the_extra_the_remedy_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"priory\[report\]"):
        report.write([tmp_path], tmp_path / "report.html")


def test_of_many_clients_the_best_off_are_left_out_and_that_is_said(written, monkeypatch):
    path = written("run", 0.5)
    monkeypatch.setattr(clients, "MOST_ROWS", 1)
    text = read(path).text
    assert "Left out, to keep the page light: 1 rows" in text
    rows = re.findall(r'<th scope="row">(ward \d)</th>', page.render(numbers.group([records.read(path)])))
    assert rows == ["ward 2"]  # the one whose score is not finite


def test_of_many_marks_some_are_drawn_with_both_ends_and_that_is_said(monkeypatch):
    monkeypatch.setattr(figures, "MOST_POINTS", 3)
    chosen, said = figures._thinned([{"train": n} for n in (5, 1, 3, 2, 4)], "train")
    assert [row["train"] for row in chosen] == [1, 3, 5]
    assert "Of 5 marks 3 are drawn" in said
    assert figures._thinned(chosen, "train") == (chosen, "")


@pytest.mark.xdist_group("command line")  # `test_bad_runs` trains the same
@pytest.mark.filterwarnings("ignore::priory.fed.capabilities.AdviceWarning")
def test_chains_are_judged_though_nobody_has_test_rows(tmp_path):
    federation = priory.data.load("eight_schools").partition("natural", test=0.0)
    method = priory.FedPop()
    priory.simulate(method, federation, model="intercept", scale="column", rounds=3, seed=0, out=tmp_path / "run")
    text = Reader(report.write([tmp_path / "run"], tmp_path / "report.html").read_text()).text
    assert "nothing was scored" in text
    assert "Did the chains mix?" in text
    assert "FAILS for 8 clients" in text  # three rounds are far too few


def test_certificates_are_told_with_verdict_and_assumption_the_tightest_first(written):
    path = written("run")
    counts = [
        Counts(np.full(1000, wrong, np.int32), np.float32(nats), np.array([50, 50]))
        for wrong, nats in ((40, 50), (2, 1))
    ]
    found = {
        name: conclude(one, 0.05, "its Gaussian", name, rounds=2).to_json()
        for name, one in zip((HOSTILE, "ward 9"), counts, strict=True)
    }
    assert [one["vacuous"] for one in found.values()] == [True, False]
    RunDirectory(path).write(CERTIFICATES, found)
    text = read(path).text
    assert text.index("ward 9") < text.index(HOSTILE)
    assert text.index("holds with probability 0.95") < text.index("VACUOUS")
    assert "1 of 2 are vacuous" in text
    assert "Assumed: the client's rows are independent draws" in text
    assert "a network drawn from its Gaussian" in text
    RunDirectory(path).write(CERTIFICATES, {name: {**one, "rounds": 1} for name, one in found.items()})
    assert "Certificates" not in read(path).text, "they are of an earlier round"


def test_certificates_of_something_else_are_refused(written):
    path = written("run")
    RunDirectory(path).write(CERTIFICATES, {"ward 1": {"bound": 0.1}})
    with pytest.raises(UsageError, match="holds no certificates of this version"):
        records.read(path)
