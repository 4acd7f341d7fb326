"""Loading of the configuration: the named file, `pagemill.yaml` here, or the embedded default.

A file without models serves the demo model of the embedded default.
"""

import contextlib
import dataclasses
import os
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

import workers
from shared.bus.local_keys import find_keys
from shared.bus.login import Login, TlsFiles, seed_file
from shared.config.parsing import parse_config
from shared.config.schema import Config, ModelConfig, NatsConfig
from shared.errors import ConfigError
from shared.helpers.validation import reason_of
from shared.models.image_folder import is_image_folder, read_image_folder
from shared.protocol.permissions import OPERATOR
from shared.stage.graphs import CODE2WAV, ORPHEUS, ORPHEUS_CODEC, graph_of_folder
from shared.stage.pipelines import ENGINE, check_pipelines
from shared.vision.quantized import find_quantization
from workers import generation_config
from workers.pools import pools_of
from workers.roles import WorkerSpec, check_stage_devices, device_settings, section_of, stage_roles

Settings = TypeVar("Settings", bound=msgspec.Struct)

DEFAULT_FILE = Path("pagemill.yaml")
LOG_NAME = "pagemill.log"
RUNNING_NAME = "running.yaml"
RUNNING_PORT_NAME = "running.port"
NATS_PORT, STORE_DIR = "PAGEMILL_NATS__PORT", "PAGEMILL_NATS__STORE_DIR"
# The value of `log_file` for stderr.
STDERR = "stderr"
OPS = Path(workers.__file__).parents[1] / "ops"
DEMO_MODEL = OPS / "demo_model"
# A user without a password, in a URL or in a list of them.
_PASSWORD_IN_URL = re.compile(r"(^|,|://)[^/,]*:[^/,]*@")
_USER_ALONE = re.compile(r"(://[^:@/,]+)@")
# The client of nats does not decode percent-encoded characters of a URL.
_PASSWORD = re.compile(r"[A-Za-z0-9._~-]+")
EMBEDDED = f"""\
models:
  demo:
    path: {DEMO_MODEL}
    description: >-
      A toy of 2.6 million parameters to try Pagemill with. It answers one question about a simple
      picture or clip. A second question in the same conversation confuses it.
    sampling_defaults: {{temperature: 0.0, max_tokens: 64}}
    stages:
      talker:
        role: engine
        path: {OPS / "demo_voice" / "talker"}
        inputs: {{text: {{from: engine, function: speech, mode: stream}}}}
        output: {{name: codes, kind: codes}}
        sampling_defaults: {{temperature: 0.0, max_tokens: 400}}
        voices: [alloy]
        frames_per_character: 3.4
      code2wav:
        role: generator
        path: {OPS / "demo_voice"}
        inputs: {{codes: {{from: talker, function: follow, mode: stream}}}}
        output: {{name: audio, kind: audio, timed: true}}
        chunks: {{first: [5, 10], size: 25, left: 2, right: 2}}
      dit:
        role: generator
        path: {OPS / "demo_painter"}
        inputs: {{prompt: {{from: request, function: paint}}}}
        output: {{name: image, kind: image}}
        sizes: [120x120, 90x90, 150x120, 120x150]
        sampling_defaults: {{steps: 24, guidance: 1.5}}
gateway: {{tenant: local}}
"""


def find_config_file(config_file: Path | None) -> Path | None:
    """Return the file to read; None stands for the embedded default."""
    if config_file is not None:
        return config_file
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None


def _running_folder() -> Path:
    """Return the default folder of the broker, with notes of the `pagemill up` that runs here."""
    return Path(os.environ.get(STORE_DIR, NatsConfig().store_dir)).absolute()


def find_running_file() -> Path | None:
    """Return the configuration of the `pagemill up` that runs in this folder, or None."""
    link = _running_folder() / RUNNING_NAME
    return link.resolve() if link.exists() else None


