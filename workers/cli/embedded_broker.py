"""The embedded broker of a configuration, with its keys."""

from pathlib import Path

from shared.bus.embedded_server import EmbeddedServer
from shared.bus.local_keys import note_keys
from shared.config.schema import Config
from workers.cli.keyring import DEFAULT_TENANT, Keyring
from workers.cli.settings import keys_folder


def start_embedded(config: Config) -> EmbeddedServer:
    """Start the embedded server, which accepts only those who have one of its keys.

    Raises ConfigError or Unavailable.
    """
    keyring = Keyring(keys_folder(config), config.nats.tenant_connections)
    # A tenant of the first start may have been removed since.
    keyring.complete([] if keyring.accounts_file.exists() else [DEFAULT_TENANT])
    broker = EmbeddedServer(
        Path(config.nats.store_dir).absolute(),
        config.nats.port,
        accounts_file=keyring.accounts_file,
    )
    broker.start()
    note_keys(broker.port, keyring.folder)
    return broker
