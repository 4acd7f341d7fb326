"""Rules on modules, checked in their source: rows S03, S13, S23 and S41."""

import ast
import builtins
import functools
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_FUNCTION_LINES = 60
FILES = sorted(file for folder in ("workers", "shared") for file in (ROOT / folder).rglob("*.py"))

# Patterns of sentences that need a second reading, with what to write instead.
HARD = (
    # Speech for data flow: report, publish, return, receive, store, contain.
    r"\b(tells?|told|telling|asks? of|asked of)\b",
    # Old or spatial words: after, next to, compared with, again, forever, continue, in flight.
    r"\b(behind|beside|anew|for ever|go(es|ing)? on|went on|in hand)\b",
    # A noun without a head: repeat the noun.
    r"\b(that|those) of\b|^(What|Who|How|Where|Those|That|Of)\b(?!.*\?)",
    # A relative clause at the end: put it next to its noun, or write a second sentence.
    r", (of|by|to|from|in) which\b|\bwhose \w+ (is|are|was|were|has|have)\b",
    # Degrees and absolutes: a number, a limit, "no worker", "separate".
    r"\bof (its|their|one's) own\b|\bso (many|much|long|often)\b|\bhalf as\b"
    r"|\b(nobody|whoever|whatever)\b",
)

# They make code of data.
CODE = {"pickle", "cPickle", "cloudpickle", "marshal", "dill", "joblib", "shelve", "jsonpickle"}
CODE |= {"torch.load", "torch.hub", "torch.jit.load", "numpy.load", "yaml.load", "yaml.full_load"}
CODE |= {"yaml.unsafe_load", "yaml.Loader", "yaml.UnsafeLoader", "multiprocessing", "runpy"}
CODE |= {"eval", "exec", "compile", "__import__", "importlib.import_module"}
# They send requests to foreign servers, or read a file by a name.
NETWORK = {"requests", "httpx", "aiohttp", "urllib3", "http.client", "urllib.request", "ftplib"}
NETWORK |= {"huggingface_hub", "httpx2"}
NETWORK |= {"httpcore", "httpcore2", "websockets", "smtplib", "telnetlib"}
SOCKETS = {"socket.create_connection", "socket.socket", "socket.getaddrinfo", "socket.socketpair"}
SOCKETS |= {"asyncio.open_connection", "prometheus_client.start_http_server"}
FILES_BY_NAME = {"open", "io.open", "os.open", "PIL.Image.open"}
FILES_BY_NAME |= {".open", ".read_text", ".read_bytes"}  # of a Path
FILES_BY_NAME |= {"av.open", "soundfile.SoundFile"}

