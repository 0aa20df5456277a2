"""The counts in `docs/testing.md` are about right."""

import pytest

from tests import counts


def test_the_page_states_about_as_many_tests_as_there_are(request):
    items = request.config.stash[counts.COLLECTED]
    if not counts.is_whole(items):
        pytest.skip("counts all tests, and the command line names only some of them")
    text = counts.PAGE.read_text()
    page = counts.parse(text.partition(counts.START)[2].partition(counts.END)[0])
    now = {label: row for table in counts.count(items).values() for label, row in table.items()}
    assert page.keys() == now.keys(), "run `make counts`"
    off = {label: (page[label], row) for label, row in now.items() if not all(map(counts.is_close, page[label], row))}
    assert off == {}, "run `make counts`"


def test_tables_are_read_as_they_were_written():
    tables = {"tests in | fast | slow": {"tests/a/": (6_194, 99), "*": (100, 5)}, "else | number": {"b": (1_000,)}}
    assert counts.parse(counts.render(tables)) == {"tests/a/": (6_100, 99), "*": (100, 5), "b": (1_000,)}


@pytest.mark.parametrize(("stated", "counted", "is_close"), [(100, 133, True), (100, 135, False), (2, 7, True)])
def test_a_count_may_be_off_by_a_quarter_or_by_five(stated, counted, is_close):
    assert counts.is_close(stated, counted) == is_close
