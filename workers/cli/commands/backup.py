"""The commands `pagemill backup` and `pagemill restore`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from rich.filesize import decimal

from shared.bus.bus import Bus
from shared.bus.embedded_server import is_listening
from shared.bus.local_keys import forget_keys
from shared.config.schema import Config
from workers import settings
from workers.cli.audited import audited
from workers.cli.backup import restoring
from workers.cli.backup.archive import new_archive, read_archive
from workers.cli.backup.manifest import Manifest
from workers.cli.backup.taking import take_backup
from workers.cli.broker import connected
from workers.cli.models.pull_display import PullDisplay
from workers.cli.options import ConfigFile, Json, NatsUrl, find_login, load
from workers.cli.terminal import errors, format_time, print_json, print_line, print_note
from workers.supervisor.broker import start_embedded


async def backup(
    path: Path, /, *, json: Json = False, config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """Copy all requests, answers, responses, media and dead letters of a running cluster.

    Parameters
    ----------
    path
        New folder, or new file that ends in `.zip`. It will contain prompts and answers.
    """
    with _StreamDisplay() as display, new_archive(path) as archive:
        async with (
            connected(find_login(config, nats), "backup") as bus,
            audited(bus, "backup", str(path)),
        ):
            manifest = await take_backup(bus, archive, display.show)
    print_json(manifest) if json else _print_parts(manifest)
    return 0


async def restore(
    path: Path,
    /,
    *,
    replace: bool = False,
    json: Json = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Restore a backup while no worker runs; start the workers afterwards.

    The broker is the configured one. The embedded broker is started for this, and stopped again.

    Parameters
    ----------
    path
        Folder or file that `pagemill backup` has written.
    replace
        Remove the streams of Pagemill that the broker has, with all of their messages.
    """
    loaded = load(config)
    with read_archive(path) as archive:
        manifest = restoring.check_archive(archive)
        async with _broker(loaded, nats) as bus:
            existing = await restoring.check_target(bus, replace=replace)
            with _StreamDisplay() as display:
                async with audited(bus, "restore", str(path)):
                    mended = await restoring.restore(
                        bus, archive, manifest, existing, loaded.nats.replicas, display.show
                    )
    print_json(manifest) if json else _print_parts(manifest)
    if mended.removed_logs:
        print_note(
            f"removed {mended.removed_logs} unfinished logs of requests that were accepted while"
            " the backup was taken"
        )
    if mended.requeued_responses:
        print_note(f"queued {mended.requeued_responses} responses again")
    if mended.requeued_batches:
        print_note(f"queued {mended.requeued_batches} batches again")
    return 0


@contextlib.asynccontextmanager
async def _broker(config: Config, url: str | None) -> AsyncIterator[Bus]:
    """Connect to the broker, and start the embedded one if it does not run."""
    is_ours = url is None and config.nats.url is None
    own = None
    if is_ours and not is_listening(config.nats.port):
        own = await asyncio.to_thread(start_embedded, config)
        url = own.url
    try:
        async with connected(settings.login_of(config, given_url=url), "restore") as bus:
            yield bus
    finally:
        if own is not None:
            await asyncio.to_thread(own.stop)
            forget_keys(own.port)


class _StreamDisplay(PullDisplay):
    """Progress of streams, one after the other."""

    def __init__(self) -> None:
        super().__init__(errors, live=errors.is_terminal, waiting="connecting to the broker …")
        self._shown = ("", 0)

    def show(self, stream: str, done: int, size: int) -> None:
        name, before = self._shown
        if name != stream:
            self.begin(stream, size, 0)
            before = 0
        self.advance(done - before)
        self._shown = stream, done


def _print_parts(manifest: Manifest) -> None:
    began = format_time(1000 * manifest.began_s)
    print_line(f"backup of {began}, Pagemill {manifest.version}, nats-server {manifest.server}")
    for part in manifest.parts:
        print_line(f"{part.stream:<12} {part.messages:>9} messages {decimal(part.bytes):>10}")
