"""Manifests as text: a stream of YAML documents, or a Helm chart. Pure."""

from collections.abc import Iterable
from typing import Any

import yaml

from workers.cli.manifests.target import APP, Manifest, Target

# Version of the chart, which follows semantic versioning. `appVersion` is the version of Pagemill.
CHART_VERSION = "0.1.0"


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)


def to_yaml(manifests: Iterable[Manifest]) -> str:
    """Return one document for each manifest."""
    return "".join(
        "---\n" + yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=100)
        for manifest in manifests
    )


def to_chart(manifests: Iterable[Manifest], target: Target, version: str) -> dict[str, str]:
    """Return the files of a Helm chart with the manifests. Its only value is the image."""
    chart = {
        "apiVersion": "v2",
        "name": APP,
        "description": "Pagemill's pools of workers, made by `pagemill manifests`.",
        "type": "application",
        "version": CHART_VERSION,
        "appVersion": version,
    }
    return {
        "Chart.yaml": yaml.safe_dump(chart, sort_keys=False),
        "values.yaml": yaml.safe_dump({"image": target.image}),
        "templates/pagemill.yaml": to_yaml(_as_template(manifest) for manifest in manifests),
    }


def _as_template(node: Any, key: str = "") -> Any:
    """Return a manifest with the chart's value as its images.

    Other braces, for example in a chat template, are escaped from Helm.
    """
    if isinstance(node, dict):
        return {name: _as_template(child, name) for name, child in node.items()}
    if isinstance(node, list):
        return [_as_template(child) for child in node]
    if isinstance(node, str):
        return "{{ .Values.image }}" if key == "image" else node.replace("{{", '{{ "{{" }}')
    return node
