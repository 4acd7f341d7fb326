"""Helm's library, for a separate process, because Go's runtime starts threads and takes signals."""

from typing import Any

from shared.errors import ConfigError
from workers.cli.commands.kubernetes import CHART, render


def try_render(
    values: dict[str, Any], *, is_install: bool = True, namespace: str = "pagemill"
) -> tuple[str, str]:
    """Return the manifests and the error, one of which is empty."""
    try:
        return render(values, namespace, is_install=is_install), ""
    except ConfigError as error:
        return "", str(error)


def lint(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the findings of `helm lint --strict`."""
    import helm_python

    report = helm_python.lint(CHART, values, strict=True, namespace="pagemill")
    return list(report["messages"])


def notes(values: dict[str, Any]) -> str:
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        return chart.render(values, name="pagemill", namespace="pagemill")[
            "pagemill/templates/NOTES.txt"
        ]