ALLOWED = {
    "workers.renderer.media.fetcher": {"httpcore2"},
    # Every dial for a client goes through it, to a checked address.
    "shared.net.dialing": {"httpcore2"},
    "workers.agent.mcp_client": {"httpcore2"},
    "shared.decoding.image_reader": {"PIL.Image.open"},  # of bytes
    # Decoders open bytes, in a sandbox, and the sockets between them and the renderer. Grammars are
    # tried in one.
    "shared.helpers.forking": {"socket.socket", "socket.socketpair", "os.open"},  # the terminal
    "workers.renderer.decoding.decoding": {"socket.socket", "socket.socketpair"},
    "workers.renderer.decoding.image_video": {"PIL.Image.open"},
    "workers.renderer.decoding.job": {"socket.socket"},
    "workers.renderer.decoding.packets": {"av.open"},
    "workers.renderer.decoding.sound_file": {"soundfile.SoundFile"},
    "workers.renderer.decoding.spawner": {"socket.socket"},
    "workers.engine.sampling.grammar_sandbox": {"socket.socket"},
    "workers.engine.sampling.grammar_trial": {"socket.socket", "socket.socketpair"},
    "shared.blobs.transports": {
        "socket.socket",
        "socket.create_connection",
    },  # addresses from heartbeats
    "shared.blobs.protocol": {"socket.socket"},  # that it is given
    "shared.blobs.server": {"socket.socket", ".read_text"},  # the boot's id
    "shared.helpers.sandbox": {"os.open"},  # a folder without a name
    "shared.stage.signals": {"os.open"},  # the terminal
    "shared.net.listening": {"socket.socket", "socket.getaddrinfo"},  # where the operator says
    "shared.stage.listeners": {"socket.socket"},
    "shared.blobs.store": {"socket.socket"},  # that it is given
    "shared.telemetry.prometheus": {"socket.socket"},  # that it is given
    "workers.generator.video_file": {"av.open"},  # to write into memory
    "workers.gateway.http.accepting": {"socket.socket"},  # who has connected
    "workers.gateway.routes.page": {".read_bytes"},  # of this package
    "shared.vision.embedding_directory": {
        ".read_bytes"
    },  # names are hashes, in the operator's own directory
    "workers.gateway.worker": {"socket.socket"},  # that it is given
    # The operator's own files, on the operator's own machine.
    "shared.bus.embedded_server": {"socket.socket", ".open"},
    "shared.bus.store_lock": {".open"},
    "shared.models.families.llava": {".read_bytes"},
    "shared.models.families.whisper": {".read_bytes"},  # within the model's folder
    "shared.models.generic": {".read_text"},  # source of transformers
    "shared.models.frames": {".read_bytes"},  # within the model's folder
    "shared.models.generic_image": {".read_bytes"},  # within the model's folder
    "shared.models.generic_sound": {".read_bytes"},  # within the model's folder
    "workers.renderer.processing.processor": {".read_text"},
    "workers.settings": {".read_text"},
    # Keys of the bus, and where they are.
    "shared.bus.local_keys": {".read_text"},
    "shared.bus.login": {".read_bytes"},
    "workers.keyring": {".read_bytes", "os.open"},
    "workers.cli.commands.keys": {".read_bytes", ".read_text"},  # the server's process id, /proc
    # Models that the operator pulls from the hub of HF_ENDPOINT; no other module downloads.
    "workers.cli.models.hub": {"huggingface_hub", "httpx2"},
    "workers.cli.models.download": {"huggingface_hub", "httpx2", "os.open", ".open"},
    # It reads the hub's cache, and sends no request to the hub.
    "workers.cli.models.local": {"huggingface_hub"},
    "workers.cli.models.memory": {".read_text"},  # of /proc and /sys
    "workers.cli.inputs": {".read_bytes"},
    "workers.cli.batch_lines": {".read_bytes"},
    "workers.cli.batches": {".open"},
    "workers.cli.backup.archive": {"os.open", ".open"},
    "workers.cli.ports": {"httpx2"},
    "workers.cli.outputs": {".open", "open", "os.open"},
    "workers.cli.commands.dead": {".read_bytes"},
    "workers.cli.commands.kubernetes": {".read_text"},  # the configuration, and values
    # The API server of the cluster that it is a pod of, and the account that the kubelet gives it.
    "workers.kubernetes": {"httpx2", ".read_bytes", ".read_text"},
    "workers.cli.key_secrets": {".read_bytes"},  # keys that it has just made
    # The gateway and the metrics listeners of this machine.
    "workers.cli.commands.doctor": {"httpx2"},
    "workers.cli.commands.health": {"http.client"},
    "workers.supervisor.log_file": {".open", "os.open"},
    "shared.helpers.process_usage": {".read_text"},  # of /proc
    "shared.vision.quantized": {".read_bytes"},  # within the model's folder
    "shared.vision.weight_files": {".read_bytes", ".open"},  # of the model's folder and index
    "shared.vision.weights_progress": {".read_text"},  # of /proc
    "workers.cli.terminal": {"os.open"},  # /dev/null
    "workers.supervisor.preloader": {"socket.socket", "socket.socketpair"},
    "shared.native.library": {".read_text", "os.open"},  # the processor, the cache's folder
    "shared.native.measuring": {".read_bytes"},  # what was measured, in the cache's folder
    "shared.native.targets": {".read_bytes"},  # their sources
    "workers.engine.model.peft_format": {".read_bytes"},
    "shared.config.added_tokens": {".read_bytes"},  # within the model's folder
    "workers.generator.painter_model": {".read_bytes"},  # within the model's folder
    "workers.generator.snac_vocoder": {".read_text"},  # within the model's folder
    "shared.models.image_folder": {".read_bytes"},  # within the model's folder
    "workers.generator.diffusion.checks": {".read_bytes"},  # within the model's folder
    "workers.engine.end_tokens": {".read_bytes"},  # within the model's folder
    "workers.engine.pooling_files": {".read_bytes"},  # within the model's folder
    "workers.generation_config": {".read_bytes"},  # within the model's folder
    # Within the model's folder.
    "shared.models.chat_templates": {".read_bytes"},
    "shared.models.layout": {".read_bytes"},
    "shared.stage.graphs": {".read_text"},
}


