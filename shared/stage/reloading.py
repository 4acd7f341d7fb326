"""Reload of the configuration: some settings change in a running worker, others at a restart."""

from collections.abc import Callable
from typing import Any

import msgspec

from shared.config.schema import Config
from shared.errors import ConfigError
from shared.telemetry import logs

RELOADED = frozenset({"log_level", "gateway.api_keys"})
"""Settings that change in a running worker."""


class Reloader:
    """Reader of the configuration of a running worker."""

    def __init__(self, config: Config, read: Callable[[], Config] | None, log: logs.Logger) -> None:
        """`read` returns the current configuration, or raises ConfigError."""
        self._config = config
        self._read = read
        self._log = log
        self.takers: list[Callable[[Config], None]] = []
        """Functions that are called with the new configuration."""

    def reload(self) -> None:
        """Apply the settings in `RELOADED`. A configuration with an error changes nothing."""
        if self._read is None:
            self._log.warning("not_reloaded", reason="this worker has no configuration file")
            return
        try:
            config = self._read()
        except ConfigError as error:
            self._log.error("not_reloaded", field=error.field, reason=error.message)
            return
        changed = changed_settings(self._config, config)
        logs.set_level(config.log_level)
        for take in self.takers:
            take(config)
        waiting = sorted(changed - RELOADED)
        self._log.info("reloaded", changed=sorted(changed & RELOADED), needs_restart=waiting)
        # The other settings keep their old values here, so that the next reload reports them again.
        gateway = msgspec.structs.replace(self._config.gateway, api_keys=config.gateway.api_keys)
        self._config = msgspec.structs.replace(
            self._config, log_level=config.log_level, gateway=gateway
        )


def changed_settings(old: Config, new: Config) -> set[str]:
    """Return the keys of settings that differ, such as `log_level` or `gateway.api_keys`."""
    before, after = _settings(old), _settings(new)
    return {key for key, value in before.items() if after[key] != value}


def _settings(config: Config) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, msgspec.Struct):
            settings |= {f"{name}.{key}": getattr(value, key) for key in value.__struct_fields__}
        else:
            settings[name] = value
    return settings
