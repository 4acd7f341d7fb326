"""The command `pagemill requests`."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from shared.protocol.reading import State
from shared.state.request_list import ListedRequest, Listing, RequestLister
from workers.cli.broker import connected
from workers.cli.commands.requests import where
from workers.cli.options import ConfigFile, Json, NatsUrl, find_login
from workers.cli.terminal import call_on_signals, format_age, print_columns, print_json, print_note

FOLLOW_S = 1.0
HEADER = ("age", "state", "tokens", "end", "model", "request")

IsWanted = Callable[[ListedRequest], bool]


async def requests(
    request_id: str | None = None,
    /,
    *,
    state: State | None = None,
    model: str | None = None,
    limit: Annotated[int, Parameter(validator=Number(gte=1))] = 50,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"])] = False,
    json: Json = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """List the latest requests, or print the status of one.

    Parameters
    ----------
    request_id
        Print the status of this request, as `pagemill where` does.
    state
        List only requests in this state.
    model
        List only requests of this model.
    limit
        Maximum number of requests in the list.
    follow
        After the list, print each request that is new or has changed, until Ctrl-C.
    """
    if request_id is not None:
        return await where(request_id, json=json, config=config, nats=nats)

    def is_wanted(row: ListedRequest) -> bool:
        return state in (None, row.state) and model in (None, row.model)

    async with connected(find_login(config, nats), "requests") as bus:
        lister = RequestLister(bus)
        listing = await lister.update()
        rows = [row for row in listing.requests if is_wanted(row)]
        newest = rows[:limit]
        # The newest request is printed last, because new ones follow it.
        table = [HEADER, *map(_cells, reversed(newest))]
        if json:
            for row in reversed(newest):
                print_json(row)
        elif newest:
            print_columns(table)
        if note := _note(listing, len(rows), limit):
            print_note(note)
        if follow:
            following = asyncio.create_task(
                _follow(lister, listing, is_wanted, None if json else table)
            )
            call_on_signals(following.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await following
    return 0


async def _follow(
    lister: RequestLister,
    listing: Listing,
    is_wanted: IsWanted,
    table: Sequence[Sequence[str]] | None,
) -> None:
    """Print requests whenever their state, stage or end has changed.

    They have the columns of `table`, or are JSON.
    """
    before = {row.request_id: _what_changes(row) for row in listing.requests}
    while True:
        await asyncio.sleep(FOLLOW_S)
        now = (await lister.update()).requests
        for row in reversed(now):
            if before.get(row.request_id) != _what_changes(row) and is_wanted(row):
                print_columns([_cells(row)], table) if table else print_json(row)
        before = {row.request_id: _what_changes(row) for row in now}


def _what_changes(row: ListedRequest) -> tuple[object, ...]:
    return row.state, row.stage, row.end


def _cells(row: ListedRequest) -> tuple[str, ...]:
    age = "-" if row.age_s is None else format_age(row.age_s)
    tokens = f"{_or_dash(row.prompt_tokens)}+{_or_dash(row.completion_tokens)}"
    state = row.state if row.stage is None else f"{row.state} {row.stage}"
    return age, state, tokens, _or_dash(row.end), _or_dash(row.model), row.request_id


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _note(listing: Listing, num_rows: int, limit: int) -> str:
    """Return a note about requests that are missing in the list."""
    notes = [f"{num_rows - limit} more match: --limit shows them"] if num_rows > limit else []
    if listing.is_cut:
        notes.append("older requests were not searched: `pagemill where ID` finds them")
    if not num_rows:
        notes.insert(0, "no requests")
    return "; ".join(notes)
