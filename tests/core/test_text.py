"""Text from data where people and spreadsheets read it."""

import pytest

from priory.core.text import one_line, printable, spreadsheet_cell


@pytest.mark.parametrize(
    "text",
    ["=1+2", "=cmd|' /C calc'!A0", "+cmd", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "-", "--1", "+-1", "-1|-2"],
)
def test_a_text_that_starts_a_formula_gets_an_apostrophe(text):
    assert spreadsheet_cell(text) == f"'{text}"


@pytest.mark.parametrize("text", ["\uff1d1+2", "\uff0b1", "\uff0d1", "\uff201", "-\u0661"])
def test_other_forms_of_signs_and_digits_start_formulas_too(text):
    assert spreadsheet_cell(text).startswith("'")


@pytest.mark.parametrize("text", ["-1", "+3.5e2", "-.5", "-1.", "-inf", "+nan", "0", "yes", "a=b", "", "'=1", "3-4"])
def test_numbers_and_other_texts_stay_as_they_are(text):
    assert spreadsheet_cell(text) == text


@pytest.mark.parametrize("hidden", ["\x1b[31m", "\x00", "\x07", "\r", "\x9b2J", "\x7f", "\u202e", "\u2066", "\u2028"])
def test_control_characters_and_changes_of_direction_are_shown_as_escapes(hidden):
    shown = printable(f"a{hidden}b")
    assert shown.startswith("a\\")
    assert shown.isprintable()
    assert one_line(f"a{hidden}b") == shown


def test_newlines_and_tabs_are_layout_in_a_text_but_not_in_a_name():
    assert printable("a\n\tb") == "a\n\tb"
    assert one_line("a\n\tb") == "a\\n\\tb"


@pytest.mark.parametrize("name", ["Zürich", "東京", "می‌خواهم", "👩‍⚕️", "a b", "[bold]", "x:smile:"])
def test_names_of_any_script_stay_as_they_are(name):
    assert one_line(name) == name