def find_running_port() -> int | None:
    """Return the port of the broker of the `pagemill up` that runs in this folder, or None."""
    try:
        return int((_running_folder() / RUNNING_PORT_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def set_running(file: Path | None, port: int | None) -> None:
    """Note the configuration and the port of an embedded broker, also if an earlier `up` was
    killed.

    A broker elsewhere, and a separate folder of its data, leave no note.
    """
    link, number = (_running_folder() / name for name in (RUNNING_NAME, RUNNING_PORT_NAME))
    with contextlib.suppress(OSError):
        for note in (link, number):
            note.unlink(missing_ok=True)
        if link.parent.is_dir() and file is not None:
            link.symlink_to(file.absolute())
        if link.parent.is_dir() and port is not None:
            number.write_text(str(port), encoding="utf-8")


def load_config(file: Path | None) -> Config:
    """Read and check the configuration; environment variables override it.

    Paths in a file are relative to it. Raises ConfigError.
    """
    source = "embedded default" if file is None else str(file)
    config = _parse_file(file)
    check_pipelines(config, stage_roles(), source)
    check_stage_devices(config)
    pools_of(config, source)
    return config


def _parse_file(file: Path | None) -> Config:
    try:
        text = "" if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {reason_of(error)}", field=str(file)) from error
    config = parse_config(text, os.environ, str(file or "embedded default"), EMBEDDED)
    folder = (file or DEFAULT_FILE).parent.absolute()
    models = {
        name: replace(
            _resolve(model, folder, "path"),
            hash_model_id=model.hash_model_id or model.path,
            graph=model.graph or graph_of_folder(folder / model.path),
            sampling_defaults=_sampling_defaults_of(name, model, folder / model.path),
            adapters={adapter: str(folder / path) for adapter, path in model.adapters.items()},
            stages={
                stage: _resolve(changes, folder, "path") for stage, changes in model.stages.items()
            },
        )
        for name, model in config.models.items()
    }
    embeddings = _resolve(config.embeddings, folder, "path")
    gateway = _resolve(config.gateway, folder, "tls_cert", "tls_key")
    nats = _resolve(config.nats, folder, "password_file", "keys", "tls_ca", "tls_cert", "tls_key")
    config = replace(config, models=models, nats=nats, embeddings=embeddings, gateway=gateway)
    return config if config.log_file == STDERR else _resolve(config, folder, "log_file")


def _sampling_defaults_of(name: str, model: ModelConfig, folder: Path) -> dict[str, Any]:
    """Return the sampling defaults of a model, and of its folder if the model asks for them."""
    if not model.generation_config:
        return model.sampling_defaults
    if not (folder / generation_config.FILE).is_file():
        key = f"models.{name}.generation_config"
        raise ConfigError(
            f"{key}: there is no {folder / generation_config.FILE}: write the values as"
            f" models.{name}.sampling_defaults",
            field=key,
        )
    return generation_config.read_sampling_defaults(folder) | model.sampling_defaults


def _resolve(settings: Settings, folder: Path, *names: str) -> Settings:
    """Return the settings with these paths resolved relative to `folder`, unless they are None."""
    paths = {name: path for name in names if (path := getattr(settings, name)) is not None}
    return replace(settings, **{name: str(folder / path) for name, path in paths.items()})


def load_for(worker: WorkerSpec, file: Path | None) -> Config:
    """Read the configuration as `load_config`, with the worker's devices in the role's section.

    `engine` has the settings of the worker's pool.
    """
    return of_stage(of_pool(load_config(file), worker), worker)


def reload_for(worker: WorkerSpec, config_file: Path | None) -> Config:
    """Read the file as `load_for`, also one that was created after the start of the worker.

    Raises ConfigError without a file.
    """
    file = find_config_file(config_file)
    if file is None:
        raise ConfigError(f"there is no {DEFAULT_FILE.absolute()} to read", field="config")
    return load_for(worker, file)


def of_stage(config: Config, worker: WorkerSpec) -> Config:
    """Return the configuration with the devices of the worker's stage in the section of its role.

    Raises ConfigError for a stage of a role without devices.
    """
    if worker.model is None and len(config.models) == 1:
        (model,) = config.models
        worker = dataclasses.replace(worker, model=model)
    if worker.pool is not None or (settings := device_settings(config, worker)) is None:
        return config
    return replace(config, **{section_of(worker.role): settings[1]})


def of_pool(config: Config, worker: WorkerSpec) -> Config:
    """Return the configuration with the settings of the worker's pool as `engine`.

    Raises ConfigError if the worker names no pool of its model, or needs one and names none.
    """
    model = worker.model or (next(iter(config.models)) if len(config.models) == 1 else "")
    is_engine = worker.role == ENGINE and worker.stage in (None, ENGINE)
    pools = config.models[model].pools if is_engine and model in config.models else {}
    if worker.pool is None and not pools:
        return config
    if worker.pool not in pools:
        problem = "the worker needs the name of a pool of its model"
        if worker.pool is not None:
            problem = f"{model!r} has no pool {worker.pool!r} of engines"
        available = ", ".join(pools) or "none"
        raise ConfigError(f"--pool: {problem}; there are: {available}", field="pool")
    return replace(config, engine=pools[worker.pool])


def check_paths(config: Config) -> None:
    """Check that the folders of models and adapters exist and that their weights can be read.

    Raises ConfigError.
    """
    for name, model in config.models.items():
        if is_image_folder(Path(model.path)):
            _check_image_folder(name, Path(model.path))
        elif not (Path(model.path) / "config.json").is_file():
            raise ConfigError(
                f"models.{name}.path: {model.path} is not a Hugging Face model folder"
                " (no config.json or model_index.json)",
                field=f"models.{name}.path",
            )
        if reason := find_quantization(Path(model.path)):
            raise ConfigError(
                f"models.{name}.path: {model.path} {reason}", field=f"models.{name}.path"
            )
        key = f"models.{name}.stages.{CODE2WAV}.path"
        vocoder = model.stages.get(CODE2WAV)
        if model.graph == ORPHEUS and (vocoder is None or vocoder.path is None):
            raise ConfigError(
                f"{key}: Orpheus has its codec in another folder, such as a copy of"
                f" {ORPHEUS_CODEC}: write its path here",
                field=key,
            )
        for adapter, path in model.adapters.items():
            if not (Path(path) / "adapter_config.json").is_file():
                raise ConfigError(
                    f"models.{name}.adapters.{adapter}: {path} is not a folder in peft's format"
                    " (no adapter_config.json)",
                    field=f"models.{name}.adapters.{adapter}",
                )


def _check_image_folder(name: str, folder: Path) -> None:
    try:
        read_image_folder(folder)
    except ConfigError as error:
        message = error.message.removeprefix("models.path: ")
        key = f"models.{name}.path"
        raise ConfigError(f"{key}: {message}", field=key) from error


def find_log_file(config: Config) -> Path | None:
    """Return the file to which `pagemill up` appends the workers' log; None stands for stderr."""
    if config.log_file == STDERR:
        return None
    if config.log_file is not None:
        return Path(config.log_file).absolute()
    return Path(config.nats.store_dir).absolute().parent / LOG_NAME


def keys_folder(config: Config) -> Path:
    """Return the folder of the keys of the embedded server, which `pagemill up` makes."""
    if config.nats.keys is not None:
        return Path(config.nats.keys).absolute()
    return Path(config.nats.store_dir).absolute() / "keys"


def login_of(config: Config, identity: str = OPERATOR, given_url: str | None = None) -> Login:
    """Return the login of an identity at the broker `given_url`, by default the configured one.

    A separate server without keys authenticates its clients by the URL. Raises ConfigError.
    """
    if given_url is not None and _PASSWORD_IN_URL.search(given_url):
        raise ConfigError(
            "--nats: a password in an argument shows in `ps`; set nats.url with"
            " nats.password_file, or nats.keys",
            field="nats.url",
        )
    nats = config.nats
    url = given_url or nats_url(config)
    tls = None
    if nats.tls_ca is not None:
        own = (Path(file) if file else None for file in (nats.tls_cert, nats.tls_key))
        tls = TlsFiles(Path(nats.tls_ca), *own)
    if nats.keys is not None:
        return Login(url, identity, seed_file(Path(nats.keys), identity), tls, nats.domain)
    noted = find_keys(url)
    if noted is None and nats.url is None:
        noted = keys_folder(config)
    file = None if noted is None else seed_file(noted, identity)
    file = file if file is not None and file.exists() else None
    return Login(url, identity, file, tls, nats.domain)


def nats_url(config: Config) -> str:
    """Return the URL of the configured broker, with its password. Raises ConfigError."""
    url, file = config.nats.url, config.nats.password_file
    if url is None:
        return f"nats://127.0.0.1:{config.nats.port}"
    if file is None:
        return url
    try:
        password = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"nats.password_file: {file} cannot be read: {reason_of(error)}",
            field="nats.password_file",
        ) from error
    if not _PASSWORD.fullmatch(password):
        raise ConfigError(
            f"nats.password_file: the password in {file} must have only letters, digits, and"
            " . _ ~ -, and at least one of them",
            field="nats.password_file",
        )
    return _USER_ALONE.sub(rf"\1:{password}@", url)
