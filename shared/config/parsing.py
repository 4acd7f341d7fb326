"""Parsing of `pagemill.yaml`. Every field can be overridden from the environment.

`PAGEMILL_ENGINE__BLOCK_SIZE=32` sets `engine.block_size`; a double underscore separates levels.
This module reads neither files nor the environment: the caller passes the text and the mapping.
"""

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_network
from typing import Any, TypeVar

import msgspec
import yaml

from shared.config.gpu_memory import DEFAULT, fault_of_memory
from shared.config.schema import (
    Config,
    EngineConfig,
    EnginePool,
    ModelConfig,
    StageConfig,
    device_sections,
)
from shared.errors import ConfigError
from shared.helpers.validation import complaint_of, reason_of, suggest
from shared.net.ip_policy import is_loopback_host
from shared.protocol.names import MODEL_NAME_RULE, NAME_RULE, is_model_name, is_name
from shared.protocol.pipeline import Fault
from shared.protocol.sampling import SamplingParams

ENV_PREFIX = "PAGEMILL_"

T = TypeVar("T")


def parse_config(text: str, env: Mapping[str, str], source: str, defaults: str = "") -> Config:
    """Decode `text` (YAML) with overrides from `env`.

    A text without models gets the models and the other settings of `defaults`. Raises ConfigError,
    with `source` or the variable, the key and the expected type.
    """
    tree = _parse_tree(text, source)
    if "models" not in tree:
        _add_defaults(tree, _parse_tree(defaults, "defaults"))
    overrides = _Overrides(env)
    overrides.apply(tree)
    engine = tree.get("engine", {})
    _convert(engine, EngineConfig, "engine", overrides, source)
    # Models and stages are first converted separately: msgspec's path omits keys of mappings.
    for name, model in _entries(tree, "models"):
        for pool, changes in _entries(model, "pools"):
            if isinstance(changes, dict):
                model["pools"][pool] = changes = {**engine, **changes}
            _convert(changes, EnginePool, f"models.{name}.pools.{pool}", overrides, source)
        for stage, changes in _entries(model, "stages"):
            _convert(changes, StageConfig, f"models.{name}.stages.{stage}", overrides, source)
        _convert(model, ModelConfig, f"models.{name}", overrides, source)
    config = _convert(tree, Config, "", overrides, source)
    for name, model in config.models.items():
        defaults_key = f"models.{name}.sampling_defaults"
        _convert(model.sampling_defaults, SamplingParams, defaults_key, overrides, source)
    checks = (
        _faults_of_models,
        _faults_of_sections,
        _faults_of_broker,
        _faults_of_devices,
        _faults_of_stage_devices,
        _faults_of_tenants,
        _faults_of_gateway,
    )
    for check in checks:
        for fault in check(config):
            origin = overrides.variables.get(fault.key, source)
            raise ConfigError(f"{origin}: {fault.key}: {fault.message}", field=fault.key)
    return config


def _parse_tree(text: str, source: str) -> dict[str, Any]:
    """Return the settings in a text, which may have none. Raises ConfigError."""
    try:
        tree = yaml.safe_load(text) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: {_reason_of(error)}", field=source) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected a mapping at the top level", field=source)
    for key, node in _repeated_keys(yaml.compose(text, yaml.SafeLoader)):
        line = node.start_mark.line + 1
        raise ConfigError(f"{source}: line {line}: {key}: the key is there twice", field=key)
    return tree


def _repeated_keys(root: yaml.Node | None) -> Iterator[tuple[str, yaml.Node]]:
    """Yield the path and the node of each key that comes before in the same mapping.

    PyYAML keeps the value of the last of equal keys, and drops the others silently.
    """
    waiting, ids = [("", root)], {id(root)}
    while waiting:
        path, node = waiting.pop()
        inner: list[tuple[str, yaml.Node]] = []
        if isinstance(node, yaml.MappingNode):
            names = [f"{path}.{key.value}".strip(".") for key, _ in node.value]
            for number, (key, _) in enumerate(node.value):
                if names[number] in names[:number]:
                    yield names[number], key
            inner = [(name, value) for name, (_, value) in zip(names, node.value, strict=True)]
        elif isinstance(node, yaml.SequenceNode):
            inner = [(f"{path}[{number}]", item) for number, item in enumerate(node.value)]
        # An alias may lead back to a node around it.
        waiting += [entry for entry in inner if id(entry[1]) not in ids]
        ids.update(id(value) for _, value in inner)


def _reason_of(error: Exception) -> str:
    if isinstance(error, yaml.YAMLError):
        return reason_of(error)
    return "it has a date or a number that does not exist"  # such as 2026-02-30


