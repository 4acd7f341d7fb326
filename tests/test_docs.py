"""The documentation agrees with the code, and its links lead somewhere."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from ops.docs import http_api, metrics, models, settings
from ops.docs import messages as message_page
from ops.docs.tables import structs_in
from shared.config.parsing import parse_config
from shared.errors import PagemillError
from shared.protocol import messages, names, reading, renderer_rpc, subjects
from tests.test_source import hard_sentences
from workers.gateway.http.errors import STATUSES, status_of
from workers.gateway.openapi.document import document
from workers.settings import EMBEDDED, load_config

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CHANGELOG = ROOT / "CHANGELOG.md"  # it may name removed parts
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```+).*?^\1\s*$", re.DOTALL | re.MULTILINE)
YAML = re.compile(r"^```yaml\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OURS = ("shared.", "workers.", "ops.")
ANCHOR = re.compile(r'<a id="([\w-]+)">')
HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)
MAX_HARD = 5


def check_files(pages: dict[Path, str]) -> None:
    for file, text in pages.items():
        assert file.read_text(encoding="utf-8") == text, "run `make docs`"


def test_the_message_reference_is_up_to_date() -> None:
    check_files(message_page.pages())


def test_the_table_of_model_families_is_up_to_date() -> None:
    check_files(models.pages())


def test_the_message_reference_has_every_subject_and_every_message() -> None:
    written = message_page.FILE.read_text(encoding="utf-8")
    source = inspect.getsource(subjects)
    kinds = set(re.findall(r"(?:pm\.|KV\.pm_)[a-z]+", source)) - {"pm.tokens"}
    assert len(kinds) > 15
    assert [kind for kind in kinds if f"`{kind}" not in written.replace("$", "")] == []
    rows = "\n".join(re.findall(r"^\| `(?:pm|\$KV)\..*$", written, re.MULTILINE))
    modules = (messages, reading, renderer_rpc)
    sent_messages = {kind.__name__ for module in modules for kind in structs_sent(module)}
    missing = sent_messages - set(re.findall(r"\[(\w+)\]\(#", rows))
    assert missing == set(), "name these in the tables of subjects in docs/reference/messages.md"


def structs_sent(module: ModuleType) -> list[type]:
    """Return the Structs of `module` that no other Struct of it holds."""
    structs = [kind for kind in vars(module).values() if inspect.isclass(kind)]
    own = [kind for kind in structs if kind.__module__ == module.__name__]
    held = {name for kind in own for name in structs_in([kind]) if name != kind.__name__}
    return [kind for kind in own if issubclass(kind, Struct) and kind.__name__ not in held]


def test_the_encoded_names_of_models_match_the_code() -> None:
    page = (ROOT / "docs" / "reference" / "messages.md").read_text()
    rows = page.partition("<!-- encoded names -->")[2].partition("\n\n|")[2].partition("\n\n")[0]
    subjects_by_name = dict(re.findall(r"^\| `(.+)` \| `(.+)` \|$", rows, re.MULTILINE))
    assert len(subjects_by_name) >= 6
    assert subjects_by_name == {name: subjects.request(name, "<id>") for name in subjects_by_name}
    python = page.partition("In Python:\n\n```python\n")[2].partition("```")[0]
    for name in subjects_by_name:
        assert eval(python, {"re": re, "name": name}) == names.encode_model(name)


def test_the_examples_of_messages_can_be_decoded() -> None:
    written = message_page.FILE.read_text(encoding="utf-8")
    examples = message_page.examples(written)
    assert {"GenerateRequest", "TokenChunk", "Finish", "Failure"} <= {
        k.__name__ for k, _ in examples
    }
    for kind, example in examples:
        # Not `to_builtins`, which cannot convert JSON in JSON.
        decoded = msgspec.json.decode(msgspec.json.encode(msgspec.json.decode(example, type=kind)))
        assert _is_part(msgspec.json.decode(example), decoded), example


def _is_part(example: Any, decoded: Any) -> bool:
    """Return whether all that the example has was decoded: some types ignore unknown keys."""
    if isinstance(example, dict):
        return all(key in decoded and _is_part(example[key], decoded[key]) for key in example)
    if isinstance(example, list):
        pairs = zip(example, decoded, strict=True)
        return len(example) == len(decoded) and all(_is_part(*pair) for pair in pairs)
    return bool(example == decoded)


def test_the_metrics_reference_is_up_to_date() -> None:
    check_files(metrics.pages())


def test_the_settings_reference_is_up_to_date() -> None:
    check_files(settings.pages())


def test_every_setting_has_a_meaning() -> None:
    meanings = dict(settings.settings())
    assert len(meanings) > 80
    assert [key for key, meaning in meanings.items() if not meaning] == []


def test_the_api_reference_is_up_to_date() -> None:
    check_files(http_api.pages())


def test_the_api_reference_has_the_fields_of_every_body() -> None:
    written = http_api.FILE.read_text(encoding="utf-8")
    bodies = set(re.findall(r"`(\w+)`", http_api.bodies()))
    assert "ChatRequest" in bodies
    assert bodies <= set(re.findall(r"<!-- fields (\w+) -->", written))


def test_the_api_reference_has_every_type_and_every_error() -> None:
    written = http_api.FILE.read_text(encoding="utf-8")
    names = re.findall(r"^(?:<!-- fields (\w+) -->|`(\w+)`)$", written, re.MULTILINE)
    assert document()["components"]["schemas"].keys() == {"".join(pair) for pair in names}
    codes = set(re.findall(r"^\| \d+ \| `(\w+)` ", written, re.MULTILINE))
    assert STATUSES.keys() <= codes


def test_troubleshooting_has_a_row_for_every_error_code() -> None:
    page = (ROOT / "docs" / "operate" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+|-) \| (yes|no) \| ([^|]+) \| ([^|]+) \|$", page, re.M)
    by_code = {error.code: error for error in _errors(PagemillError)}
    assert [row[0] for row in rows] == sorted(by_code), "rows are sorted by code"
    for code, status, again, _, _ in rows:
        assert status in ("-", str(status_of(by_code[code]))), code
        assert again == ("yes" if by_code[code].retryable else "no"), code


def test_the_guide_to_batches_has_every_code_of_an_input_file() -> None:
    page = (ROOT / "docs" / "guide" / "batches.md").read_text(encoding="utf-8")
    source = (ROOT / "shared" / "batches" / "input_file.py").read_text(encoding="utf-8")
    codes = set(re.findall(r'(?:_refuse|LineError)\(\s*"(\w+)"', source))
    assert "line_too_long" in codes
    assert [code for code in sorted(codes) if f"`{code}`" not in page] == []


def _errors(cls: type[PagemillError]) -> Iterator[type[PagemillError]]:
    yield cls
    for below in cls.__subclasses__():
        # Tests define further errors.
        if below.__module__.startswith(("shared.", "workers.")):
            yield from _errors(below)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(_without_code(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not (file.exists() and file.is_relative_to(ROOT)):
            broken.append(target)
        elif anchor:
            broken += [] if anchor in _anchors(file) else [target]
    assert broken == []


def test_the_documents_have_no_more_hard_sentences() -> None:
    """The number may only be lowered. Reference pages come from docstrings, which have a test."""
    prose = [FENCE.sub("", page.read_text()) for page in PAGES if "reference" not in page.parts]
    paragraphs = (part.replace("\n", " ") for text in prose for part in text.split("\n\n"))
    assert len([match for part in paragraphs for match in hard_sentences(part)]) <= MAX_HARD


def test_the_link_test_finds_links() -> None:
    targets = {target for page in PAGES for target in LINK.findall(_without_code(page))}
    assert len([target for target in targets if "#" in target]) >= 10
    assert len(targets) > 60


def test_every_file_command_and_test_in_the_documents_exists() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES if page != CHANGELOG)
    files = set(re.findall(r"`((?:shared|workers|ops|tests|compose|docs)/[\w./-]+)", text))
    assert len(files) > 50
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)", text)) - targets == set()
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py"))
    assert (
        set(re.findall(r"`(test_\w+)`", text)) - set(re.findall(r"def (test_\w+)", tests)) == set()
    )


def test_every_configuration_in_the_documents_is_a_whole_file(tmp_path: Path) -> None:
    examples = [text for page in PAGES for text in YAML.findall(page.read_text(encoding="utf-8"))]
    assert len(examples) > 5
    file = tmp_path / "pagemill.yaml"
    for text in examples:
        file.write_text(text)
        # The role of another program, and a stage of a graph that is read from the folder.
        if re.search("role: speaker|text_encoder", text):
            parse_config(text, {}, "a document", EMBEDDED)
        else:
            load_config(file)


def test_the_imports_of_the_documents_exist() -> None:
    blocks = [text for page in PAGES for text in PYTHON.findall(page.read_text(encoding="utf-8"))]
    imports = [node for text in blocks for node in ast.walk(ast.parse(text))]
    named = [(n.module, a.name) for n in imports if isinstance(n, ast.ImportFrom) for a in n.names]
    ours = [(module, name) for module, name in named if module and module.startswith(OURS)]
    assert len(ours) > 10
    for module, name in ours:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def _without_code(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def _anchors(file: Path) -> set[str]:
    """Return the anchors of a page, and those that GitHub makes of its headings."""
    text = _without_code(file)
    anchors = set(ANCHOR.findall(text))
    for heading in HEADING.findall(text):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        numbered, number = anchor, 0
        while numbered in anchors:
            number += 1
            numbered = f"{anchor}-{number}"
        anchors.add(numbered)
    return anchors
