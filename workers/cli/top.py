"""Implementation of `pagemill top`: the state of a cluster in a terminal, once a second."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import zip_longest

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from shared.bus.bus import Bus
from shared.bus.login import Login
from shared.errors import Unavailable
from shared.telemetry import cluster_snapshot, logs
from shared.telemetry.deltas import ClusterSnapshot
from workers.cli.broker import connect
from workers.cli.terminal import call_on_signals, print_json
from workers.cli.top_frame import Frame, Throughput, frame
from workers.cli.top_keys import Selection, keys_read

# Columns of the output to a file or a pipe.
WIDTH = 120
# A broker that hangs is reported after this time.
SNAPSHOT_TIMEOUT_S = 5.0

Show = Callable[[Frame | Unavailable], None]


async def watch(login: Login, interval_s: float, *, once: bool, as_json: bool) -> int:
    """Show frames until Ctrl-C, or one frame. Raises Unavailable without a first frame."""
    # Log lines of the connection would overwrite the frame, which shows the same errors.
    logs.configure_logging("error", role="top")
    viewer = Viewer(login)
    try:
        if once:
            await viewer.next_frame()
            # A rate needs two snapshots.
            await asyncio.sleep(interval_s)
            _printer(as_json)(await viewer.next_frame())
        else:
            await _until_interrupted(viewer, interval_s, as_json)
    finally:
        await viewer.close()
    return 0


class Viewer:
    """Source of frames: takes snapshots over one connection, and compares consecutive ones."""

    def __init__(self, login: Login) -> None:
        self._login = login
        self._bus: Bus | None = None
        self._last: ClusterSnapshot | None = None

    async def next_frame(self) -> Frame:
        """Return the next frame. Raises Unavailable without a broker that answers."""
        if self._bus is None:
            self._bus = await connect(self._login, "top")
        try:
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                now = await cluster_snapshot.take_snapshot(self._bus)
        except TimeoutError:
            raise Unavailable(f"the broker at {self._login} does not answer") from None
        before, self._last = self._last, now
        return frame(before, now)

    async def close(self) -> None:
        if self._bus is not None:
            await self._bus.close()


async def _until_interrupted(viewer: Viewer, interval_s: float, as_json: bool) -> None:
    console = Console()
    with contextlib.ExitStack() as stack:
        if as_json or not console.is_terminal:
            show = _printer(as_json)
        else:
            live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
            screen = Screen(live)

            def press(key: str) -> None:
                if not screen.press(key):
                    showing.cancel()

            stack.enter_context(keys_read(press))
            show = screen.show
        showing = asyncio.create_task(_show_all(viewer, interval_s, show))
        call_on_signals(showing.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await showing


class Screen:
    """The whole terminal: the selected rows of the last frame, and a line with the keys."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._selection = Selection()
        self._frame: Frame | Unavailable | None = None

    def show(self, frame: Frame | Unavailable) -> None:
        self._frame = frame
        self._live.update(self.render(frame), refresh=True)

    def press(self, key: str) -> bool:
        """Handle a key, and return whether the display continues."""
        if not isinstance(self._frame, Frame):
            return key != "q"
        continues = self._selection.press(key, self._frame)
        self.show(self._frame)
        return continues

    def render(self, frame: Frame | Unavailable) -> RenderableType:
        """Return the frame with at most the lines and columns of the terminal."""
        options = self._live.console.options
        chosen = self._selection
        if isinstance(frame, Frame):
            frame = chosen.apply(frame)
        body = render(frame, selected=chosen.model, is_wide=options.max_width >= WIDTH)
        lines = self._live.console.render_lines(body, options.update(height=None), pad=False)
        room = options.size.height - 1
        cut = len(lines) - room
        text = f"q quit  j k select a model  Enter only it  s sort: {chosen.sort_key}"
        text += f"  {cut} more lines" if cut > 0 else ""
        rows = Segments(segment for line in lines[:room] for segment in (*line, Segment.line()))
        return Group(rows, Text(text, style="dim", no_wrap=True, overflow="crop"))


async def _show_all(viewer: Viewer, interval_s: float, show: Show) -> None:
    while True:
        try:
            show(await viewer.next_frame())
        except Unavailable as error:
            show(error)
        await asyncio.sleep(interval_s)