def names_used(tree: ast.AST) -> Iterator[str]:
    """Dotted names by what they were imported as; a method of what is not a name as `.method`."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                bound = alias.asname or alias.name.partition(".")[0]
                aliases[bound] = alias.name if alias.asname else bound
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            root, *path = _dotted(node)
            if root in aliases or hasattr(builtins, root):
                yield ".".join([aliases.get(root, root), *path])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # Other objects have methods of this name, too. The method of a file takes a mode.
            is_file = node.func.attr != "open" or _is_mode(node.args)
            yield f".{node.func.attr}" if is_file else ".open of something else"


def _dotted(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [*_dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else ["?"]


def _is_mode(args: list[ast.expr]) -> bool:
    first = args[0].value if args and isinstance(args[0], ast.Constant) else None
    return isinstance(first, str) and set(first) <= set("rwabx+t")


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def uses_of(tree: ast.AST, banned: set[str]) -> set[str]:
    """Which of `banned` are used, or something within them."""
    used = set(names_used(tree))
    return {name for name in banned if any(f"{u}.".startswith(f"{name}.") for u in used)}


def in_all(banned: set[str]) -> dict[str, set[str]]:
    by_module = {module_of(file): uses_of(tree_of(file), banned) for file in FILES}
    return {module: names for module, names in by_module.items() if names}


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def test_no_module_makes_code_of_data() -> None:
    # The command line's own roles, by a table, the modules of three packages, and torch;
    # transformers' processors, by its own table.
    assert in_all(CODE) == {
        "shared.models.generic_image": {"importlib.import_module"},
        "shared.models.image_registry": {"importlib.import_module"},
        "shared.models.lazy_module": {"importlib.import_module"},
        "shared.models.registry": {"importlib.import_module"},
        # The application, which imports the commands by their names.
        "workers.cli.commands.completion": {"importlib.import_module"},
        "workers.cli.commands.worker": {"importlib.import_module"},
        # Tensors alone, see the next test.
        "workers.generator.snac_vocoder": {"torch.load"},
        "workers.generator.image_loader": {"importlib.import_module"},
        "workers.supervisor.preloader": {"importlib.import_module"},
    }


def test_files_of_torch_are_read_for_their_tensors_alone() -> None:
    loads = [call for call in calls() if ast.unparse(call.func) == "torch.load"]
    assert loads
    for call in loads:
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert keywords["weights_only"] == "True"


def test_no_other_module_asks_servers_or_opens_files() -> None:
    assert in_all(NETWORK | SOCKETS | FILES_BY_NAME) == ALLOWED


def test_no_model_brings_its_code_and_nothing_is_downloaded() -> None:
    for call in calls():
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert "trust_remote_code" not in keywords
        if isinstance(call.func, ast.Attribute) and call.func.attr == "from_pretrained":
            assert keywords["local_files_only"] == "True"


def test_no_digest_is_shortened_and_no_key_is_pythons_own_hash() -> None:
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call):
                assert "digest" not in ast.unparse(node.value.func)
    assert "hash" not in {ast.unparse(call.func) for call in calls()}


def calls() -> Iterator[ast.Call]:
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Call):
                yield node


@pytest.mark.parametrize(
    ("line", "banned"),
    [
        ("import pickle", CODE),
        ("from pickle import loads as read", CODE),
        ("import torch as t; t.load(x)", CODE),
        ("from torch import load; load(x)", CODE),
        ("import yaml; yaml.load(x)", CODE),
        ("eval(x)", CODE),
        ("f = exec", CODE),
        ("import urllib.request", NETWORK),
        ("from urllib import request", NETWORK),
        ("def f(): import httpx", NETWORK),
        ("import socket as s; s.create_connection(x)", SOCKETS),
        ("from PIL import Image; Image.open(x)", FILES_BY_NAME),
        ("import PIL.Image as I; I.open(x)", FILES_BY_NAME),
        ("open(x)", FILES_BY_NAME),
        ("Path(x).read_bytes()", FILES_BY_NAME),
    ],
)
def test_the_reading_of_the_source_finds_it(line: str, banned: set[str]) -> None:
    assert uses_of(ast.parse(line), banned)


def test_it_finds_nothing_in_what_is_harmless() -> None:
    source = (
        "import yaml, torch\nyaml.safe_load(x)\ntorch.frombuffer(x)\nfrom urllib.parse import *"
    )
    assert uses_of(ast.parse(source), CODE | NETWORK | SOCKETS | FILES_BY_NAME) == set()


def test_no_function_is_too_long() -> None:
    too_long = []
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or 0) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    too_long.append(f"{module_of(file)}:{node.name}: {num_lines} lines")
    assert too_long == []


def test_no_test_of_a_pure_package_starts_a_broker() -> None:
    """CI runs these tests in Linux' class `idle`, where a broker may stand still for seconds."""
    folders = re.search(
        r"PURE_TESTS := \$\(addprefix tests/,(.*)\)", (ROOT / "Makefile").read_text()
    )
    assert folders is not None
    starts = re.compile(r"\b(own_)?(bus|broker): |\b(nats_client|jetstream): |\brunning_\w+\(")
    assert [
        str(file.relative_to(ROOT))
        for folder in folders[1].split()
        for file in (ROOT / "tests" / folder).rglob("test_*.py")
        if starts.search(file.read_text())
    ] == []


