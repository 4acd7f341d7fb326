"""Fetching, against a server that counts connections: forbidden places see none."""

import asyncio
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler

import pytest

from shared.config.schema import RendererConfig
from shared.errors import InvalidMedia, MediaBlocked, MediaTooLarge, RequestError
from shared.protocol.multimodal import IMAGE, VIDEO
from tests.renderer.canary import (
    LOOPBACK,
    Answer,
    Blocking,
    Canary,
    config,
    fetcher,
    loader,
    resolve_as,
    send,
)
from tests.renderer.threads import in_thread
from tests.support.waiting import until
from workers.renderer.media import fetcher as fetch
from workers.renderer.media.fetcher import Fetcher, parse_url
from workers.renderer.media.loader import MediaLoader

FIELD = "messages[0].content[0].image_url"


def test_an_allowed_place_gives_its_image(canary: Canary) -> None:
    data = fetcher(LOOPBACK).fetch(canary.url("/a.png?size=2"), FIELD)
    assert data == b"picture"
    assert canary.paths == ["/a.png?size=2"]


def test_by_default_nothing_is_fetched(canary: Canary) -> None:
    with pytest.raises(MediaBlocked, match="media_hosts") as caught:
        Blocking(Fetcher(RendererConfig())).fetch(canary.url(), FIELD)
    assert caught.value.field == FIELD
    assert canary.connections == 0


def test_only_hosts_of_the_list(canary: Canary, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_as(monkeypatch, ["127.0.0.1"])
    some = fetcher(LOOPBACK, media_hosts=["*.example.com"])
    assert some.fetch(canary.url(host="cdn.example.com"), FIELD) == b"picture"
    for host in ("example.com", "cdn.example.com.evil.net", "evilexample.com", "127.0.0.1"):
        with pytest.raises(MediaBlocked):
            some.fetch(canary.url(host=host), FIELD)
    assert canary.connections == 1


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "127.1",
        "0177.0.0.1",
        "0.0.0.0",
        "0",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::127.0.0.1]",
        "LOCALHOST",
        "localhost.",
    ],
)
def test_no_spelling_of_this_machine_is_dialled(canary: Canary, host: str) -> None:
    with pytest.raises((MediaBlocked, InvalidMedia)):
        fetcher().fetch(canary.url(host=host), FIELD)
    assert canary.connections == 0


@pytest.mark.parametrize(
    "url",
    [
        "http://good.example\\@127.0.0.1/",
        "http://good.example@127.0.0.1/",
        "http://user:secret@127.0.0.1/",
        "http://127.0.0.1\t/",
        "http://127.0.0.1\n/",
        "http://127.0.0.1%00.good.example/",
        "http://①②⑦.⓪.⓪.①/",
        "http:///127.0.0.1/",
        "http:/127.0.0.1/",
        "http://127.0.0.1:0/",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:80:80/",
        "http://[::1/",
        "http://[::1]evil/",
        "http://[fe80::1%25eth0]/",
        "http://a b/",
        "http://",
        "file:///etc/passwd",
        "gopher://127.0.0.1/",
        "ftp://127.0.0.1/",
        "//127.0.0.1/",
        "http://" + "a" * 10_000,
    ],
)
def test_urls_that_parsers_read_differently_are_refused(url: str) -> None:
    with pytest.raises(InvalidMedia, match="not a plain http or https URL") as caught:
        parse_url(url, FIELD)
    assert caught.value.field == FIELD


def test_the_checked_address_is_dialled() -> None:
    target = parse_url("HTTPS://Pictures.Example.COM/a/../b?x=1#part", FIELD)
    assert target == ("https", "pictures.example.com", 443, "/a/../b?x=1")
    assert parse_url("http://[2606:4700::1111]:8080", FIELD) == (
        "http",
        "2606:4700::1111",
        8080,
        "/",
    )


def test_a_name_is_resolved_once(canary: Canary, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second answer, for the connection, would be the attacker's to give."""
    hosts = resolve_as(monkeypatch, ["127.0.0.1"], ["10.9.9.9"])
    assert fetcher(LOOPBACK).fetch(canary.url(host="rebind.example"), FIELD) == b"picture"
    assert hosts == ["rebind.example"]


def test_mixed_answers_are_refused(canary: Canary, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_as(monkeypatch, ["127.0.0.1", "10.0.0.1"])
    with pytest.raises(MediaBlocked):
        fetcher(LOOPBACK).fetch(canary.url(host="mixed.example"), FIELD)
    assert canary.connections == 0


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_followed_and_looked_at(canary: Canary, status: int) -> None:
    canary.answers["/there"] = send(b"", status, Location="/a.png")
    assert fetcher(LOOPBACK).fetch(canary.url("/there"), FIELD) == b"picture"
    canary.answers["/inside"] = send(b"", status, Location=canary.url(host="127.0.0.2"))
    before = canary.connections
    with pytest.raises(MediaBlocked):
        fetcher(["127.0.0.1/32"]).fetch(canary.url("/inside"), FIELD)
    assert canary.connections == before + 1


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "gopher://127.0.0.1/", "http://a@b/", "http://\\x/", ""]
)
def test_a_redirect_to_something_else_is_refused(canary: Canary, location: str) -> None:
    canary.answers["/there"] = send(b"", 302, Location=location)
    with pytest.raises(InvalidMedia):
        fetcher(LOOPBACK).fetch(canary.url("/there"), FIELD)


