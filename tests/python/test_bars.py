"""The picture that ``make demo`` ends with."""

import sys
import xml.etree.ElementTree as Tree

import pytest
from conftest import ROOT

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def draw(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    from bars import draw

    return draw


def test_bars_are_as_long_as_their_rates(draw, tmp_path):
    path = tmp_path / "new/demo.svg"
    draw(path, "a < b & c", "note", [("tensorizer", 4.0), ("<other>", 1.0), ("none", 0.0)])
    root = Tree.parse(path).getroot()
    bars = [(bar.get("class"), float(bar.get("width"))) for bar in root.iter(f"{SVG}rect")][1:]
    (ours, longest), (other, shorter), (_, nothing) = bars
    assert (ours, other, nothing) == ("ours", "other", 0)
    assert shorter == pytest.approx(longest / 4, abs=0.1)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[:2] == ["a < b & c", "note"]
    assert texts[2:] == ["tensorizer", "4.00 GB/s", "<other>", "1.00 GB/s", "none", "0.00 GB/s"]


def test_without_any_rate(draw, tmp_path):
    draw(tmp_path / "demo.svg", "title", "note", [("tensorizer", 0.0)])
    assert Tree.parse(tmp_path / "demo.svg").getroot() is not None