def _add_defaults(tree: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Add sections of `defaults`, and their settings that a section of `tree` lacks."""
    for key, section in defaults.items():
        own = tree.setdefault(key, {})
        if isinstance(own, dict):
            tree[key] = section | own


def _entries(tree: Any, key: str) -> Iterable[tuple[Any, Any]]:
    """Return the entries of the mapping under `key` in `tree`, if there is one."""
    section = tree.get(key) if isinstance(tree, dict) else None
    return section.items() if isinstance(section, dict) else ()


def _convert(tree: Any, kind: type[T], prefix: str, overrides: "_Overrides", source: str) -> T:
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        complaint = complaint_of(error, kind, prefix)
        key = complaint.path
        # A misspelt variable adds a field that does not exist, or a section without its fields.
        added = key.rpartition(".")[0] if complaint.kind == "missing" else key
        origin = overrides.variables.get(added, source)
        message = f"{origin}: {complaint.sentence('the file')}"
        if complaint.kind in ("unknown", "missing") and overrides.has_added(added):
            # The name of a variable is suggested instead of a field.
            sentence = complaint_of(error, root=prefix).sentence()
            message = f"{origin}: {sentence}{overrides.suggestion(origin)}"
        raise ConfigError(message, field=key) from error


class _Overrides:
    """Settings from environment variables."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._values = {n: value for n, value in sorted(env.items()) if n.startswith(ENV_PREFIX)}
        self._models: list[str] = []
        self._added: set[str] = set()
        self.variables: dict[str, str] = {}
        """Variables that have set a key or added a section, by key."""

    def apply(self, tree: dict[str, Any]) -> None:
        """Write the settings into `tree`. Raises ConfigError."""
        self._models = list(models) if isinstance(models := tree.get("models"), dict) else []
        for name, value in self._values.items():
            keys = name.removeprefix(ENV_PREFIX).lower().split("__")
            node = tree
            for depth, key in enumerate(keys[:-1], 1):
                self._note(node, ".".join(keys[:depth]), name)
                child = node.setdefault(key, {})
                if not isinstance(child, dict):
                    raise ConfigError(f"{name}: {key} is not a section", field=key)
                node = child
            self._note(node, ".".join(keys), name)
            try:
                node[keys[-1]] = yaml.safe_load(value)
            except (yaml.YAMLError, ValueError) as error:
                raise ConfigError(f"{name}: not a valid value: {value!r}", field=name) from error
            self.variables[".".join(keys)] = name

    def _note(self, node: dict[str, Any], path: str, name: str) -> None:
        if path.rpartition(".")[2] not in node:
            self._added.add(path)
            self.variables[path] = name

    def has_added(self, key: str) -> bool:
        """Return whether a variable has added `key`, which the file does not have."""
        return key in self._added

    def suggestion(self, variable: str) -> str:
        """Return the end of an error, with the variable that may have been meant."""
        names = [*_variables(Config, ENV_PREFIX)]
        for model in self._models:
            names += _variables(ModelConfig, f"{ENV_PREFIX}MODELS__{model.upper()}__")
        return suggest(variable, (name for name in names if name != variable), 0.8)


def _variables(section: type[msgspec.Struct], prefix: str) -> Iterator[str]:
    for field in msgspec.structs.fields(section):
        name = prefix + field.encode_name.upper()
        yield name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _variables(field.type, f"{name}__")


def _faults_of_models(config: Config) -> Iterator[Fault]:
    for name, model in config.models.items():
        if not is_model_name(name):
            yield Fault("models", f"the name {name!r} {MODEL_NAME_RULE}")
        for adapter in model.adapters:
            if not is_model_name(adapter):
                yield Fault(f"models.{name}.adapters", f"the name {adapter!r} {MODEL_NAME_RULE}")
        if model.quantization is not None:
            yield from _faults_of_int8(config, name, model)


def _faults_of_int8(config: Config, name: str, model: ModelConfig) -> Iterator[Fault]:
    key = f"models.{name}.quantization"
    if model.dtype not in ("auto", "float32", "bfloat16"):
        yield Fault(key, f"int8 needs dtype bfloat16 or float32, not {model.dtype}")
    if model.adapters:
        yield Fault(key, "int8 and LoRA adapters exclude each other")
    devices = {f"models.{name}.pools.{pool}": each.device for pool, each in model.pools.items()}
    for place, device in (devices or {"engine": config.engine.device}).items():
        if device == "cuda":
            message = f"int8 does not run on a GPU: remove it, or set {place}.device to cpu"
            yield Fault(key, message)


def _faults_of_sections(config: Config) -> Iterator[Fault]:
    if config.embeddings.storage == "directory" and config.embeddings.path is None:
        yield Fault("embeddings.path", "storage 'directory' needs a path")
    for section, settings, name, limit_name in (
        ("engine.speculative", config.engine.speculative, "min_ngram", "max_ngram"),
        # A token log must outlive its request, because it contains the only record of the end.
        ("delivery", config.delivery, "default_timeout_s", "max_timeout_s"),
        ("delivery", config.delivery, "max_timeout_s", "token_log_age_s"),
    ):
        value, limit = getattr(settings, name), getattr(settings, limit_name)
        if value > limit:
            yield Fault(f"{section}.{name}", f"{value:g} is more than {limit_name}, {limit:g}")
    networks = {
        "renderer.media_networks": config.renderer.media_networks,
        "agent.mcp_networks": config.agent.mcp_networks,
    }
    for key, texts in networks.items():
        for network in texts:
            try:
                ip_network(network)
            except ValueError as error:
                yield Fault(key, str(error))


def _faults_of_broker(config: Config) -> Iterator[Fault]:
    nats = config.nats
    for name, noun in (("password_file", "passwords"), ("domain", "domain")):
        if getattr(nats, name) is not None and nats.url is None:
            yield Fault(
                f"nats.{name}",
                f"nats.url is missing, and the embedded server has no {noun}: remove the setting,"
                " or set nats.url",
            )
    if (nats.tls_cert is None) != (nats.tls_key is None):
        yield Fault("nats.tls_key", "set both tls_cert and tls_key, or neither")
    if nats.tls_cert is not None and nats.tls_ca is None:
        yield Fault("nats.tls_ca", "tls_cert needs tls_ca, which verifies the server's certificate")


def _faults_of_devices(config: Config) -> Iterator[Fault]:
    for key, settings in device_sections(config):
        name, _, index = settings.device.partition(":")
        if name == "cuda" and index:
            yield Fault(
                f"{key}.device",
                f"a process uses the one GPU that it sees: write cuda instead of {settings.device},"
                f" and devices: [{index}]",
            )
        elif settings.device not in ("cpu", "cuda"):
            yield Fault(f"{key}.device", f"{settings.device!r} is not cpu or cuda")
        if (fault := fault_of_memory(settings.gpu_memory)) is not None:
            yield Fault(f"{key}.gpu_memory", fault)
        if settings.devices and settings.device != "cuda":
            yield Fault(f"{key}.devices", f"devices are GPUs: set {key}.device to cuda")
        if len(set(map(str, settings.devices))) < len(settings.devices):
            yield Fault(f"{key}.devices", "a device is listed twice: raise replicas instead")


def _faults_of_stage_devices(config: Config) -> Iterator[Fault]:
    for name, model in config.models.items():
        for stage, changes in model.stages.items():
            key = f"models.{name}.stages.{stage}"
            if changes.device is None and (changes.devices or changes.gpu_memory != DEFAULT):
                setting = "devices" if changes.devices else "gpu_memory"
                yield Fault(f"{key}.{setting}", f"it belongs to a device: set {key}.device too")
            if changes.device is not None and stage == "engine":
                message = "an engine's device is in the section engine, or in pools of the model"
                yield Fault(f"{key}.device", message)


def _faults_of_tenants(config: Config) -> Iterator[Fault]:
    for name in config.delivery.tokens_per_minute:
        if not is_name(name):
            yield Fault("delivery.tokens_per_minute", f"{name!r} {NAME_RULE}")


def _faults_of_gateway(config: Config) -> Iterator[Fault]:
    gateway = config.gateway
    if not (gateway.api_keys or gateway.allow_anonymous or is_loopback_host(gateway.listen)):
        yield Fault(
            "gateway.api_keys",
            f"no keys are configured, and {gateway.listen} is reachable from other machines:"
            " create a key with `pagemill key`, or set gateway.allow_anonymous",
        )
    if (gateway.tls_cert is None) != (gateway.tls_key is None):
        yield Fault("gateway.tls_key", "set both tls_cert and tls_key, or neither")
    if len({key.sha256 for key in gateway.api_keys}) < len(gateway.api_keys):
        yield Fault("gateway.api_keys", "a key is listed twice")
    for number, key in enumerate(gateway.api_keys):
        for field, name in (("name", key.name), ("tenant", key.tenant)):
            if name is not None and not is_name(name):
                yield Fault(f"gateway.api_keys[{number}].{field}", f"{name!r} {NAME_RULE}")
