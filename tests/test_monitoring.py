"""The alert rules and the dashboard: they name metrics and labels that there are, and runbooks."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import promql_parser
import pytest
import yaml

from shared.telemetry.catalog import METRICS, OWN_LABELS, PREFIX, MetricSpec

ROOT = Path(__file__).parent.parent
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "ops/monitoring/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "ops/monitoring/dashboard.json").read_text())
RUNBOOKS = (ROOT / "docs/operate/runbooks.md").read_text()
# Values that Grafana puts into an expression.
VARIABLES = {"$__rate_interval": "5m", "$model": "demo"}
SUFFIXES = ("_bucket", "_sum", "_count")
ADDED_LABELS = {"le", "lane", "job", "instance"}


def targets() -> Iterator[tuple[str, str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


EXPRESSIONS = [
    *((rule["alert"], rule["expr"]) for rule in RULES),
    *((title, expression) for title, expression, _ in targets()),
]


def parsed(expression: str) -> promql_parser.Expr:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return promql_parser.parse(expression)


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    """Return the selectors of metrics in an expression. Raises ValueError for one that is wrong."""
    parsed(expression)
    matches = re.findall(rf"({PREFIX}\w+)(\{{[^}}]*\}})?", expression)
    return [
        cast(promql_parser.VectorSelector, parsed(f"{name}{matchers}"))
        for name, matchers in matches
    ]


def spec_of(name: str) -> MetricSpec | None:
    """The metric of a series; a histogram has three."""
    spec = METRICS.get(name.removeprefix(PREFIX))
    if spec is not None:
        return None if spec.kind == "histogram" else spec
    for suffix in SUFFIXES:
        spec = METRICS.get(name.removeprefix(PREFIX).removesuffix(suffix))
        if spec is not None and spec.kind == "histogram" and name.endswith(suffix):
            return spec
    return None


def labels_of(spec: MetricSpec) -> set[str]:
    return {*OWN_LABELS, *ADDED_LABELS, *spec.labels}


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_expressions_parse_and_name_metrics_and_labels_that_there_are(
    title: str, expression: str
) -> None:
    selected = selectors(expression)
    assert selected, title
    specs = {selector.name: spec_of(selector.name or "") for selector in selected}
    assert None not in specs.values(), specs
    for selector in selected:
        spec = specs[selector.name]
        assert spec is not None
        named = {matcher.name for matcher in selector.matchers.matchers}
        assert named <= labels_of(spec)
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    for label in {name.strip() for group in grouped for name in group.split(",")}:
        assert any(spec is not None and label in labels_of(spec) for spec in specs.values()), label


@pytest.mark.parametrize("expression", ["sum(rate(pagemill_up[5m])", "pagemill_up ==", "rate()"])
def test_a_wrong_expression_is_noticed(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        selectors(expression)


@pytest.mark.parametrize(
    "name", ["pagemill_nothing", "pagemill_time_to_first_token_seconds", "pagemill_up_bucket"]
)
def test_a_series_that_no_metric_has_is_noticed(name: str) -> None:
    assert spec_of(name) is None


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_every_alert_has_a_runbook_that_says_what_to_do(rule: dict[str, Any]) -> None:
    name = rule["alert"]
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["runbook"] == f"docs/operate/runbooks.md#{name.lower()}"
    section = RUNBOOKS.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    for part in ("**Means**", "**Look at**", "**Do**"):
        assert part in section
    for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
        assert label in rule["expr"] or label in OWN_LABELS


def test_every_alert_has_a_cause_and_a_healthy_system_without_it() -> None:
    cases = yaml.safe_load((ROOT / "ops/monitoring/alerts_test.yml").read_text())["tests"]
    checks = [check for case in cases for check in case["alert_rule_test"]]
    alerts = {rule["alert"] for rule in RULES}
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == alerts
    assert {check["alertname"] for check in cases[-1]["alert_rule_test"]} == alerts


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
def test_alerts_fire_in_prometheus_when_they_should() -> None:
    for command_name, file in (("check", "alerts.yml"), ("test", "alerts_test.yml")):
        command = ["promtool", command_name, "rules", str(ROOT / "ops/monitoring" / file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_runbook_has_its_alert() -> None:
    assert re.findall(r"^## (\w+)$", RUNBOOKS, re.MULTILINE) == [rule["alert"] for rule in RULES]


def test_legends_of_panels_use_labels_of_their_metrics() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for title, expression, legend in targets():
        for label in re.findall(r"{{(\w+)}}", legend):
            specs = [spec_of(selector.name or "") for selector in selectors(expression)]
            assert any(spec is not None and label in labels_of(spec) for spec in specs), title
