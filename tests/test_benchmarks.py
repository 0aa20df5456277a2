"""The benchmark's document says what its results hold; how results become figures."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"

PROGRAM = """HloModule jit_run_block

FileNames
1 "/anywhere/priory/fed/shard.py"
2 "/anywhere/site-packages/optax/transform.py"

FunctionNames
1 "Pool.rows"
2 "update"

FileLocations
1 {file_name_id=1 function_name_id=1 line=5 end_line=5 column=0 end_column=0}
2 {file_name_id=2 function_name_id=2 line=7 end_line=7 column=0 end_column=0}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%inside (p: f32[50,784], q: f32[784,100]) -> f32[50,100] {
  %p = f32[50,784]{1,0} parameter(0)
  %q = f32[784,100]{1,0} parameter(1)
  ROOT %dot.1 = f32[50,100]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[50,784], b: f32[784,100]) -> f32[50,100] {
  %a = f32[50,784]{1,0} parameter(0)
  %b = f32[784,100]{1,0} parameter(1)
  %scaled = f32[50,784]{1,0} multiply(%a, %a), metadata={op_name="jit(run_block)/mul" stack_frame_id=2}
  %gathered = f32[2,50]{1,0} all-gather(%a), dimensions={0}
  ROOT %fused.1 = f32[50,100]{1,0} fusion(%scaled, %b), kind=kCustom, calls=%inside
}
"""


@pytest.fixture
def bench(monkeypatch):
    """A module of the benchmark by its name; they import each other as scripts do."""
    monkeypatch.syspath_prepend(str(BENCH))
    names = ("measure", "render", "floor", "works", "scaling")
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def test_the_document_is_what_the_results_make_of_it(bench):
    render = bench("render")
    assert render.rendered(render.DOCUMENT.read_text()) == render.DOCUMENT.read_text()
    assert render.figure_is_current()


def test_pages_of_methods_have_no_ratios_of_times_of_their_own():
    ratio = re.compile(r"[1-9]\d*\.\d+\*{0,2}\s+times\b")
    assert ratio.search((ROOT / "docs" / "benchmarks.md").read_text())
    for page in (ROOT / "README.md", *(ROOT / "docs" / "methods").glob("*.md")):
        assert not ratio.search(page.read_text()), page.name


def test_another_result_gives_another_document(bench, monkeypatch, tmp_path):
    render, measure = bench("render"), bench("measure")
    for path in measure.RESULTS.glob("*.json"):
        kept = json.loads(path.read_text())
        for row in kept.get("rows", ()):
            if "ratio" in row:
                row["ratio"] += 1
        (tmp_path / path.name).write_text(json.dumps(kept))
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    assert render.rendered(render.DOCUMENT.read_text()) != render.DOCUMENT.read_text()


def test_a_busy_machine_is_named_beside_its_figures(bench, monkeypatch, tmp_path):
    render, measure = bench("render"), bench("measure")
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    told = {"cores": 2, "jax": "0", "busy_cores_before": 1.5}
    measure.save("startup", told, rows=[{"work": "help", "seconds": 1.0}])
    assert "1.5 cores busy" in render.startup()
    assert "not to be trusted" in render.startup()


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5])
def test_the_exponent_of_a_power_is_found_beyond_a_fixed_cost(bench, power):
    sizes = [10.0**k for k in range(7)]
    values = [1e-6 * size**power if size >= 1e3 else 1.0 for size in sizes]
    assert bench("measure").exponent(sizes, values) == pytest.approx(power)


def test_products_of_a_program_are_told_from_the_rest(bench):
    floor = bench("floor")
    program = floor.Program(PROGRAM)
    assert program.products("fused.1") == ["dot.1"]
    assert program.products("scaled") == []
    assert program.flops("dot.1") == 2 * 50 * 784 * 100
    assert program.label("scaled") == "arithmetic (`fed/shard.py` Pool.rows)"  # the caller of the other package
    assert program.label("gathered") == floor.EXCHANGE


def test_shares_of_a_round_add_up(bench):
    floor = bench("floor")
    timed = {"fused.1": (0.6, 3), "scaled": (0.2, 3), "gathered": (0.1, 3)}
    found = floor._shares(floor.Program(PROGRAM), timed, seconds=0.25, rounds=2, cores=2)
    assert found["products"] == pytest.approx(0.6)
    assert found["products"] + sum(share for _, share in found["others"]) == pytest.approx(1.0)
    assert dict(found["others"])[floor.REST] == pytest.approx(0.1)
    assert found["gflops"] == pytest.approx(3 * 2 * 50 * 784 * 100 / 0.6 / 1e9)


def test_every_side_sees_the_same_pixels(bench):
    work = bench("works").WORKS["emnist-cnn"]
    (x, y), (again, _) = work.pixels(3), work.pixels(3)
    assert x.shape == (100, 28, 28, 1)
    assert (x == again).all()
    assert y.max() < work.classes
    assert (work.inputs(3)[0] == x.astype("float32") / 255).all()
