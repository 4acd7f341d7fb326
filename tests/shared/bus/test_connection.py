"""The connection to a broker: its URL in messages, and its end during a reconnection."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.login import without_credentials
from tests.shared.bus.test_streams import start_server


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("nats://a:4222", "nats://a:4222"),
        ("nats://me:secret@a:4222", "nats://a:4222"),
        ("nats://token@a", "nats://a"),
        ("nats://me:sec@ret@a:4222", "nats://a:4222"),
        ("me:secret@a:4222", "a:4222"),
        ("nats://me:one@a:4222, me:two@b:4222", "nats://a:4222,b:4222"),
    ],
)
def test_no_credentials_are_shown(url: str, expected: str) -> None:
    assert without_credentials(url) == expected


async def test_no_reconnection_survives_its_cancellation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EmbeddedServer(tmp_path)
    await asyncio.to_thread(server.start)
    bus = await Bus.connect(server.url, "test")
    reconnections: list[asyncio.Task[None]] = []
    refused = asyncio.Event()

    async def refuse(*_args: Any, **_options: Any) -> None:
        reconnection, attempt = bus.connection.nc._reconnection_task, asyncio.current_task()
        if not reconnections:
            assert reconnection is not None
            assert attempt is not None
            reconnections.append(reconnection)
            # The cancellation comes with the refusal, which `wait_for` of Python 3.11 prefers.
            attempt.add_done_callback(lambda _: reconnection.cancel())
            refused.set()
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", refuse)
    await asyncio.to_thread(server.stop)
    async with asyncio.timeout(20):
        await refused.wait()
        await asyncio.wait(reconnections)
    await bus.close()


async def test_a_login_that_was_refused_for_a_while_is_used_again(tmp_path: Path) -> None:
    """A server that revokes a password reports it on the connection before it closes it."""

    def settings(password: str) -> str:
        return f"accounts {{ A {{ users: [{{ user: pm, password: {password} }}] }} }}"

    process, url = start_server(tmp_path, settings("one"))
    config = (tmp_path / "nats.conf").read_text()
    try:
        bus = await Bus.connect(url.replace("//", "//pm:one@"), "test")
        for password in ("two", "one"):
            (tmp_path / "nats.conf").write_text(config.replace(settings("one"), settings(password)))
            process.send_signal(signal.SIGHUP)
            async with asyncio.timeout(10):
                while bus.is_connected == (password == "two"):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        await bus.connection.sync_clock()
        await bus.close()
    finally:
        process.terminate()
        process.wait(10)


async def test_a_connection_that_is_replaced_at_once_can_be_opened(tmp_path: Path) -> None:
    """A server that loads other keys closes a connection that it has just accepted."""
    server = EmbeddedServer(tmp_path)
    await asyncio.to_thread(server.start)
    num_cut = 0

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_cut
        while data := await reader.read(2**16):
            if b"$SYS.REQ.USER.INFO" in data and num_cut < 2:
                num_cut += 1
                break
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = await asyncio.open_connection(*server.url.removeprefix("nats://").split(":"))
        async with asyncio.TaskGroup() as both:
            both.create_task(forward(reader, far[1]))
            both.create_task(forward(far[0], writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as proxy:
        host, port = proxy.sockets[0].getsockname()
        bus = await Bus.connect(f"nats://{host}:{port}", "test")
        assert num_cut == 2
        await bus.close()
    await asyncio.to_thread(server.stop)


@pytest.mark.parametrize(("value", "expected"), [(None, b"50"), ("100", b"100")])
def test_an_embedded_server_collects_garbage_early_by_default(
    value: str | None, expected: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOGC", raising=False)
    if value is not None:
        monkeypatch.setenv("GOGC", value)
    server = EmbeddedServer(tmp_path)
    server.start()
    try:
        environment = Path(f"/proc/{server.pid_file.read_text().strip()}/environ").read_bytes()
    finally:
        server.stop()
    assert b"GOGC=" + expected in environment.split(b"\0")
