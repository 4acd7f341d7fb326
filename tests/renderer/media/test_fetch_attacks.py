"""Ways to make the fetcher knock where it must not, or stay there: rows S08 to S12 and S15."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from ipaddress import IPv4Address, IPv6Address

import httpcore2
import pytest

from shared.errors import InvalidMedia, MediaBlocked, MediaTooLarge
from tests.renderer.canary import LOOPBACK, Canary, config, fetcher, loader, resolve_as, send
from workers.renderer.media.fetcher import parse_url
from workers.renderer.media.image_decoder import decode_image

FIELD = "messages[0].content[0].image_url.url"
INTERNAL = (
    "127.0.0.1",
    "127.8.9.1",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.0.1",
    "169.254.169.254",  # metadata of most clouds
    "100.100.100.200",  # of Alibaba's
    "192.0.0.192",  # of Oracle's
    "168.63.129.16",  # of Azure's
    "0.0.0.0",
    "192.0.0.8",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
)
INTERNAL_V6 = (
    "::",
    "::1",
    "fe80::1",
    "fc00::1",
    "fd00:ec2::254",  # metadata of Amazon's cloud
    "fd20:ce::254",  # of Google's
    "fec0::1",
    "ff02::1",
    "100::1",
    "2001:db8::1",
    "64:ff9b:1::1",
    "5f00::1",
)


def spellings(text: str) -> Iterator[str]:
    """Spellings of one IPv4 address for inet_aton and IPv6."""
    address = IPv4Address(text)
    number, parts = int(address), text.split(".")
    yield from (text, str(number), hex(number), f"0{number:o}")
    yield ".".join(hex(int(part)) for part in parts)
    yield ".".join(f"0{int(part):o}" for part in parts)
    yield f"{parts[0]}.{number & 0xFFFFFF}"
    yield f"{parts[0]}.{parts[1]}.{number & 0xFFFF}"
    yield f"0x{int(parts[0]):x}.{parts[1]}.0{int(parts[2]):o}.{parts[3]}"
    wrapped = {
        "mapped": 0xFFFF << 32 | number,
        "translated": 0xFFFF << 48 | number,
        "compatible": number,
        "NAT64": int(IPv6Address("64:ff9b::")) | number,
        "6to4": 0x2002 << 112 | number << 80 | 1,
        "teredo client": 0x20010000 << 96 | 0x08080808 << 64 | (number ^ 0xFFFFFFFF),
        "teredo server": 0x20010000 << 96 | number << 64 | (0x08080808 ^ 0xFFFFFFFF),
    }
    yield from (f"[{IPv6Address(value)}]" for value in wrapped.values())
    yield f"[::ffff:{text}]"


def assert_not_asked(url: str, networks: list[str] | None = None) -> None:
    with pytest.raises((MediaBlocked, InvalidMedia)) as caught:
        fetcher(networks).fetch(url, FIELD)
    # A connection that was tried and failed has another error.
    assert "in time" not in caught.value.message
    assert caught.value.field == FIELD


@pytest.mark.parametrize("address", INTERNAL)
def test_no_spelling_of_an_inner_address_is_dialled(
    canary_everywhere: Canary, dialled: list[str], address: str
) -> None:
    for host in spellings(address):
        assert_not_asked(canary_everywhere.url(host=host))
    assert dialled == []
    assert canary_everywhere.connections == 0


@pytest.mark.parametrize("address", INTERNAL_V6)
def test_no_inner_address_of_version_6_is_dialled(
    canary_everywhere: Canary, dialled: list[str], address: str
) -> None:
    for text in (address, IPv6Address(address).exploded, address.upper()):
        assert_not_asked(canary_everywhere.url(host=f"[{text}]"))
    assert dialled == []
    assert canary_everywhere.connections == 0


def test_the_canary_notices_requests(canary_everywhere: Canary) -> None:
    hosts = ["127.0.0.1", "2130706433", "0x7f.1", "127.1", "0177.0.0.1", "localhost"]
    for host in hosts:
        fetcher(["0.0.0.0/0", "::/0"]).fetch(canary_everywhere.url(host=host), FIELD)
    assert canary_everywhere.connections == len(hosts)


@pytest.mark.parametrize(
    "name",
    [
        "metadata.google.internal",
        "metadata",
        "instance-data.ec2.internal",
        "169.254.169.254.nip.example",
        "localhost.localdomain",
        "xn--localhost-1x0d.example",
    ],
)
@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.1"])
def test_a_name_is_as_good_as_its_address(
    canary: Canary,
    dialled: list[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    address: str,
) -> None:
    resolve_as(monkeypatch, [address])
    with pytest.raises(MediaBlocked):
        fetcher().fetch(canary.url(host=name), FIELD)
    assert dialled == []
    assert canary.connections == 0


# -- S12: what parsers read in different ways -----------------------------------------------------

CONFUSING = (
    "http://good.example\\@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}\\@good.example/",
    "http://good.example\\.127.0.0.1:{port}/",
    "http://good.example@127.0.0.1:{port}/",
    "http://good.example:80@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}#@good.example/",
    "http://127.0.0.1:{port}?@good.example/",
    "http://127.0.0.1%00.good.example:{port}/",
    "http://127.0.0.1%2f@good.example:{port}/",
    "http://\u2460\u2461\u2466.\u24ea.\u24ea.\u2460:{port}/",
    "http://\uff11\uff12\uff17.0.0.1:{port}/",
    "http://127\u30020\u30020\u30021:{port}/",
    "http://127.0.0.1\t:{port}/",
    "http://127.0.0.1\n:{port}/",
    "http://\r\n127.0.0.1:{port}/",
    "http:///127.0.0.1:{port}/",
    "http:/\\127.0.0.1:{port}/",
    "http://[127.0.0.1]:{port}/",
    "http://[::ffff:127.0.0.1%25lo]:{port}/",
)


@pytest.mark.parametrize("url", CONFUSING)
def test_a_url_that_parsers_disagree_on_opens_no_connection(
    canary_everywhere: Canary, dialled: list[str], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    resolve_as(monkeypatch, ["127.0.0.1"])
    assert_not_asked(url.format(port=canary_everywhere.port))
    assert dialled == []
    assert canary_everywhere.connections == 0


@pytest.mark.parametrize("url", CONFUSING)
def test_an_accepted_url_has_the_host_that_is_dialled(url: str) -> None:
    """The HTTP library's own reading of the same URL is the host that was checked, if any."""
    with suppress(InvalidMedia):
        target = parse_url(url.format(port=80), FIELD)
        assert target.host == httpcore2.URL(url.format(port=80)).host.decode()