def test_redirects_come_to_an_end(canary: Canary) -> None:
    canary.answers["/a.png"] = send(b"", 302, Location="/a.png")
    with pytest.raises(InvalidMedia, match="redirects"):
        fetcher(LOOPBACK).fetch(canary.url(), FIELD)
    assert len(canary.paths) == 1 + fetch.MAX_REDIRECTS


def test_a_body_over_the_limit_is_not_read_to_its_end(canary: Canary) -> None:
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(bytes(65536))

    canary.answers["/a.png"] = endless
    with pytest.raises(MediaTooLarge, match="1000 bytes"):
        fetcher(LOOPBACK, max_image_bytes=1000).fetch(canary.url(), FIELD)


def test_a_slow_body_is_given_up(canary: Canary) -> None:
    def dribble(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b"x")
            handler.wfile.flush()
            time.sleep(0.1)

    canary.answers["/a.png"] = dribble
    began = time.monotonic()
    with pytest.raises(InvalidMedia, match="in time"):
        fetcher(LOOPBACK, fetch_timeout_s=0.5).fetch(canary.url(), FIELD)
    assert time.monotonic() - began < 5


def test_compressed_bodies_are_not_decompressed(canary: Canary) -> None:
    canary.answers["/a.png"] = send(b"\x1f\x8b not a picture", Content_Encoding="gzip")
    assert fetcher(LOOPBACK).fetch(canary.url(), FIELD) == b"\x1f\x8b not a picture"


@pytest.mark.parametrize(
    "answer",
    [send(b"no", 404), send(b"no", 500), send(b"short", Content_Length="100"), send(b"", 302)],
    ids=["404", "500", "cut off", "a redirect to nowhere"],
)
def test_other_answers_are_errors_without_an_address(canary: Canary, answer: Answer) -> None:
    canary.answers["/a.png"] = answer
    with pytest.raises(RequestError) as caught:
        fetcher(LOOPBACK).fetch(canary.url(), FIELD)
    assert "127.0.0.1" not in caught.value.message
    assert caught.value.field == FIELD


def test_a_closed_port_is_invalid_media() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(InvalidMedia, match="in time"):
        fetcher(LOOPBACK).fetch(f"http://127.0.0.1:{port}/", FIELD)


async def test_many_at_once_fetch_once(canary: Canary) -> None:
    def slow(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.2)
        send(b"picture")(handler)

    canary.answers["/a.png"] = slow
    media = MediaLoader(config(LOOPBACK), in_thread)
    files = await asyncio.gather(*(media.read(canary.url(), FIELD, "") for _ in range(8)))
    assert files == [b"picture"] * 8
    assert await media.read(canary.url(), FIELD, "") == b"picture"
    assert len(canary.paths) == 1


async def test_a_cancelled_request_ends_no_fetch_of_others(canary: Canary) -> None:
    answered = threading.Event()

    def slow(handler: BaseHTTPRequestHandler) -> None:
        answered.wait(60)
        send(b"picture")(handler)

    canary.answers["/a.png"] = slow
    media = MediaLoader(config(LOOPBACK, fetch_timeout_s=60.0), in_thread)
    first, second = (asyncio.create_task(media.read(canary.url(), FIELD, "")) for _ in range(2))
    await until(lambda: canary.paths)
    first.cancel()
    answered.set()
    assert await second == b"picture"
    assert len(canary.paths) == 1


async def test_a_failure_is_everybodys_and_is_not_kept(canary: Canary) -> None:
    def slow(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.2)
        send(b"", 503)(handler)

    canary.answers["/a.png"] = slow
    media = MediaLoader(config(LOOPBACK), in_thread)

    async def read(field: str) -> str | None:
        with pytest.raises(InvalidMedia, match="503") as caught:
            await media.read(canary.url(), field, "")
        return caught.value.field

    assert await asyncio.gather(*map(read, ["a", "b"])) == ["a", "b"]
    canary.answers.clear()
    assert await media.read(canary.url(), FIELD, "") == b"picture"


def test_the_cache_of_urls_is_bounded(canary: Canary) -> None:
    half = 2**19 + 1
    for name in "ab":
        canary.answers[f"/{name}"] = send(bytes(half))
    media = loader(config(LOOPBACK, url_cache_mib=1))
    for name in "aabbba":
        media.read(canary.url(f"/{name}"), FIELD, "")
    assert canary.paths == ["/a", "/b", "/a"]


def test_a_video_evicts_no_image(canary: Canary) -> None:
    """A file is found for its modality alone, because the limits on sizes differ."""
    for name in ("image", "video"):
        canary.answers[f"/{name}"] = send(bytes(2**20))
    limits = config(LOOPBACK, url_cache_mib=1, max_image_bytes=2**20, max_video_bytes=2**21)
    media = loader(limits)
    for name, modality in (("image", IMAGE), ("video", VIDEO), ("image", IMAGE), ("image", VIDEO)):
        media.read(canary.url(f"/{name}"), FIELD, "", modality)
    assert canary.paths == ["/image", "/video", "/image"]


def test_each_tenant_fetches_for_itself(canary: Canary) -> None:
    media = loader(config(LOOPBACK))
    canary.answers["/a.png"] = send(b"first")
    assert media.read(canary.url(), FIELD, "a") == b"first"
    canary.answers["/a.png"] = send(b"second")
    assert media.read(canary.url(), FIELD, "b") == b"second"
    assert media.read(canary.url(), FIELD, "a") == b"first"
    assert len(canary.paths) == 2
