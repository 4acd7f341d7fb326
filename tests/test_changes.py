"""The table 'What a change touches' of CONTRIBUTING.md, as far as code can prove it.

Each test holds one row: what the row's files declare is declared nowhere else. A test that fails
names the module that a change of this kind would have to touch as well.
"""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from cyclopts import App

from ops.docs import settings
from shared.batches.orders import ENDPOINTS
from shared.models import families
from shared.protocol.multimodal import DOCUMENT, Modality
from shared.protocol.pipeline import OutputKind
from shared.protocol.requests import ContentPart, TextPart
from shared.protocol.sampling import SamplingParams
from shared.telemetry.catalog import METRICS
from workers.__main__ import app
from workers.gateway import routes
from workers.gateway.openapi.document import TABLES
from workers.gateway.schemas.sampling_fields import OWN_FORM
from workers.renderer.media.decoders import DECODERS
from workers.roles import stage_roles

ROOT = Path(__file__).parent.parent
ROW = re.compile(
    r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| (\d+) \|$", re.MULTILINE
)


@cache
def sources() -> dict[str, ast.Module]:
    """Return every module of the product, by its path in the repository."""
    files = sorted(
        file for folder in ("shared", "workers") for file in (ROOT / folder).rglob("*.py")
    )
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


def nodes(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield path, node


@cache
def strings() -> dict[str, set[str]]:
    """Return the modules in which each string stands as a literal."""
    paths_by_text: dict[str, set[str]] = {}
    for path, node in nodes(ast.Constant):
        if isinstance(node.value, str):
            paths_by_text.setdefault(node.value, set()).add(path)
    return paths_by_text


def rows() -> list[tuple[str, ...]]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return ROW.findall(text[text.index("## What a change touches") :])


def test_the_table_has_the_ten_changes_with_a_number_each() -> None:
    assert [row[0] for row in rows()] == [str(number) for number in range(1, 11)]
    for _, change, files, _, _, today in rows():
        assert len(files.split(";")) == int(today), change


def test_every_file_of_the_table_exists() -> None:
    named = [name for row in rows() for name in re.findall(r"`([\w.]+/[\w./]*)`", row[2] + row[3])]
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


# -- 1: a sampling parameter --------------------------------------------------------------------


def test_sampling_parameters_are_declared_once() -> None:
    """The gateway's request bodies declare only the parameters whose HTTP form differs."""
    names = set(SamplingParams.__struct_fields__)
    tree = sources()["workers/gateway/schemas/openai_request.py"]
    declared = {name for node in ast.walk(tree) for name in fields_of(node)} & names
    # The body of a completion allows 0 for `max_tokens`, with the echo of the prompt.
    assert declared - OWN_FORM == {"max_tokens"}


def fields_of(node: ast.AST) -> list[str]:
    if not isinstance(node, ast.ClassDef):
        return []
    assigned = [field for field in node.body if isinstance(field, ast.AnnAssign)]
    return [field.target.id for field in assigned if isinstance(field.target, ast.Name)]


# -- 2: a model family --------------------------------------------------------------------------

FAMILIES = "shared/models/families/"
# A format of tool calls that is named like a family.
TOOL_FORMATS = {"mistral"}


def test_model_types_stand_only_in_the_modules_of_the_families() -> None:
    declared = [family for module in modules_in(families) for family in module.FAMILIES]
    types = {name for family in declared for name in [*family.model_types, *family.decoders]}
    assert len(types) > 15
    assert elsewhere(types - TOOL_FORMATS, FAMILIES) == {}


def modules_in(package: ModuleType) -> list[Any]:
    names = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    return [importlib.import_module(module.name) for module in names]


def elsewhere(names: set[str], *homes: str) -> dict[str, set[str]]:
    """Return the names that stand as literals outside of `homes`, with the modules they are in."""
    paths_by_name = {name: strings().get(name, set()) for name in names}
    outside = {
        name: {p for p in paths if not p.startswith(homes)} for name, paths in paths_by_name.items()
    }
    return {name: paths for name, paths in outside.items() if paths}


# -- 3: a modality ------------------------------------------------------------------------------


def test_the_name_of_a_modality_stands_in_one_module() -> None:
    allowed = {
        "shared/protocol/multimodal.py",
        "shared/protocol/pipeline.py",  # a kind of output
        "workers/coordinator/admission.py",  # the field about painted images
        "workers/gateway/backend/submit.py",  # the same
        "workers/renderer/decoding/messages.py",  # a word of errors
        "workers/gateway/schemas/openai_request.py",  # OpenAI's parameter for spoken answers
        # OpenAI's names of an object and of a variant, and the name of an extra.
        "workers/gateway/schemas/videos.py",
        "workers/gateway/routes/videos.py",
        "shared/models/image_folder.py",
        # The image of a container.
        "workers/cli/chart_values.py",
    }
    for modality in get_args(Modality):
        assert strings()[modality] <= allowed


def test_every_modality_has_a_content_part_and_a_decoder() -> None:
    modalities = set(get_args(Modality))
    assert {part.modality for part in get_args(ContentPart) if part is not TextPart} == modalities
    assert DECODERS.keys() == {*modalities, DOCUMENT}


# -- 4: a stage ---------------------------------------------------------------------------------


def test_roles_of_stages_are_named_in_the_roles_and_the_default_pipeline_only() -> None:
    names = set(stage_roles())
    assert names >= {"renderer", "encoder", "engine"}
    homes = ("workers/roles.py", "shared/stage/pipelines.py", "shared/stage/graphs.py")
    # Permissions of these roles beyond the permissions of all stages.
    permissions = "shared/protocol/permissions.py"
    allowed = {
        # Labels of metrics in the catalog.
        "renderer": {"shared/telemetry/catalog.py", permissions},
        "encoder": {
            "shared/telemetry/catalog.py",
            "shared/config/schema.py",  # a value of `models.NAME.tower`
            "workers/engine/main.py",  # the same value
        },
        "prefill": {"shared/config/schema.py", permissions},  # a value of `models.NAME.prefill`
        "generator": {"shared/telemetry/catalog.py"},
        "engine": {
            "shared/telemetry/catalog.py",
            permissions,
            "shared/config/schema.py",  # a value of `models.NAME.tower`
            # The section of this name in a configuration.
            "shared/config/parsing.py",
            "workers/cli/models/generated.py",
            # `pagemill top` has a table of engines.
            "workers/cli/top.py",
            "workers/cli/top_frame.py",
        },
    }
    assert elsewhere(names, *homes) == allowed


# -- 5: an output kind --------------------------------------------------------------------------


def test_output_kinds_are_declared_once() -> None:
    others = set(get_args(OutputKind)) - {"text", *get_args(Modality)}
    assert elsewhere(others, "shared/protocol/pipeline.py") == {}


# -- 6: an endpoint -----------------------------------------------------------------------------


def test_endpoints_are_declared_at_their_handlers_and_nowhere_else() -> None:
    declaring = {path for path, call in nodes(ast.Call) if method_of(call) == "endpoint"}
    assert {path for path in declaring if not path.startswith("workers/gateway/routes/")} == {
        "workers/gateway/openapi/document.py",
        "workers/gateway/route_table.py",  # For `RouteTable.answer`.
    }
    paths = {operation.path for table in TABLES for operation in table.operations}
    assert len(paths) > 12
    # Orders of batches name endpoints, and roles without a gateway check these names.
    assert paths.issuperset(ENDPOINTS)
    others = {
        path: strings()[path] - {"shared/batches/orders.py"} for path in paths & set(strings())
    }
    assert all(len(files) <= 1 for files in others.values())


def test_every_route_table_is_served() -> None:
    tables = [module.ROUTES for module in modules_in(routes) if hasattr(module, "ROUTES")]
    assert len(tables) > 5
    assert [table for table in tables if table not in TABLES] == []


def method_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


# -- 7: a setting -------------------------------------------------------------------------------


def test_every_setting_is_declared_in_one_module_and_read_in_another() -> None:
    read = {node.attr for path, node in nodes(ast.Attribute) if path != "shared/config/schema.py"}
    keys = {key.rpartition(".")[2] for key, _ in settings.settings()}
    # `from` is the one key that is no name in Python.
    assert {key for key in keys - {"from"} if key not in read} == set()
    assert "source" in read


# -- 8: a metric --------------------------------------------------------------------------------

WRITERS = {"counter", "histogram", "set_function"}


def test_every_metric_is_described_in_the_catalog_and_has_a_writer() -> None:
    catalog = "shared/telemetry/catalog.py"
    assert {name for name in METRICS if not strings()[name] - {catalog}} == set()
    written = {
        call.args[0].value
        for _, call in nodes(ast.Call)
        if method_of(call) in WRITERS and call.args and isinstance(call.args[0], ast.Constant)
    }
    assert len(written) > 20
    assert written - METRICS.keys() == set()


# -- 9: an error --------------------------------------------------------------------------------


def test_errors_with_a_code_are_declared_in_two_modules() -> None:
    homes = {"shared/errors.py", "workers/gateway/http/errors.py"}
    declaring = {path for path, node in nodes(ast.ClassDef) if has_code(node)}
    assert declaring == homes


def has_code(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base) for base in node.bases}
    return "code" in assigned_in(node) and bool(bases & {"PagemillError", "RequestError"})


def assigned_in(node: ast.ClassDef) -> set[str]:
    targets = [t for field in node.body if isinstance(field, ast.Assign) for t in field.targets]
    return {target.id for target in targets if isinstance(target, ast.Name)}


# -- 10: a command ------------------------------------------------------------------------------


def test_every_command_is_a_function_of_the_commands_package_and_documented() -> None:
    commands = dict(commands_of(app))
    assert len(commands) > 12
    modules = {command.default_command.__module__ for command in commands.values()}
    assert {name for name in modules if not name.startswith("workers.cli.commands.")} == set()
    page = (ROOT / "docs" / "guide" / "command-line.md").read_text(encoding="utf-8")
    named = {name: re.search(rf"`(pagemill )?((dead|keys) )?{name}\b", page) for name in commands}
    assert [name for name, place in named.items() if place is None] == []


def commands_of(group: App) -> Iterator[tuple[str, Any]]:
    for name in group:
        if name.startswith("-"):
            continue
        below = dict(commands_of(group[name]))
        yield from below.items() if below else [(name, group[name])]
