"""Attacks by names and servers that say nothing, and names with several addresses."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address, ip_network
from typing import Any

import httpcore2
import pytest

from shared.errors import InvalidMedia, MediaBlocked
from shared.net.dialing import MAX_DIALLED, GuardedBackend, Resolver
from tests.renderer.canary import Canary, config
from tests.security.dns import NameServer
from tests.support.waiting import until
from workers.renderer.media.fetcher import MAX_FETCHES, MAX_FETCHES_OF_TENANT, Fetcher

FIELD = "field"
LOOPBACK = ("127.0.0.0/8",)
# No test waits for it.
LONG_S = 600.0


@pytest.fixture
def canary() -> Iterator[Canary]:
    server = Canary()
    yield server
    server.close()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer({"good.example": ["127.0.0.1"]})
    server.install(monkeypatch)
    yield server
    server.close()


class Fetchers:
    """Fetchers, and fetches that do not end before the test does."""

    def __init__(self) -> None:
        self.made: list[Fetcher] = []
        self.started: list[asyncio.Task[bytes]] = []

    def new(self, timeout_s: float = LONG_S, networks: tuple[str, ...] = LOOPBACK) -> Fetcher:
        self.made.append(Fetcher(config([*networks], fetch_timeout_s=timeout_s)))
        return self.made[-1]

    def start(self, fetcher: Fetcher, url: str, tenant: str, count: int) -> None:
        for i in range(count):
            fetching = fetcher.fetch(url.format(i), FIELD, tenant=tenant)
            self.started.append(asyncio.create_task(fetching))

    async def close(self) -> None:
        for task in self.started:
            task.cancel()
        await asyncio.gather(*self.started, return_exceptions=True)
        for fetcher in self.made:
            await fetcher.close()


@pytest.fixture
async def fetchers() -> AsyncIterator[Fetchers]:
    all_fetchers = Fetchers()
    yield all_fetchers
    await all_fetchers.close()


SILENT = "http://silent{}.example/"


async def test_names_without_an_answer_stop_no_other_tenants_fetch(
    canary: Canary, names: NameServer, fetchers: Fetchers
) -> None:
    fetcher = fetchers.new()
    fetchers.start(fetcher, SILENT, "a", 4 * MAX_FETCHES)
    await until(lambda: any("silent" in name for name in names.asked))
    url = canary.url(host="good.example")
    async with asyncio.timeout(60):
        assert await fetcher.fetch(url, FIELD, tenant="b") == b"picture"
    assert len(set(names.asked) - {"good.example"}) <= MAX_FETCHES_OF_TENANT


async def test_a_deadline_ends_the_query_and_frees_its_place(
    canary: Canary, names: NameServer, fetchers: Fetchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = fetchers.new(0.2)
    silent = [fetcher.fetch(SILENT.format(i), FIELD) for i in range(3 * MAX_FETCHES_OF_TENANT)]
    ended = await asyncio.gather(*silent, return_exceptions=True)
    assert {str(error) for error in ended} == {"the image could not be fetched in time"}
    monkeypatch.setattr(fetcher, "_config", config([*LOOPBACK], fetch_timeout_s=LONG_S))
    assert await fetcher.fetch(canary.url(host="good.example"), FIELD) == b"picture"


async def test_silent_names_take_no_threads(names: NameServer) -> None:
    resolver = Resolver()
    await resolver.resolve("good.example")
    before = threading.active_count()
    waiting = [asyncio.create_task(resolver.resolve(f"silent{i}.example")) for i in range(500)]
    await until(lambda: len(set(names.asked)) > 400)
    assert threading.active_count() == before
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await resolver.resolve("good.example") == [ip_address("127.0.0.1")]
    await resolver.close()


async def test_slow_servers_of_one_tenant_leave_places_to_others(
    canary: Canary, fetchers: Fetchers
) -> None:
    given_up = threading.Event()

    def hang(handler: BaseHTTPRequestHandler) -> None:
        given_up.wait(LONG_S)

    canary.answers["/slow"] = hang
    fetcher = fetchers.new()
    fetchers.start(fetcher, canary.url("/slow"), "a", 4 * MAX_FETCHES)
    await until(lambda: len(canary.paths) == MAX_FETCHES_OF_TENANT)
    try:
        async with asyncio.timeout(60):
            assert await fetcher.fetch(canary.url(), FIELD, tenant="b") == b"picture"
        assert canary.paths.count("/slow") == MAX_FETCHES_OF_TENANT
    finally:
        given_up.set()


@pytest.mark.parametrize("addresses", [[], None], ids=["no address", "no such name"])
async def test_a_name_without_an_address_is_a_typed_error(
    names: NameServer, fetchers: Fetchers, addresses: list[str] | None
) -> None:
    names.zone["nowhere.example"] = addresses
    with pytest.raises(InvalidMedia, match="the image's host has no address") as caught:
        await fetchers.new().fetch("http://nowhere.example/", FIELD)
    assert caught.value.field == FIELD


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that were tried. 127.9.0.0/16 is silent, and 127.8.0.0/16 refuses."""
    tried: list[str] = []
    really = httpcore2.AnyIOBackend.connect_tcp

    async def connect_tcp(self: Any, host: str, *args: Any) -> httpcore2.AsyncNetworkStream:
        tried.append(host)
        if host.startswith("127.8."):
            raise httpcore2.ConnectError
        if host.startswith("127.9."):
            await asyncio.sleep(LONG_S)
        return await really(self, host, *args)

    monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", connect_tcp)
    return tried


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.9.0.1", "127.0.0.1"],
        ["127.8.0.1", "127.0.0.1"],
        ["::1", "127.8.0.1", "127.9.0.1", "127.0.0.1"],
    ],
    ids=str,
)
async def test_another_address_is_tried(
    canary: Canary, names: NameServer, dialled: list[str], fetchers: Fetchers, addresses: list[str]
) -> None:
    names.zone["several.example"] = addresses
    fetcher = fetchers.new(networks=(*LOOPBACK, "::1/128"))
    assert await fetcher.fetch(canary.url(host="several.example"), FIELD) == b"picture"