def _printer(as_json: bool) -> Show:
    """Return a function that prints frames one below the other, in a pipe without colours."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH

    def show(frame: Frame | Unavailable) -> None:
        if as_json:
            print_json({"error": frame.message} if isinstance(frame, Unavailable) else frame)
        else:
            console.print(render(frame))

    return show


# -- as tables --------------------------------------------------------------------------------


def render(
    frame: Frame | Unavailable, *, selected: str | None = None, is_wide: bool = True
) -> RenderableType:
    """Return the tables of a frame, rates first. The model `selected` is highlighted.

    Without `is_wide`, tables leave out the columns that do not fit into 80 columns.
    """
    if isinstance(frame, Unavailable):
        return f"[bold red]{escape(frame.message)}[/]; trying again"
    tables = [_models(frame, selected, is_wide), _engines(frame, is_wide)]
    tables += [_starting(frame)] if frame.starting else []
    tables += [_queues(frame, is_wide)]
    tables += [_scale(frame)] if frame.scale else []
    tables += [_pools(frame)]
    return Group(_headline(frame), *(part for table in tables for part in ("", table)))


def _headline(frame: Frame) -> str:
    at = datetime.fromtimestamp(frame.at_ms / 1000, UTC).strftime("%H:%M:%S")
    oldest = f", oldest {_seconds(frame.oldest_request_s)}" if frame.in_flight else ""
    colour = "red" if frame.dead_letters else "default"
    return (
        f"[bold]pagemill[/] {at} UTC   {frame.in_flight} requests in flight{oldest}   "
        f"[{colour}]{frame.dead_letters} dead letters[/]"
    )


def _pools(frame: Frame) -> Table:
    return _table(
        ("pool", "models", "#workers", "#silent", "versions", "reads"),
        (
            (
                p.role,
                ", ".join(p.models),
                p.workers,
                p.silent,
                ", ".join(p.versions),
                ", ".join(p.reads),
            )
            for p in frame.pools
        ),
    )


def _scale(frame: Frame) -> Table:
    columns = ("scaled pool", "state", "#wanted", "#running", "#starting", "#draining", "reason")
    rows = (
        (p.pool, p.state, p.wanted, p.running, p.starting, p.draining, p.reason)
        for p in frame.scale
    )
    return _table(columns, rows)


def _starting(frame: Frame) -> Table:
    rows = (
        (row.worker, row.model, row.step, *_read_bytes(row.done_bytes, row.total_bytes))
        for row in frame.starting
    )
    return _table(("starting", "model", "step", "#MB read", "#of MB"), rows)


def _read_bytes(done: int, total: int) -> tuple[str, str]:
    return (f"{done / 1e6:,.0f}", f"{total / 1e6:,.0f}") if total else ("-", "-")


def _queues(frame: Frame, is_wide: bool) -> Table:
    """Return the table of queues; in a narrow terminal without the batch lanes that are empty."""
    rows = (
        q for q in frame.queues if is_wide or q.lane == "interactive" or q.pending or q.in_flight
    )
    return _table(
        ("queue", "model", "lane", "#pending", "#in flight", "#oldest"),
        ((q.stage, q.model, q.lane, q.pending, q.in_flight, _seconds(q.oldest_s)) for q in rows),
    )


def _models(frame: Frame, selected: str | None, is_wide: bool) -> Table:
    columns = ("model", "#req/s", "#out tok/s", "#in tok/s", "#TTFT p50", "#p95", "#ITL p50")
    rows = (
        (
            row.model,
            _rate(row.flow.requests_per_s),
            *_token_rates(row.flow),
            _seconds(row.flow.time_to_first_token_p50_s),
            _seconds(row.flow.time_to_first_token_p95_s),
            _seconds(row.flow.inter_token_latency_p50_s),
            *((_share(row.flow.prefix_hit_rate), row.totals.preemptions) if is_wide else ()),
        )
        for row in frame.models
    )
    more = ("#prefix hits", "#preempted") if is_wide else ()
    return _table((*columns, *more), rows, () if is_wide else (20,), selected)


def _engines(frame: Frame, is_wide: bool) -> Table:
    columns = ("engine", "model", "#out tok/s", "#in tok/s", "#run", "#wait", "#KV use", "#busy")
    more: tuple[str, ...] = ("#waste", "#preempted") if is_wide else ()
    on_gpus = any(row.gpu_memory_usage is not None for row in frame.engines)
    more += ("#GPU", "#GPU memory") if on_gpus else ()
    rows = (
        (
            row.worker,
            row.model,
            *_token_rates(row.flow),
            row.running,
            row.waiting,
            _share(row.kv_cache_usage),
            _share(row.device_busy),
            *((_share(row.kv_waste), row.totals.preemptions) if is_wide else ()),
            *((_share(row.gpu_utilization), _share(row.gpu_memory_usage)) if on_gpus else ()),
        )
        for row in frame.engines
    )
    return _table((*columns, *more), rows, () if is_wide else (17, 11))


def _table(
    columns: Iterable[str],
    rows: Iterable[tuple[str | int, ...]],
    max_widths: Sequence[int] = (),
    selected: str | None = None,
) -> Table:
    """Make a table; columns of numbers are marked with #. A name that does not fit is cut.

    `max_widths` are of the first columns.
    """
    table = Table(box=None, pad_edge=False, header_style="bold cyan")
    for column, width in zip_longest(columns, max_widths):
        is_number = column[0] == "#"
        table.add_column(
            column.lstrip("#"),
            justify="right" if is_number else "left",
            no_wrap=True,
            min_width=len(column) - 1 if is_number else None,
            max_width=width,
        )
    for row in rows:
        # Names come from the broker.
        style = "reverse" if row[0] == selected else ""
        table.add_row(*(escape(str(cell)) for cell in row), style=style)
    return table


def _token_rates(flow: Throughput) -> tuple[str, str]:
    return _rate(flow.generation_tokens_per_s), _rate(flow.prompt_tokens_per_s)


def _rate(per_s: float | None) -> str:
    return "-" if per_s is None else f"{per_s:,.1f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