def test_no_call_or_literal_unpacks_a_tuple_or_list_that_is_written_out() -> None:
    packed = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            items = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
            packed += [
                f"{module_of(file)}:{item.lineno}"
                for item in items
                if isinstance(item, ast.Starred) and isinstance(item.value, ast.Tuple | ast.List)
            ]
    assert packed == []


def test_no_sentence_of_a_comment_or_docstring_begins_with_of() -> None:
    """Such a sentence has no subject, and is understood only with the code around it."""
    folders = [ROOT / name for name in ("shared", "workers", "ops", "tests")]
    sentences = [
        f"{file.relative_to(ROOT)}: {sentence}"
        for folder in folders
        for file in folder.rglob("*.py")
        if re.search(r"\bOf ", file.read_text())
        for sentence in re.findall(r"(?:^|[.:!?] )(Of .{0,40})", prose_of(file), re.MULTILINE)
    ]
    assert sentences == []


def test_comments_and_docstrings_have_no_hard_sentences() -> None:
    sentences = [
        f"{file.relative_to(ROOT)}: {sentence}"
        for file in FILES
        for sentence in hard_sentences(prose_of(file))
    ]
    assert sentences == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The broker tells the size.", 1),
        ("Messages behind the last one, which nobody reads.", 2),
        ("What a worker stores.", 1),
        ("What does a worker store?", 0),
        ("A stream whose size is known, in which a key has a place of its own.", 3),
        ("The broker reports the size of the stream, which has a separate key.", 0),
    ],
)
def test_hard_sentences_are_found(text: str, number: int) -> None:
    assert len(hard_sentences(text)) == number


def hard_sentences(prose: str) -> list[str]:
    """Return the words of each match of HARD in prose with one paragraph a line."""
    return [match[0] for pattern in HARD for match in re.finditer(pattern, prose, re.MULTILINE)]


def prose_of(file: Path) -> str:
    """The comments and docstrings of a file, a paragraph each, with the lines joined."""
    source = file.read_text()
    paragraphs: list[str] = []
    last_line = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, text = token.start[0], token.string.lstrip("#: ")
        if line == last_line + 1:
            paragraphs[-1] += f" {text}"
        else:
            paragraphs.append(text)
        last_line = line
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts = inspect.cleandoc(str(node.value.value)).split("\n\n")
            paragraphs += [text.replace("\n", " ") for text in texts]
    return "\n".join(paragraphs)


def test_every_test_that_the_security_page_names_exists() -> None:
    page = (ROOT / "docs" / "contribute" / "security.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 40
    assert named - set(re.findall(r"def (test_\w+)", tests)) == set()