async def test_a_name_of_many_addresses_is_no_port_scan(
    canary: Canary, names: NameServer, dialled: list[str], fetchers: Fetchers
) -> None:
    names.zone["many.example"] = [f"127.8.0.{i}" for i in range(1, 60)]
    with pytest.raises(InvalidMedia, match="in time"):
        await fetchers.new().fetch(canary.url(host="many.example"), FIELD)
    assert len(dialled) == MAX_DIALLED


async def test_no_address_is_dialled_before_all_are_checked(
    names: NameServer, dialled: list[str], fetchers: Fetchers
) -> None:
    names.zone["mixed.example"] = [*(f"127.8.0.{i}" for i in range(1, 12)), "10.0.0.1"]
    with pytest.raises(MediaBlocked):
        await fetchers.new().fetch("http://mixed.example/", FIELD)
    assert dialled == []


async def test_one_connection_is_kept_and_the_others_are_closed(
    canary: Canary, names: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two addresses may answer at the same moment."""
    streams: list[httpcore2.AsyncNetworkStream] = []
    both = asyncio.Event()
    really = httpcore2.AnyIOBackend.connect_tcp

    async def connect_tcp(self: Any, host: str, *args: Any) -> httpcore2.AsyncNetworkStream:
        streams.append(stream := await really(self, "127.0.0.1", *args))
        if len(streams) == 2:
            both.set()
        await both.wait()
        return stream

    monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", connect_tcp)
    names.zone["two.example"] = ["127.0.0.2", "127.0.0.3"]
    resolver = Resolver()
    backend = GuardedBackend(resolver, [ip_network(text) for text in LOOPBACK])
    connection = await backend.connect_tcp("two.example", canary.port)
    is_open = [stream.get_extra_info("socket").fileno() >= 0 for stream in streams]
    assert sorted(is_open) == [False, True]
    assert streams[is_open.index(True)] is connection
    await connection.aclose()
    await resolver.close()


TRANSLATED = ["2a00:aaaa::10.0.0.1", "2a00:aaaa::169.254.169.254", "2a00:aaaa::7f00:1"]


@pytest.mark.parametrize("address", TRANSLATED)
async def test_no_address_behind_the_local_translator_is_dialled(
    names: NameServer, dialled: list[str], fetchers: Fetchers, address: str
) -> None:
    """The prefix is the operator's, and nothing about such an address is special."""
    names.zone["ipv4only.arpa"] = ["192.0.0.170", "2a00:aaaa::192.0.0.170"]
    names.zone["translated.example"] = [address]
    for host in ("translated.example", f"[{address}]"):
        with pytest.raises(MediaBlocked):
            await fetchers.new(networks=()).fetch(f"http://{host}/", FIELD)
    assert dialled == []
    assert names.asked.count("ipv4only.arpa") >= 1


@pytest.mark.parametrize(
    "address",
    [
        "2a00:aaaa:a00:1::",
        "2a00:aaaa:a9:fea9:fe::",
        "2a00:aaaa:1:7f00:0:100::",
        "2a00:aaaa:1:2:7f:0:100:0",
        "2a00:aaaa::5efe:10.0.0.1",
        "2a00:aaaa::200:5efe:169.254.169.254",
        "64:ff9b:1::10.0.0.1",
        "64:ff9b:1:a00:0:100::",
    ],
)
async def test_no_address_carries_an_inner_one(
    names: NameServer, dialled: list[str], fetchers: Fetchers, address: str
) -> None:
    names.zone["carrier.example"] = [address]
    names.zone["ipv4only.arpa"] = None
    with pytest.raises(MediaBlocked):
        await fetchers.new(networks=()).fetch("http://carrier.example/", FIELD)
    assert dialled == []


async def test_without_a_translator_such_an_address_is_dialled(
    names: NameServer, fetchers: Fetchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled = []

    async def unreachable(_: object, host: str, *args: object) -> None:
        dialled.append(host)
        raise httpcore2.ConnectError

    monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", unreachable)
    names.zone["ipv4only.arpa"] = ["192.0.0.170", "192.0.0.171"]
    names.zone["plain.example"] = ["2606:4700::1111"]
    with pytest.raises(InvalidMedia, match="in time"):
        await fetchers.new().fetch("http://plain.example/", FIELD)
    assert dialled == ["2606:4700::1111"]
