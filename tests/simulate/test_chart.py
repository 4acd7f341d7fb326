"""The chart is well-formed, and has a step for each change."""

import xml.etree.ElementTree as ET

from ops.simulate.chart import line_chart


def test_a_chart_has_a_path_for_each_line_with_its_changes_alone() -> None:
    lines = {"a < b": [(0.0, 0.0), (1.0, 0.0), (2.0, 4.0), (3.0, 4.0)], "none": [(0.0, 0.0)]}
    root = ET.fromstring(line_chart("title", "seconds", lines))
    paths = [e.get("d", "") for e in root.iter() if e.get("stroke-width") == "1.5"]
    assert [path.count("V") for path in paths] == [1, 0]
    assert "a < b" in [e.text for e in root.iter()]
