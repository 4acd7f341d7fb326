"""The URL of the broker, with a password from a file."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shared.bus import bus as bus_module
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer, free_port
from shared.config.schema import Config
from shared.errors import ConfigError, Unavailable
from shared.stage.pipelines import pipelines_of
from shared.stage.reloading import changed_settings
from workers import settings
from workers.roles import WorkerSpec
from workers.supervisor.cluster import LocalCluster

SERVERS = "nats://pagemill@nats-0:4222, nats://pagemill@nats-1:4222,nats://other:own@nats-2"


def load(tmp_path: Path, password: str | None) -> Config:
    file = tmp_path / "pagemill.yaml"
    file.write_text(
        f"models: {{any: {{path: any}}}}\nnats: {{url: '{SERVERS}', password_file: secrets/nats}}"
    )
    if password is not None:
        (tmp_path / "secrets").mkdir()
        (tmp_path / "secrets" / "nats").write_text(password)
    return settings.load_config(file)


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("", set()),
        ("# nothing yet\n", set()),
        ("log_level: debug", {"log_level"}),
        ("gateway: {port: 9000}", {"gateway.port"}),
        ("models: {other: {path: other}}", {"models", "gateway.tenant"}),
    ],
)
def test_any_part_of_a_configuration_is_a_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, changed: set[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    worker, default = WorkerSpec("coordinator"), settings.load_config(None)
    with pytest.raises(ConfigError, match=r"there is no .*/pagemill\.yaml to read"):
        settings.reload_for(worker, None)
    settings.DEFAULT_FILE.write_text(text)  # After the start of a worker.
    assert changed_settings(default, settings.reload_for(worker, None)) == changed


def test_users_without_a_password_get_the_password_of_the_file(tmp_path: Path) -> None:
    assert settings.nats_url(load(tmp_path, "s3cret.~_-\n")) == (
        "nats://pagemill:s3cret.~_-@nats-0:4222, nats://pagemill:s3cret.~_-@nats-1:4222"
        ",nats://other:own@nats-2"
    )


@pytest.mark.parametrize(
    ("password", "reason"),
    [
        (None, "secrets/nats cannot be read: .*No such file"),
        ("", "must have only letters, digits, and . _ ~ -, and at least one of them"),
        ("a@b", "must have only letters"),
        ("\udcff", "cannot be read"),
    ],
)
def test_a_file_without_a_usable_password_is_refused(
    tmp_path: Path, password: str | None, reason: str
) -> None:
    config = load(tmp_path, "" if password == "\udcff" else password)
    if password == "\udcff":
        (tmp_path / "secrets" / "nats").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=rf"nats\.password_file: .*{reason}") as refused:
        settings.nats_url(config)
    assert password is None or not password or password not in refused.value.message


def test_workers_are_not_given_the_password_as_an_argument(tmp_path: Path) -> None:
    config = load(tmp_path, "s3cret")
    workers = [WorkerSpec("coordinator")]
    assert LocalCluster(config, None, workers).processes.url is None
    cluster = LocalCluster(config, None, workers, "nats://127.0.0.1:4222")
    assert cluster.processes.url == cluster.url
    assert cluster.url == "nats://127.0.0.1:4222"


async def test_a_broker_that_does_not_answer_is_named_without_its_password() -> None:
    port = free_port()
    with pytest.raises(Unavailable) as error:
        await Bus.connect(f"nats://pagemill:s3cret@127.0.0.1:{port}", "test", 0.5)
    assert error.value.message == f"no nats-server answers at nats://127.0.0.1:{port}"


async def test_a_lost_broker_is_logged_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    class Log:
        def warning(self, event: str, *, url: str, **_: Any) -> None:
            logged.put_nowait((event, url))

        info = warning

    monkeypatch.setattr(bus_module, "_log", Log())
    server = EmbeddedServer(tmp_path)
    server.start()
    try:
        bus = await Bus.connect(server.url.replace("//", "//anyone:anyone@"), "test")
        await asyncio.to_thread(server.stop)
        assert await logged.get() == ("broker_disconnected", server.url)
        await asyncio.to_thread(server.start)
        assert await logged.get() == ("broker_reconnected", server.url)
        await bus.close()
    finally:
        server.stop()


TALKER = {"talker_config": {"layers": 2}}
QWEN3 = {**TALKER, "code2wav_config": {"layers": 2}}
QWEN25 = {**TALKER, "token2wav_config": {"layers": 2}}
SPEAKS = {"talker", "code2wav"}


@pytest.mark.parametrize(
    ("parts", "graph", "stages"),
    [
        (QWEN3, None, SPEAKS),
        (QWEN25, None, SPEAKS),
        (QWEN25, "none", set()),
        (QWEN25 | {"enable_audio_output": False}, None, set()),
        ({"code2wav_config": {"layers": 2}}, None, set()),
        (TALKER, None, set()),
    ],
)
def test_the_folder_of_an_omni_model_has_its_graph(
    tmp_path: Path, parts: dict[str, Any], graph: str | None, stages: set[str]
) -> None:
    (tmp_path / "omni").mkdir()
    (tmp_path / "omni" / "config.json").write_text(json.dumps(parts))
    file = tmp_path / "pagemill.yaml"
    file.write_text(json.dumps({"models": {"omni": {"path": "omni", "graph": graph}}}))
    pipeline = pipelines_of(settings.load_config(file))["omni"]
    assert {stage.name for stage in pipeline.stages} == {"renderer", "engine"} | stages


def test_a_folder_of_quantized_weights_is_refused_before_a_start(tmp_path: Path) -> None:
    model, file = tmp_path / "model", tmp_path / "pagemill.yaml"
    model.mkdir()
    (model / "config.json").write_text('{"quantization_config": {"quant_method": "quanto"}}')
    file.write_text("models: {any: {path: model}}")
    with pytest.raises(ConfigError, match=r"models\.any\.path: .*quantized"):
        settings.check_paths(settings.load_config(file))