# -- S10: redirects -------------------------------------------------------------------------------


@pytest.fixture
def inside() -> Iterator[Canary]:
    server = Canary("127.0.0.2")
    yield server
    server.close()


OUTSIDE = ["127.0.0.1/32"]
ELSEWHERE = (
    "http://127.0.0.2:{port}/",
    "//127.0.0.2:{port}/",
    "http://127.2:{port}/",
    "http://0x7f000002:{port}/",
    "http://[::ffff:127.0.0.2]:{port}/",
    "http://127.0.0.1\\@127.0.0.2:{port}/",
    "http://127.0.0.1@127.0.0.2:{port}/",
    "\\\\127.0.0.2:{port}/",
    "file:///etc/passwd",
    "gopher://127.0.0.2:{port}/_",
    "ftp://127.0.0.2:{port}/",
    "dict://127.0.0.2:{port}/",
    "data:image/png;base64,AAAA",
    "javascript:1",
)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_leads_inside(canary: Canary, inside: Canary, status: int) -> None:
    for location in ELSEWHERE:
        answer = send(b"", status, Location=location.format(port=inside.port))
        canary.answers["/there"] = answer
        assert_not_asked(canary.url("/there"), OUTSIDE)
    assert set(canary.paths) == {"/there"}
    assert inside.connections == 0


@pytest.mark.parametrize("status", [300, 304, 305, 306])
def test_other_answers_that_name_a_place_are_not_followed(
    canary: Canary, inside: Canary, status: int
) -> None:
    location = f"http://127.0.0.2:{inside.port}/"
    canary.answers["/there"] = send(b"", status, Location=location, Refresh=f"0; url={location}")
    assert_not_asked(canary.url("/there"), ["127.0.0.0/8"])
    assert inside.connections == 0


