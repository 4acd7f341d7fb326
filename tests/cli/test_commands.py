"""The command line as somebody meets it: help, version, configuration, and plain errors."""

import fcntl
import hashlib
import io
import json
import os
import pty
import re
import shlex
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from inspect import signature
from itertools import chain
from pathlib import Path

import pytest
import yaml
from cyclopts import App, CycloptsError
from rich.console import Console

from shared.bus.local_keys import note_keys
from shared.config.parsing import parse_config
from shared.errors import ConfigError, InvalidRequest, Unavailable
from shared.protocol.records import error_info
from shared.stage.runtime import EXIT_CONFIG
from tests import preloaded
from tests.cli.fake_terminal import FakeTerminal
from tests.cluster.conftest import PAGEMILL, ROOT
from tests.quantized_checkpoints import FORMS, copy_quantized
from workers import settings
from workers.__main__ import COMMANDS, EXAMPLES, app, show_error
from workers.cli.ask import name_place, print_error
from workers.cli.commands.logs import logs
from workers.cli.ports import check_ports
from workers.roles import all_roles


def run(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run(*arguments, cwd=cwd, env=os.environ | env)


def test_version_and_help(tmp_path: Path) -> None:
    assert run("--version", cwd=tmp_path).stdout.strip() == version("pagemill")
    everything = run("--help", cwd=tmp_path).stdout
    assert [title for title in [*COMMANDS, "Options"] if f"╭─ {title} ─" not in everything] == []
    assert [command for command in EXAMPLES if f"│ {command} " not in everything] == []
    one = run("ask", "--help", cwd=tmp_path).stdout
    assert [example for example in EXAMPLES["ask"] if example not in one] == []
    # cyclopts can make a second option for an option, which means nothing here.
    assert not re.search("--(no|empty)-", one)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("ls", 'There is no command "ls": see pagemill models.'),
        ("serve org/name", 'There is no command "serve": see pagemill up.'),
        ("frob", 'Unknown command "frob".'),
        ("ask hello red.png", 'Too many arguments: "red.png".'),
        ("models a b", 'Too many arguments: "a b".'),
    ],
)
def test_a_wrong_command_or_argument_has_a_hint(typed: str, words: str) -> None:
    with pytest.raises(CycloptsError) as refused:
        app.parse_args(typed, exit_on_error=False, print_error=False)
    written = io.StringIO()
    Console(width=300, file=written).print(show_error(refused.value))
    assert words in written.getvalue()


def test_examples_of_the_help_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").touch()
    assert {len(examples) for examples in EXAMPLES.values()} == {2}
    for example in chain(*EXAMPLES.values()):
        words = shlex.split(re.split(" [|>] (?!pagemill)", example.split("| pagemill ")[-1])[0])
        app.parse_args(words, exit_on_error=False, print_error=False)


