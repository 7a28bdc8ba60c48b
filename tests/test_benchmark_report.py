"""What benchmarks/report.py does to the page, and how pipelines.py compares runs. No benchmark runs here."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import report
from measure import Quartiles, ratios

PAGE = """Ours.

<!-- transport: begin -->
old
<!-- transport: end -->

<!-- recovery: begin -->
<!-- recovery: end -->
"""


def test_the_report_replaces_what_is_between_its_marks_and_keeps_the_rest():
    once = report.replaced(PAGE, "transport", "new")
    assert once == PAGE.replace("\nold\n", "\n\nnew\n\n")
    assert report.replaced(once, "transport", "new") == once


@pytest.mark.parametrize("page", ["", PAGE + PAGE, PAGE.replace("transport: end", "transport: ende")])
def test_the_report_refuses_a_page_without_one_place_for_it(page):
    with pytest.raises(ValueError, match="needs one <!-- transport: begin -->"):
        report.replaced(page, "transport", "new")


def test_the_page_has_a_place_for_each_kind():
    page = report.PAGE.read_text()
    for kind in report.KINDS:
        report.replaced(page, kind, "new")


def test_a_loader_is_compared_with_the_unit_of_the_same_round():
    runs = [{"per_second": 30.0}, None, {"per_second": 80.0}, {"per_second": 5.0}]
    units = [{"per_second": 10.0}, {"per_second": 1.0}, {"per_second": 20.0}, None]
    assert ratios(runs, units) == [3.0, 4.0]
    assert Quartiles.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Quartiles(3.0, 2.0, 4.0)
