"""The command `pagemill migrate`: the only one that changes streams."""

import sys
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from shared.bus import request_queue
from shared.bus.stream_changes import StreamChange
from shared.errors import ConfigError
from workers import settings
from workers.cli.audited import audited
from workers.cli.broker import connected
from workers.cli.options import ConfigFile, NatsUrl, load
from workers.cli.terminal import harmless, out, print_json, print_line


async def migrate(
    *,
    yes: bool = False,
    shrink: bool = False,
    json: bool = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Show the differences between the broker's streams and the configuration, and apply them.

    Workers create missing streams, but never change existing ones. The exit code is 1 if any
    difference remains. Empty queues of tenants without a key are removed.

    Parameters
    ----------
    yes
        Apply the changes without a question.
    shrink
        Also set limits below the size of the stored messages: messages are deleted, or new ones
        refused.
    json
        Print one JSON object for each difference, and change nothing.
    """
    loaded = load(config)
    async with connected(settings.login_of(loaded, given_url=nats), "migrate") as bus:
        bus.streams.configure(loaded.nats, loaded.delivery, loaded.agent, loaded.batch)
        changes = await bus.streams.find_changes(bus.now_ms())
        if json:
            for change in changes:
                print_json(_row(change))
            return 0
        for stream in await request_queue.remove_unused(bus):
            print_line(f"removed: {stream}, which was empty; its tenant has no key")
        if not changes:
            print_line("all streams are as configured")
            return 0
        _show(changes)
        possible = [change for change in changes if not change.difference.is_fixed]
        refused = [change for change in possible if change.shrinks and not shrink]
        if refused:
            names = ", ".join(f"{c.difference.stream} {c.difference.setting}" for c in refused)
            raise ConfigError(
                f"limits are below the size of the stored messages: {names}; nothing was changed:"
                " --shrink sets them, with the listed effects",
                field="shrink",
            )
        if not possible:
            print_line("the broker cannot change any of these")
            return 1
        if not (yes or _confirm(len(possible))):
            print_line("nothing was changed")
            return 1
        names = ", ".join(f"{c.difference.stream} {c.difference.setting}".strip() for c in possible)
        async with audited(bus, "migrate", names):
            await bus.streams.change(possible)
        print_line(f"changed: {len(possible)}")
    return 0


def _row(change: StreamChange) -> dict[str, str]:
    difference = change.difference
    return {
        "stream": difference.stream,
        "setting": difference.setting,
        "is": difference.current_words,
        "will_be": difference.target_words,
        "effect": change.effect,
    }


def _show(changes: Sequence[StreamChange]) -> None:
    table = Table("stream", "setting", "is", "will be", "effect", box=None)
    for change in changes:
        table.add_row(*(escape(harmless(text)) for text in _row(change).values()))
    out.print(table)


def _confirm(number: int) -> bool:
    """Ask for confirmation. Raises ConfigError without a terminal."""
    if not sys.stdin.isatty():
        raise ConfigError("without a terminal, --yes is needed to apply changes", field="yes")
    return input(f"make these {number} changes? [y/N] ").strip().lower() in ("y", "yes")