def test_every_command_that_prints_can_print_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_json(name: str, command: App) -> list[str]:
        inner = [part for part in command.resolved_commands() if not part.startswith("-")]
        if command.default_command is None:
            return [
                text for part in inner for text in without_json(f"{name} {part}", command[part])
            ]
        return [] if "json" in signature(command.default_command).parameters else [name]

    other = {"run", "up", "worker", "chat", "metrics", "manifests", "completion"}
    # They write JSON lines, or nothing to stdout.
    other |= {f"batch {name}" for name in ("run", "make", "follow", "results")}
    other |= {"keys remove-tenant", "keys secrets", "dead drop", "dead requeue"}
    assert {text for name in EXAMPLES for text in without_json(name, app[name])} == other
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "engine.nk").touch()
    printed = []
    for command in ("check", "key alice", "keys list --dir keys"):
        assert app(f"{command} --json", result_action="return_value") == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert printed[0]["settings"]["models"].keys() == {"demo"}
    assert printed[1]["gateway"]["api_keys"][0]["name"] == "alice"
    assert printed[2] == {"file": "keys/engine.nk"}


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("pagemill re", "restore requests render"),
        ("pagemill ask --max", "--max-tokens"),
        ("pagemill batch r", "run results"),
        ("pagemill completion ", "bash zsh fish"),
    ],
)
def test_bash_completes_commands_options_and_choices(
    typed: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app("completion bash", result_action="return_value")
    script = f"""
        {capsys.readouterr().out}
        COMP_WORDS=({typed}{"''" if typed.endswith(" ") else ""})
        COMP_CWORD=$(({len(typed.split(" "))} - 1))
        _pagemill pagemill
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(words.split())


def test_a_key_is_printed_once_with_its_configuration(tmp_path: Path) -> None:
    done = run("key", "chat-page", "--tenant", "acme", cwd=tmp_path)
    key = done.stdout.strip()
    lines = done.stderr[done.stderr.index("  api_keys:") :]
    (entry,) = yaml.safe_load(f"gateway:\n{lines}")["gateway"]["api_keys"]
    digest = hashlib.sha256(key.encode()).hexdigest()
    assert entry == {"name": "chat-page", "sha256": digest, "tenant": "acme"}
    assert key not in done.stderr
    assert len(key) > 40


def test_no_key_is_made_for_a_name_that_the_gateway_refuses() -> None:
    with pytest.raises(ConfigError, match="--tenant: 'a b' must be 1 to 128 letters"):
        app("key alice --tenant 'a b'", exit_on_error=False, result_action="return_value")


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("chat <&-", 1, "error invalid_request: stdin is closed: chat reads messages from it\n"),
        # As in coreutils, output that is lost is a failure.
        ("check >&-", 1, "ok: embedded default\n"),
        ("key alice >&- 2>&-", 1, ""),
        ("--version >/dev/full", 1, "error disk_full: stdout: No space left on device\n"),
        ("--version >&-", 1, ""),
        ("where r-1 --nats nats://127.0.0.1:9 2>&-", 1, ""),
    ],
)
def test_a_closed_stream_ends_no_command_with_a_traceback(
    tmp_path: Path, command: str, code: int, message: str
) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {command}', "sh", *PAGEMILL],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", message)


def test_the_command_is_installed(tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "pagemill"
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == version("pagemill")


def test_workers_that_compute_nothing_load_no_torch() -> None:
    """The renderer, which comes last, has transformers without it."""
    roles = [spec.name for spec in all_roles() if not spec.uses_torch]
    roles.sort(key="renderer".__eq__)
    assert len(roles) > 3
    script = (
        "import sys; from workers.cli.commands.worker import load_main\n"
        f"for role in {roles!r}:\n"
        "    load_main(role)\n"
        "    assert sys.modules.get('torch') is None, role\n"
        "    assert ('transformers' in sys.modules) == (role == 'renderer'), role\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)


def test_check_prints_the_effective_configuration(tmp_path: Path) -> None:
    done = run("check", cwd=tmp_path, PAGEMILL_ENGINE__BLOCK_SIZE="32")
    assert done.returncode == 0, done.stderr
    tree = yaml.safe_load(done.stdout)
    assert tree["engine"]["block_size"] == 32
    assert list(tree["models"]) == ["demo"]


SPEECH = """
models:
  demo:
    path: model
    stages:
      talker:
        role: engine
        inputs: {text: {from: engine, function: follow, mode: stream}}
        output: {name: codes, kind: codes}
      code2wav:
        role: generator
        path: voice
        inputs: {codes: {from: talker, function: follow, mode: stream}}
        output: {name: audio, kind: audio}
        chunks: {first: [5, 10], size: 25}
"""


def test_check_prints_the_pipeline_with_its_chunks(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(ROOT / "ops" / "demo_model")
    (tmp_path / "pagemill.yaml").write_text(SPEECH)
    done = run("check", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("#")] == [
        "# models.demo.path: Qwen2-VL (native); weights in memory: engine 10.5 MB as float32",
        "# KV cache of models.demo (engine): 268.4 MB, 174760 tokens",
        "# pipeline of demo",
        "#   request ──▶ renderer  (task: prompt)",
        "#   renderer ──▶ engine  (task: tokens)",
        "#   engine ~~▶ talker  (stream: text)",
        "#   talker ~~▶ code2wav  (stream: codes)",
        "#   code2wav in chunks of 5, 10, then 25 frames, with 2 before and 2 after",
        "#   engine ──▷ output text (text)",
        "#   talker ──▷ output codes (codes)",
        "#   code2wav ──▷ output audio (audio)",
    ]


def test_check_reads_the_device_and_the_ranks_of_each_pool(tmp_path: Path) -> None:
    folder, file = ROOT / "ops" / "demo_model", tmp_path / "pagemill.yaml"
    text = f"engine: {{tensor_parallel: 4}}\nmodels: {{demo: {{path: {folder}, pools: {{%s}}}}}}"
    big = "big: {device: cuda, tensor_parallel: 1}"
    file.write_text(text % f"{big}, small: {{tensor_parallel: 2}}")
    done = run("check", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # The checkpoint is in float16.
    for pool, sizes in (
        ("big", "engine 5.3 MB as float16"),
        ("small", "rank 0 8.2 MB, each other rank 2.4 MB as float32"),
    ):
        title = f"# models.demo.path in models.demo.pools.{pool}: Qwen2-VL (native)"
        assert f"{title}; weights in memory: {sizes}\n" in done.stdout
    for section, reason in (
        ("{}", ".tensor_parallel: 4 ranks cannot share 6 attention heads"),
        ("{tensor_parallel: 2, kernels: tiles}", ".kernels: C++ kernels are not supported"),
    ):
        file.write_text(text % f"{big}, small: {section}")
        done = run("check", cwd=tmp_path)
        assert done.returncode != 0
        assert f"models.demo.pools.small{reason}" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("chunks", "key", "message"),
    [
        ("{size: 0}", ".size", "must be at least 1"),
        ("{first: [5, 1001]}", ".first[1]", "must be at most 1000"),
        ("{left: -1}", ".left", "must be at least 0"),
        ("{sizes: 25}", ".sizes", "unknown field; did you mean size?"),
    ],
)
def test_check_refuses_wrong_chunks(tmp_path: Path, chunks: str, key: str, message: str) -> None:
    config = tmp_path / "pagemill.yaml"
    config.write_text(SPEECH.replace("{first: [5, 10], size: 25}", chunks))
    done = run("check", cwd=tmp_path)
    assert done.returncode != 0
    errors = " ".join(done.stderr.split())
    assert f"pagemill.yaml: models.demo.stages.code2wav.chunks{key}: " in errors
    assert message in errors


def test_check_prints_the_weights_of_each_rank(tmp_path: Path) -> None:
    model = f"models: {{demo: {{path: {ROOT / 'ops' / 'demo_model'}}}}}"
    (tmp_path / "pagemill.yaml").write_text(f"{model}\nengine: {{tensor_parallel: 2}}")
    done = run("check", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "weights in memory: rank 0 8.2 MB, each other rank 2.4 MB" in done.stdout
    for section, reason in (
        ("tensor_parallel: 2, kernels: tiles", "engine.kernels: C++ kernels are not supported"),
        ("tensor_parallel: 4", "4 ranks cannot share 6 attention heads equally"),
    ):
        (tmp_path / "pagemill.yaml").write_text(f"{model}\nengine: {{{section}}}")
        done = run("check", cwd=tmp_path)
        assert done.returncode != 0
        assert reason in " ".join(done.stderr.split())


def test_check_prints_the_format_of_quantized_weights(tmp_path: Path) -> None:
    folder, _ = copy_quantized(ROOT / "ops" / "demo_model", tmp_path, FORMS["awq"])
    (tmp_path / "pagemill.yaml").write_text(f"models: {{mine: {{path: {folder}}}}}")
    done = run("check", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    label = "Qwen2-VL (native), stored as int4, groups of 32 (AWQ)"
    assert f"# models.mine.path: {label}; weights in memory: engine " in done.stdout
    done = run("models", cwd=tmp_path, HF_HOME=str(tmp_path))
    assert "configured, stored as int4, groups of 32 (AWQ)" in done.stdout
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    done = run("check", cwd=tmp_path)
    assert done.returncode == 1
    assert ".scales has the shape" in " ".join(done.stderr.split())


def test_a_models_path_is_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(ROOT / "ops" / "demo_model")
    (tmp_path / "pagemill.yaml").write_text("models: {mine: {path: model}}")
    (tmp_path / "elsewhere").mkdir()
    done = run("check", "--config", "../pagemill.yaml", cwd=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    assert Path(yaml.safe_load(done.stdout)["models"]["mine"]["path"]).samefile(tmp_path / "model")


def test_an_adapters_path_is_relative_to_the_file_too(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(ROOT / "ops" / "demo_model")
    text = "models: {mine: {path: model, adapters: {tuned: here}}}"
    (tmp_path / "pagemill.yaml").write_text(text)
    (tmp_path / "elsewhere").mkdir()
    done = run("check", "--config", "../pagemill.yaml", cwd=tmp_path / "elsewhere")
    assert done.returncode == 1
    for part in ("models.mine.adapters.tuned", "adapter_config.json"):
        assert part in done.stderr
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "adapter_config.json").touch()
    done = run("check", "--config", "../pagemill.yaml", cwd=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    path = yaml.safe_load(done.stdout)["models"]["mine"]["adapters"]["tuned"]
    assert Path(path).samefile(tmp_path / "here")


def test_an_option_of_another_type_is_refused_in_plain_words(tmp_path: Path) -> None:
    refused = run("draw", "a", "--n", "many", cwd=tmp_path)
    assert refused.returncode == 2
    assert 'Invalid value for --n: must be a whole number, not "many"' in refused.stderr


def test_check_names_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "pagemill.yaml").write_text("models: {mine: {path: 5}}")
    done = run("check", cwd=tmp_path)
    assert done.returncode == 1
    for part in ("pagemill.yaml", "models.mine.path", "must be a text"):
        assert part in done.stderr
    (tmp_path / "pagemill.yaml").write_text("models: {mine: {path: nowhere}}")
    done = run("check", cwd=tmp_path, COLUMNS="300")
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["ask", "hello"], ["top", "--once"], ["metrics"]])
def test_without_a_server_it_says_so(command: list[str], tmp_path: Path) -> None:
    done = run(*command, "--nats", "nats://127.0.0.1:9", cwd=tmp_path)
    assert done.returncode == 1
    assert "nats://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def taken() -> Iterator[str]:
    """A port at which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


def refusal_of_port(section: str, port: str) -> str:
    return f"error unavailable: {section}.port: port {port} of 127.0.0.1 is in use: "


@pytest.mark.parametrize("section", ["nats", "gateway", "blobs"])
def test_up_refuses_a_port_in_use_before_it_starts_anything(
    section: str, taken: str, tmp_path: Path
) -> None:
    env = {"PAGEMILL_NATS__PORT": "0", "PAGEMILL_GATEWAY__PORT": "0"}
    if section == "blobs":
        env["PAGEMILL_BLOBS__LISTEN"] = "127.0.0.1"
    done = run("up", cwd=tmp_path, **env | {f"PAGEMILL_{section.upper()}__PORT": taken})
    assert " ".join(done.stderr.split()).startswith(refusal_of_port(section, taken))
    assert done.stderr.count("error") == 1
    # The port may be free later, so a service manager starts the command again.
    assert done.returncode == 1
    assert list(tmp_path.iterdir()) == []
    command = done.stderr.splitlines()[-1]
    assert command.startswith(f"  PAGEMILL_{section.upper()}__PORT=")
    assert command.endswith(" pagemill up")


def test_all_ports_in_use_and_their_holder_are_in_one_error(
    taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gateway(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ok", "models": {"demo": "ok", "other": "no engine"}}')

        def log_message(self, format: str, *_: object) -> None: ...

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["pagemill", "up", "a b", "--port", "1"])
    note_keys(int(taken), tmp_path)
    with HTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ports = {"nats": {"port": int(taken)}, "gateway": {"port": server.server_port}}
        with pytest.raises(Unavailable) as refused:
            check_ports(parse_config(json.dumps(ports), {}, "test", settings.EMBEDDED))
        server.shutdown()
    sentence, command = refused.value.message.splitlines()
    assert f"port {taken} of 127.0.0.1 and gateway.port: port {server.server_port} of" in sentence
    holder = f"Pagemill runs already and serves demo, other, with its data in {tmp_path.parent}"
    assert f"are in use: {holder}: stop it" in sentence
    assert re.match(
        r"  PAGEMILL_NATS__PORT=\d+ PAGEMILL_GATEWAY__PORT=\d+ pagemill up 'a b'", command
    )


@pytest.mark.parametrize(("role", "section"), [("gateway", "gateway"), ("engine", "blobs")])
def test_a_worker_refuses_a_port_in_use_before_it_loads_anything(
    role: str, section: str, taken: str, tmp_path: Path
) -> None:
    """Neither the broker nor the model exists."""
    (tmp_path / "pagemill.yaml").write_text(
        "models: {mine: {path: none}}\nnats: {url: 'nats://127.0.0.1:9'}\n"
        f"{section}: {{listen: 127.0.0.1, port: {taken}}}\n"
    )
    done = run("worker", role, cwd=tmp_path)
    assert " ".join(done.stderr.split()).startswith(refusal_of_port(section, taken))
    assert done.returncode == 1


def test_up_gives_up_on_a_configuration_that_a_worker_refuses(tmp_path: Path) -> None:
    free = {"PAGEMILL_NATS__PORT": "0", "PAGEMILL_GATEWAY__PORT": "0"}
    done = run("up", cwd=tmp_path, PAGEMILL_ENGINE__NUM_BLOCKS="3", **free)
    assert done.returncode == EXIT_CONFIG
    assert "engine.num_blocks" in done.stderr
    assert "the engine refuses this configuration" in " ".join(done.stderr.split())


@pytest.mark.parametrize("command", [["up"], ["worker", "coordinator"]])
def test_a_service_with_a_broken_configuration_is_not_to_be_started_again(
    command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "pagemill.yaml").write_text("models: {mine: {path: 5}}")
    done = run(*command, cwd=tmp_path)
    assert done.returncode == EXIT_CONFIG
    assert "models.mine.path" in done.stderr


# Imports of a whole cluster take longer than the rest.
@pytest.mark.parametrize(
    ("python", "mark"),
    [
        ([sys.executable], rb"coordinator +ready in"),
        (preloaded.PYTHON, rb"(?s)coordinator.*ready at"),
    ],
)
def test_a_closed_terminal_drains_everything_and_the_log_shows_it(
    python: list[str], mark: bytes, tmp_path: Path
) -> None:
    """It is closed while workers start, or when all of them are ready."""
    (tmp_path / "pagemill.yaml").write_text(
        f"models: {{demo: {{path: {settings.DEMO_MODEL}}}}}\nnats: {{port: 0}}\n"
        "gateway: {port: 0}\nlog_file: logs/all.log\n"
    )
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [*python, "-m", "workers", "up"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "PYTHONUNBUFFERED": ""},
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(end)
    output = b""
    while re.search(mark, output) is None:
        output += os.read(terminal, 4096)
    assert b'"event"' not in output
    os.close(terminal)
    assert process.wait(60) == 0
    lines = (tmp_path / "logs" / "all.log").read_text().splitlines()
    assert "drained" in [json.loads(line)["event"] for line in lines if line.startswith("{")]
    done = run("logs", "--role", "coordinator", "--level", "info", "-n", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "coordinator-" in done.stdout
    assert "drained" in done.stdout
    done = run("logs", "--role", "coordinator", "-n", "1", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["event"] == "drained"
    assert done.stdout.strip() in lines


def test_logs_says_where_there_is_none(tmp_path: Path) -> None:
    done = run("logs", cwd=tmp_path)
    assert done.returncode == 1
    assert str(tmp_path / "data" / "pagemill.log") in done.stderr.replace("\n", "")
    done = run("logs", cwd=tmp_path, PAGEMILL_LOG_FILE="stderr")
    assert done.returncode == 1
    assert "stderr" in done.stderr


def test_logs_follows_until_it_is_stopped(tmp_path: Path) -> None:
    file = tmp_path / "data" / "pagemill.log"
    file.parent.mkdir()
    file.write_text('{"event": "old"}\n')
    process = subprocess.Popen(
        [sys.executable, "-m", "workers", "logs", "-f", "--json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"event": "old"}
    with file.open("a") as appended:
        appended.write('{"event": "new"}\n')
    assert json.loads(process.stdout.readline()) == {"event": "new"}
    process.terminate()
    assert process.wait(30) == 0
    process.stdout.close()


def test_what_an_error_quotes_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(error_info(InvalidRequest("a control token [/INST]", field="messages")))
    print_error(error_info(InvalidRequest("no role [bold]")))
    assert capsys.readouterr().err.splitlines() == [
        "error invalid_request (messages): a control token [/INST]",
        "error invalid_request: no role [bold]",
    ]


def test_an_error_of_a_file_names_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    field = "messages[0].content[1].image_url.url"
    assert name_place(field, [["a.png", "b.png"]]) == "b.png"
    assert name_place(field.replace("[0]", "[1]", 1), [[], ["a.png"]]).startswith("messages")
    faults = {field: "is damaged", "messages[0]": "is empty", "prompt": "prompt: x"}
    for place, message in faults.items():
        print_error(error_info(InvalidRequest(message, field=place)), ["a.png", "b.png"])
    assert capsys.readouterr().err.splitlines() == [
        "error invalid_request (b.png): is damaged",
        "error invalid_request (messages[0]): is empty",
        "error invalid_request: prompt: x",
    ]


ODD_LINES = '{"event":"x","key":"\x9b2J"}\n\x1b]52;c;x\x07'.encode() + b"\xff\n"


@pytest.fixture
def odd_log(tmp_path: Path) -> Path:
    """A configuration whose log holds a name that would steer a terminal, and no UTF-8."""
    file = tmp_path / "pagemill.log"
    file.write_bytes(ODD_LINES)
    config = tmp_path / "pagemill.yaml"
    config.write_text(f"models: {{any: {{path: any}}}}\nlog_file: {file}\n")
    return config


async def test_json_lines_do_not_steer_the_terminal(
    odd_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", out := FakeTerminal())
    assert await logs(json=True, config=odd_log) == 0
    assert out.getvalue() == '{"event":"x","key":"\ufffd2J"}\n\ufffd]52;c;x\ufffd\ufffd\n'


async def test_json_lines_in_a_pipe_are_those_of_the_file(
    odd_log: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert await logs(json=True, config=odd_log) == 0
    assert capfdbinary.readouterr().out == ODD_LINES


def test_a_renderer_computes_in_no_threads_of_numpy() -> None:
    code = (
        "import os; from workers.cli.commands.worker import load_main; load_main('renderer');"
        " import numpy; a = numpy.ones((256, 256), numpy.float32); a @ a;"
        " print(len(os.listdir('/proc/self/task')))"
    )
    # The environment of the machine would decide.
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"