@pytest.mark.parametrize("hop", [1, 2, 3])
def test_every_hop_of_a_chain_is_looked_at(canary: Canary, inside: Canary, hop: int) -> None:
    for i in range(hop):
        canary.answers[f"/{i}"] = send(b"", 302, Location=f"/{i + 1}")
    canary.answers[f"/{hop}"] = send(b"", 302, Location=f"http://127.0.0.2:{inside.port}/")
    with pytest.raises((MediaBlocked, InvalidMedia)):
        fetcher(OUTSIDE).fetch(canary.url("/0"), FIELD)
    assert canary.paths == [f"/{i}" for i in range(hop + 1)]
    assert inside.connections == 0


def test_a_chain_of_ten_is_not_followed_to_its_end(canary: Canary) -> None:
    for i in range(10):
        canary.answers[f"/{i}"] = send(b"", 302, Location=f"/{i + 1}")
    with pytest.raises(InvalidMedia, match="more than 3 redirects"):
        fetcher(LOOPBACK).fetch(canary.url("/0"), FIELD)
    assert canary.paths == ["/0", "/1", "/2", "/3"]


@pytest.mark.parametrize(
    ("location", "path"),
    [("b", "/a/b"), ("../b", "/b"), ("?x=1", "/a/there?x=1"), ("./b#part", "/a/b")],
)
def test_a_relative_redirect_is_relative_to_its_page(
    canary: Canary, location: str, path: str
) -> None:
    canary.answers["/a/there"] = lambda handler: send(
        b"picture", 200 if handler.path == path else 302, Location=location
    )(handler)
    assert fetcher(LOOPBACK).fetch(canary.url("/a/there"), FIELD) == b"picture"
    assert canary.paths == ["/a/there", path]


