"""Cells: what is kept, when it counts, and how a stopped one goes on."""

import json

import pytest

from priory import UsageError
from priory.reproduce import definition
from priory.reproduce.cells import Cell, Federations, cells_of

pytestmark = pytest.mark.xdist_group("command line")


def first(one: definition.Definition, out) -> Cell:
    return cells_of(one, out)[0]


def test_a_finished_run_is_kept_with_manifest_command_and_curve_and_read_back(tiny, tmp_path):
    cell = first(tiny, tmp_path)
    assert cell.kept() is None
    found = cell.run(Federations())
    kept = cell.kept()
    assert kept is not None
    assert kept == json.loads(json.dumps(found))
    assert kept["manifest"]["environment"]["data_checksum"]
    assert kept["command"].startswith("priory run fedavg")
    assert kept["curve"][-1]["round"] == 2
    assert not (cell.path.parent / ".running" / cell.path.stem).exists()


def test_a_run_with_other_settings_does_not_count(tiny, table, tmp_path):
    first(tiny, tmp_path).run(Federations())
    for part, change in (("method", {"step_size": 0.2}), ("run", {"rounds": 3}), ("data", {"clients": 4})):
        other = definition.parse("digits-table-0", {**table, part: {**table[part], **change}})
        assert first(other, tmp_path).kept() is None, part


def test_a_run_from_before_a_setting_existed_counts_only_with_the_value_that_it_had(tiny, table, tmp_path):
    (prox,) = (cell for cell in cells_of(tiny, tmp_path) if cell.row.key == "prox" and cell.seed == 0)
    found = prox.run(Federations())
    assert found is not None
    assert found["manifest"]["method"].pop("proximal") == "implicit"
    prox.path.write_text(json.dumps(found))
    assert prox.kept() is None
    table["row"][1]["set"]["proximal"] = "explicit"
    explicit = definition.parse("digits-table-0", table)
    assert [cell.kept() for cell in cells_of(explicit, tmp_path) if cell.path == prox.path] == [found]


@pytest.mark.slow  # runs that no other test shares
def test_a_run_that_was_scored_more_often_than_is_asked_counts_and_has_the_same_numbers(table, tmp_path):
    table["row"] = [{"key": "b", "method": "sfedbayes", "set": {"steps": 1, "samples": 2}, "blocks": ["one"]}]
    table["run"]["rounds"] = 4

    def every(rounds: int, out: str) -> Cell:
        asked = {**table, "run": {**table["run"], "eval_every": rounds}}
        return first(definition.parse("digits-table-0", asked), tmp_path / out)

    federations = Federations()
    often, never = every(2, "often").run(federations), every(0, "never").run(federations)
    assert often is not None
    assert never is not None
    assert (len(often["curve"]), len(never["curve"])) == (2, 1)
    assert [often[part] for part in ("personal", "global")] == [never[part] for part in ("personal", "global")]
    assert [every(rounds, "often").kept() is not None for rounds in (0, 4, 2, 3, 1)] == [True, True, True, False, False]
    assert every(2, "never").kept() is None


def test_a_run_without_what_its_table_measures_does_not_count(tiny, table, tmp_path):
    first(tiny, tmp_path).run(Federations())
    assert first(tiny, tmp_path).kept() is not None
    assert first(definition.parse("digits-table-0", {**table, "measure": "density"}), tmp_path).kept() is None


def test_runs_of_other_examples_are_not_put_beside_each_other(tiny, tmp_path):
    one, beside = (cell for cell in cells_of(tiny, tmp_path) if (cell.block.key, cell.seed) == ("one", 0))
    found = one.run(Federations())
    found["manifest"]["environment"]["data_checksum"] = "0"
    one.path.write_text(json.dumps(found))
    with pytest.raises(UsageError, match=r"one-avg-0.json was made of other examples than digits has here.*--out"):
        beside.run(Federations())


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"manifest": {"method": {"name": "fedavg", "odd": 1}}}'])
def test_a_damaged_file_counts_as_missing(tiny, tmp_path, text):
    cell = first(tiny, tmp_path)
    cell.path.parent.mkdir(parents=True)
    cell.path.write_text(text)
    assert cell.kept() is None


def test_a_stopped_run_goes_on_and_ends_with_the_same_numbers(tiny, tmp_path):
    federations = Federations()
    whole = first(tiny, tmp_path / "whole").run(federations)
    cell = first(tiny, tmp_path / "pieces")
    assert cell.run(federations, stop=lambda: True) is None
    assert cell.kept() is None
    assert (cell.path.parent / ".running" / cell.path.stem / "manifest.toml").exists()
    ended = cell.run(federations)
    assert whole is not None
    assert ended is not None
    assert ended["personal"] == whole["personal"]


def test_what_an_older_definition_left_unfinished_is_thrown_away(tiny, table, tmp_path):
    federations = Federations()
    first(tiny, tmp_path).run(federations, stop=lambda: True)
    other = first(definition.parse("digits-table-0", {**table, "method": {"step_size": 0.2}}), tmp_path)
    found = other.run(federations)
    assert found is not None
    assert found["manifest"]["method"]["optimiser"]["step_size"] == 0.2


def test_a_setting_that_a_method_lacks_is_told_with_those_it_has(table, tmp_path):
    table["method"]["mu"] = 0.1
    with pytest.raises(UsageError, match="mu is not a setting of fedavg; choose from"):
        _ = first(definition.parse("digits-table-0", table), tmp_path).method


def test_settings_leave_the_other_defaults_of_a_method_alone(table, tmp_path):
    table["row"][0] = {"key": "b", "method": "pfedbayes", "set": {"epochs": 2, "steps": "none"}}
    method = first(definition.parse("digits-table-0", table), tmp_path).method
    assert method.optimiser.kind == "adam"
    assert method.work.steps is None
    assert method.work.batch_size == 50
