"""Parsing of `pagemill.yaml`. Every field can be overridden from the environment.

`PAGEMILL_ENGINE__BLOCK_SIZE=32` sets `engine.block_size`; a double underscore separates levels.
This module reads neither files nor the environment: the caller passes the text and the mapping.
"""

from collections.abc import Iterator, Mapping
from ipaddress import ip_address, ip_network
from typing import Any, TypeVar

import msgspec
import yaml

from shared.config import Config, ModelConfig
from shared.errors import ConfigError
from shared.protocol.pipeline import Fault
from shared.protocol.sampling import SamplingParams
from shared.protocol.subjects import NAME_RULE, is_name
from shared.validation import split_validation_error

ENV_PREFIX = "PAGEMILL_"

T = TypeVar("T")


def parse_config(text: str, env: Mapping[str, str], source: str) -> Config:
    """Decode `text` (YAML) with overrides from `env`.

    Raises ConfigError, which names `source` or the variable, the key and the expected type.
    """
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}", field=source) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected a mapping at the top level", field=source)
    key_to_variable = _apply_env(tree, env)
    # Each model is converted on its own first, because msgspec's path omits the keys of a mapping.
    models = tree.get("models")
    if isinstance(models, dict):
        for name, model in models.items():
            _convert(model, ModelConfig, f"models.{name}", key_to_variable, source)
    config = _convert(tree, Config, "", key_to_variable, source)
    for name, model in config.models.items():
        defaults_key = f"models.{name}.sampling_defaults"
        _convert(model.sampling_defaults, SamplingParams, defaults_key, {}, source)
    for check in (_faults_of_models, _faults_of_sections, _faults_of_gateway):
        for fault in check(config):
            raise ConfigError(f"{source}: {fault.key}: {fault.message}", field=fault.key)
    return config


def _convert(
    tree: Any, kind: type[T], prefix: str, key_to_variable: Mapping[str, str], source: str
) -> T:
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        reason, path = split_validation_error(error)
        key = f"{prefix}.{path}".strip(".")
        origin = key_to_variable.get(key, source)
        raise ConfigError(f"{origin}: {key or 'top level'}: {reason}", field=key) from error


def _apply_env(tree: dict[str, Any], env: Mapping[str, str]) -> dict[str, str]:
    """Write overrides into `tree`. Return the variable that set each key."""
    key_to_variable = {}
    for name, value in sorted(env.items()):
        if not name.startswith(ENV_PREFIX):
            continue
        keys = name.removeprefix(ENV_PREFIX).lower().split("__")
        node = tree
        for key in keys[:-1]:
            child = node.setdefault(key, {})
            if not isinstance(child, dict):
                raise ConfigError(f"{name}: {key} is not a section", field=key)
            node = child
        try:
            node[keys[-1]] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{name}: not a valid value: {value!r}", field=name) from error
        key_to_variable[".".join(keys)] = name
    return key_to_variable


def _faults_of_models(config: Config) -> Iterator[Fault]:
    for name, model in config.models.items():
        if not is_name(name):
            yield Fault("models", f"{name!r} {NAME_RULE}, because it is part of a subject")
        for adapter in model.adapters:
            if not is_name(adapter):
                yield Fault(f"models.{name}.adapters", f"{adapter!r} {NAME_RULE}")


def _faults_of_sections(config: Config) -> Iterator[Fault]:
    if config.embeddings.storage == "directory" and config.embeddings.path is None:
        yield Fault("embeddings.path", "storage 'directory' needs a path")
    for section, settings, name, limit_name in (
        ("engine.speculative", config.engine.speculative, "min_ngram", "max_ngram"),
        # A token log outlives its request, because only the log records the end.
        ("delivery", config.delivery, "default_timeout_s", "max_timeout_s"),
        ("delivery", config.delivery, "max_timeout_s", "token_log_age_s"),
    ):
        value, limit = getattr(settings, name), getattr(settings, limit_name)
        if value > limit:
            yield Fault(f"{section}.{name}", f"{value:g} is more than {limit_name}, {limit:g}")
    for network in config.renderer.media_networks:
        try:
            ip_network(network)
        except ValueError as error:
            yield Fault("renderer.media_networks", str(error))


def _faults_of_gateway(config: Config) -> Iterator[Fault]:
    gateway = config.gateway
    if not (gateway.api_keys or gateway.allow_anonymous or _is_loopback(gateway.listen)):
        yield Fault(
            "gateway.api_keys",
            f"no keys are configured, and {gateway.listen} is reachable from other machines:"
            " create a key with `pagemill key`, or set gateway.allow_anonymous",
        )
    if (gateway.tls_cert is None) != (gateway.tls_key is None):
        yield Fault("gateway.tls_key", "set both tls_cert and tls_key, or neither")
    if len({key.sha256 for key in gateway.api_keys}) < len(gateway.api_keys):
        yield Fault("gateway.api_keys", "a key is listed twice")
    for key in gateway.api_keys:
        for name in (key.name, key.name if key.tenant is None else key.tenant):
            if not is_name(name):
                yield Fault("gateway.api_keys", f"{name!r} {NAME_RULE}")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
