"""Commands for keys on the bus: `pagemill keys`."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from shared.bus import request_queue
from shared.errors import PagemillError
from shared.protocol.audit import Action
from workers import settings
from workers.cli.audited import audited_if_possible
from workers.cli.broker import connected
from workers.cli.key_secrets import SecretApi, write_secrets
from workers.cli.options import ConfigFile, Json, find_login, load
from workers.cli.terminal import errors, print_json, print_line, print_wrapped
from workers.keyring import Keyring

# nats-server 2.15.1 connects the subjects of an account that is new only when it reloads once more.
RELOAD_S = 1.0

keys = App(name="keys", help="Create and replace the keys of clients and workers for the broker.")

Folder = Annotated[
    Path | None,
    Parameter(name="--dir", help="Folder of the keys; by default the configured one."),
]


@keys.command(name="make")
async def make_keys(
    *, directory: Folder = None, json: Json = False, config: ConfigFile = None
) -> int:
    """Create missing keys of roles and of the operator, and write the server's accounts.conf.

    accounts.conf permits the subjects that the roles of this version need: run this command again
    after an upgrade.
    """
    async with _changing("keys.make", "", directory, config) as keyring:
        _print_files([keyring.folder / f"{name}.nk" for name in keyring.complete()], json)
    return 0


@keys.command(name="add-tenant")
async def add_tenant(
    name: str, /, *, directory: Folder = None, json: Json = False, config: ConfigFile = None
) -> int:
    """Create a key for the clients of a tenant, and print its file.

    With this key, clients can send requests, cancel them and read their answers, as this tenant
    only.

    Parameters
    ----------
    name
        Name of the tenant.
    """
    async with _changing("keys.add-tenant", name, directory, config) as keyring:
        _print_files([keyring.add_tenant(name)], json)
    return 0


@keys.command(name="remove-tenant")
async def remove_tenant(
    name: str, /, *, directory: Folder = None, config: ConfigFile = None
) -> int:
    """Remove the key of a tenant. The server then disconnects the tenant's clients.

    The queues of the tenant are removed when they are empty, here or by `pagemill migrate`.

    Parameters
    ----------
    name
        Name of the tenant.
    """
    async with _changing("keys.remove-tenant", name, directory, config) as keyring:
        keyring.remove_tenant(name)
    with contextlib.suppress(PagemillError):  # Without a broker, nothing more is removed.
        async with connected(find_login(config, None), "keys") as bus:
            await request_queue.remove_unused(bus)
    return 0


@keys.command(name="rotate")
async def rotate(
    *names: str, directory: Folder = None, json: Json = False, config: ConfigFile = None
) -> int:
    """Replace the keys of roles and tenants.

    The server disconnects workers with an old key. They read the new key and connect again.

    Parameters
    ----------
    names
        Names of keys: a role such as `engine`, or a tenant such as `tenants/acme`; by default all.
    """
    async with _changing("keys.rotate", " ".join(names), directory, config) as keyring:
        _print_files(keyring.rotate(names), json)
    return 0


@keys.command(name="secrets")
async def make_secrets(*, tenant: list[str] | None = None, config: ConfigFile = None) -> int:
    """Create missing keys in Secrets of Kubernetes, in a pod: the chart's job does so.

    Parameters
    ----------
    tenant
        A tenant that has a key; repeat the option for several. Other tenants lose their keys.
    """
    api = SecretApi.in_cluster()
    try:
        for name in await write_secrets(api, tenant or (), load(config).nats):
            print_line(f"{name}.nk")
    finally:
        await api.close()
    return 0


@keys.command(name="list")
def list_keys(*, directory: Folder = None, json: Json = False, config: ConfigFile = None) -> int:
    """List the files of the keys. No key is shown."""
    _print_files(_open(directory, config).files(), json)
    return 0


def _print_files(files: Iterable[Path], as_json: bool) -> None:
    for file in files:
        print_json({"file": str(file)}) if as_json else print_line(str(file))


def _open(directory: Path | None, config: Path | None) -> Keyring:
    loaded = load(config)
    folder = directory or settings.keys_folder(loaded)
    return Keyring(folder, loaded.nats)


@contextlib.asynccontextmanager
async def _changing(
    action: Action, target: str, directory: Path | None, config: Path | None
) -> AsyncIterator[Keyring]:
    """Yield the keys to change, and have the server accept them."""
    keyring = _open(directory, config)
    async with audited_if_possible(find_login(config, None), action, target):
        yield keyring
        await asyncio.to_thread(_reload, keyring, config)


def _reload(keyring: Keyring, config: Path | None) -> None:
    """Make the embedded server accept the new keys, or print a reminder for another server."""
    loaded = load(config)
    if keyring.folder.resolve() == settings.keys_folder(loaded).resolve():
        try:
            pid = int((Path(loaded.nats.store_dir) / "nats-server.pid").read_text())
            if b"nats-server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGHUP)
                time.sleep(RELOAD_S)
                os.kill(pid, signal.SIGHUP)
                return
        except (OSError, ValueError):
            pass
    print_wrapped(
        errors,
        f"{keyring.accounts_file} is written; a running server reads it at"
        " `nats-server --signal reload`; after add-tenant, reload twice",
    )
