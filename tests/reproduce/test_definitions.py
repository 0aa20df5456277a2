"""Every definition: its runs can be made, and their commands say what they are."""

import shlex

import pytest

from priory import data, methods
from priory.cli import federation, flags
from priory.cli.run import run_flags, settings_from
from priory.reproduce import names, read
from priory.reproduce.cells import Cell, cells_of

NAMES = names()
WITH_QUICK = [name for name in NAMES if read(name).has_quick]


def parsed(command: str) -> tuple:
    """Method, settings and data of a `priory run` command."""
    _, _, name, *words = shlex.split(command)
    default = methods.get(name)()
    groups = {
        "method": flags.group("method", "", flags.flags_of(default)),
        "data": flags.group("data", "", federation.data_flags()),
        "run": flags.group("run", "", run_flags()),
    }
    values = flags.parse(groups, words, prog="priory run", text="")
    chosen = federation.from_values(values["data"])
    return flags.build(default, values["method"]), settings_from(values["run"], chosen), values["data"]


def forms(name: str) -> list:
    return [read(name), *([read(name, quick=True)] if read(name).has_quick else [])]


@pytest.mark.parametrize("name", NAMES)
def test_every_method_of_a_table_can_be_made_and_is_sound(name, tmp_path):
    for form in forms(name):
        assert form.blocks
        for cell in cells_of(form, tmp_path):
            cell.method.check()
            cell.settings.schedules(cell.method)
            assert set(cell.row.columns) <= {column.heading for column in form.columns}


@pytest.mark.parametrize("name", NAMES)
def test_the_command_of_a_cell_describes_that_very_run(name, tmp_path):
    chosen: list[Cell] = []  # every row and every block; what one adds to the other is merged alike in all
    for cell in cells_of(read(name), tmp_path):
        if cell.row not in [one.row for one in chosen] or cell.block not in [one.block for one in chosen]:
            chosen.append(cell)
    for cell in chosen:
        method, settings, given = parsed(cell.command)
        assert method == cell.method
        assert settings == cell.settings
        asked = dict(cell.data)
        assert given["data_seed"] == asked.pop("seed")
        for key, value in asked.items():
            shown = given[key]
            while isinstance(shown, tuple) and len(shown) == 1:  # a flag that may be repeated
                shown = shown[0]
            assert shown == pytest.approx(value) if isinstance(value, float) else str(shown) == str(value), key


@pytest.mark.parametrize("name", NAMES)
def test_published_numbers_stand_under_headings_and_blocks_that_exist(name):
    one = read(name)
    headings, blocks = {column.heading for column in one.columns}, {block.key for block in one.blocks}
    for row in one.rows:
        assert set(row.published) <= blocks, row.key
        for numbers in row.published.values():
            assert set(numbers) <= headings, row.key


@pytest.mark.parametrize("name", NAMES)
def test_a_table_names_only_data_sets_of_the_catalogue(name):
    assert set(read(name).data_sets) <= {entry.name for entry in data.describe()}


@pytest.mark.parametrize("name", NAMES)
def test_no_two_cells_of_a_table_share_a_file_unless_they_are_one_run(name, tmp_path):
    seen: dict = {}
    for cell in cells_of(read(name), tmp_path):
        run = (cell.method, cell.settings, str(cell.data))
        assert seen.setdefault(cell.path, run) == run


def test_short_forms_together_take_under_half_an_hour(tmp_path):
    cells = {cell.path: cell for name in WITH_QUICK for cell in cells_of(read(name, quick=True), tmp_path)}
    assert sum(cell.row.seconds or cell.definition.seconds for cell in cells.values() if cell.seed == 0) < 30 * 60


@pytest.mark.parametrize("name", NAMES)
def test_penalties_of_a_table_have_one_declared_solver(name, tmp_path):
    solvers = {cell.method.proximal for cell in cells_of(read(name), tmp_path) if hasattr(cell.method, "proximal")}
    assert solvers <= {"implicit"}


def test_every_size_of_the_alignment_set_has_a_row_without_the_others_knowledge(tmp_path):
    shares: dict[str, set[float]] = {}
    for cell in cells_of(read("fedbnn-figure-3"), tmp_path):
        if cell.method.prior_epochs > 0:
            shares.setdefault(cell.data["align"], set()).add(cell.method.gamma)
    assert len(shares) == 4
    assert all(found == {0.0, 0.7} for found in shares.values())


def test_methods_beside_fedpop_have_its_optimiser_and_schedule(tmp_path):
    cells = [cell for cell in cells_of(read("fedpop-figure-2"), tmp_path) if cell.block.key == "methods"]
    [solver] = {(cell.method.optimiser.kind, cell.method.optimiser.step_size, cell.settings.rounds) for cell in cells}
    [schedule] = {cell.settings.schedule[0] for cell in cells}
    assert (*solver, schedule) == ("adam", 0.01, 1000, "step-size=cosine")