def test_a_redirect_to_a_host_that_is_not_listed_is_not_followed(
    canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_as(monkeypatch, ["127.0.0.1"])
    canary.answers["/there"] = send(b"", 302, Location=canary.url(host="other.example"))
    some = fetcher(LOOPBACK, media_hosts=["good.example"])
    with pytest.raises(MediaBlocked, match="media_hosts"):
        some.fetch(canary.url("/there", host="good.example"), FIELD)
    assert canary.paths == ["/there"]


# -- S11: names that change their minds -----------------------------------------------------------


def test_a_name_that_turns_inside_is_dialled_where_it_was_checked(
    canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = resolve_as(monkeypatch, ["93.184.216.34"], ["127.0.0.1"])
    dialled = []

    async def unreachable(self: object, host: str, *_: object) -> None:
        dialled.append(host)
        raise httpcore2.ConnectError

    monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", unreachable)
    reader = fetcher()
    with pytest.raises(InvalidMedia):
        reader.fetch(canary.url(host="rebind.example"), FIELD)
    assert (hosts, dialled) == (["rebind.example"], ["93.184.216.34"])
    with pytest.raises(MediaBlocked):
        reader.fetch(canary.url(host="rebind.example"), FIELD)
    assert dialled == ["93.184.216.34"]


@pytest.mark.parametrize(
    "answer",
    [
        ["93.184.216.34", "127.0.0.1"],
        ["127.0.0.1", "93.184.216.34"],
        ["93.184.216.34", "93.184.216.35", "169.254.169.254"],
        ["93.184.216.34", "::ffff:127.0.0.1"],
    ],
    ids=str,
)
def test_one_inner_address_among_outer_ones_spoils_them_all(
    canary: Canary, dialled: list[str], monkeypatch: pytest.MonkeyPatch, answer: list[str]
) -> None:
    resolve_as(monkeypatch, answer)
    with pytest.raises(MediaBlocked):
        fetcher().fetch(canary.url(host="mixed.example"), FIELD)
    assert dialled == []


# -- S15: bodies and headers without an end -------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
DRIBBLES = {
    "the status line": (b"HTTP/1.1 200 ", b"O"),
    "a header": (OK + b"X: ", b"a"),
    "headers": (OK, b"X: y\r\n"),
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a body": (OK + b"\r\n", b"a"),
    "a body of known length": (OK + b"Content-Length: 1000\r\n\r\n", b"a"),
    "chunks": (CHUNKED, b"1\r\na\r\n"),
    "a chunk's size": (CHUNKED + b"1;", b"a"),
    "a trailer": (CHUNKED + b"0\r\nX: ", b"a"),
}


@pytest.mark.parametrize("dribble", DRIBBLES.values(), ids=DRIBBLES)
def test_the_deadline_is_for_the_whole_and_not_for_each_byte(
    canary: Canary, dribble: tuple[bytes, bytes]
) -> None:
    """With only a limit on the pause between bytes, each of these would never end."""
    beginning, endless = dribble
    given_up = threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(beginning)
        with suppress(OSError):
            while not given_up.wait(0.02):
                handler.wfile.write(endless)

    canary.answers["/a.png"] = answer
    try:
        with pytest.raises(InvalidMedia, match="in time"):
            fetcher(LOOPBACK, fetch_timeout_s=0.3).fetch(canary.url(), FIELD)
    finally:
        given_up.set()


@pytest.mark.parametrize("beginning", [OK + b"X: ", OK + b"Content-Length: ", b"HTTP/1.1 200 "])
def test_headers_without_an_end_are_given_up(canary: Canary, beginning: bytes) -> None:
    num_bytes = 0

    def flood(handler: BaseHTTPRequestHandler) -> None:
        nonlocal num_bytes
        handler.wfile.write(beginning)
        while True:
            num_bytes += handler.wfile.write(b"1" * 2**16)

    canary.answers["/a.png"] = flood
    with pytest.raises(InvalidMedia):
        fetcher(LOOPBACK, fetch_timeout_s=30.0).fetch(canary.url(), FIELD)
    assert num_bytes < 2**24, "by their size, and not by the deadline"


@pytest.mark.parametrize("headers", [{}, {"Content-Length": str(2**40)}, {"Content-Length": "10"}])
def test_no_length_that_is_said_gets_more_than_the_limit(
    canary: Canary, headers: dict[str, str]
) -> None:
    num_bytes = 0

    def endless(handler: BaseHTTPRequestHandler) -> None:
        nonlocal num_bytes
        handler.send_response(200)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        while num_bytes < 2**26:
            num_bytes += handler.wfile.write(bytes(2**16))

    canary.answers["/a.png"] = endless
    reader = fetcher(LOOPBACK, max_image_bytes=2**20, fetch_timeout_s=30.0)
    if headers.get("Content-Length") == "10":
        assert reader.fetch(canary.url(), FIELD) == bytes(10)
    else:
        with pytest.raises(MediaTooLarge, match=str(2**20)):
            reader.fetch(canary.url(), FIELD)
    assert num_bytes < 2**26


@pytest.mark.parametrize("length", ["-1", "1, 2", "a", "0x10", "9" * 5000])
def test_a_length_that_is_none_is_refused(canary: Canary, length: str) -> None:
    canary.answers["/a.png"] = send(b"picture", Content_Length=length)
    with pytest.raises((InvalidMedia, MediaTooLarge)):
        fetcher(LOOPBACK).fetch(canary.url(), FIELD)


def test_a_body_that_ends_too_soon_is_no_image(canary: Canary) -> None:
    canary.answers["/a.png"] = send(b"short", Content_Length="100")
    with pytest.raises(InvalidMedia):
        fetcher(LOOPBACK).fetch(canary.url(), FIELD)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "identity, gzip"])
def test_a_compressed_body_is_not_unpacked_and_so_no_image(canary: Canary, encoding: str) -> None:
    bomb = gzip.compress(bytes(10_000_000))
    assert len(bomb) < 20_000
    canary.answers["/a.png"] = send(bomb, Content_Encoding=encoding)
    limits = config(LOOPBACK, max_image_bytes=100_000)
    assert loader(limits).read(canary.url(), FIELD, "") == bomb
    with pytest.raises(InvalidMedia, match="not a readable"):
        decode_image(bomb, limits, FIELD)


def test_bytes_after_an_answer_are_not_the_next_answer(canary: Canary) -> None:
    """Bytes after the declared length must not answer another request."""
    hidden = OK + b"Content-Length: 6\r\n\r\nhidden"

    def smuggle(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = False
        handler.wfile.write(OK + b"Content-Length: 5\r\n\r\nfirst" + hidden)

    canary.answers["/a.png"] = smuggle
    reader = fetcher(LOOPBACK)
    assert reader.fetch(canary.url("/a.png"), FIELD) == b"first"
    assert reader.fetch(canary.url("/b.png"), FIELD) == b"picture"
