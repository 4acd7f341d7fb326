"""Which requests pass the proxy, and that all others are refused by name."""

from http import HTTPStatus

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workers.docker_proxy.rules import Action, Refused, read_action

SERVICES = ("engine", "encoder")
PATHS = {f"/services/{service}/workers".encode() for service in SERVICES}
PREFIXES = {path + b"/" for path in PATHS}
METHODS = st.sampled_from(["GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "CONNECT", "BREW"])
# Parts of requests to the Docker Engine API, and ways to hide them.
PARTS = st.sampled_from(
    [
        b"/services/",
        b"engine",
        b"gateway",
        b"/workers",
        b"/1",
        b"/containers/create",
        b"/v1.41",
        b"/containers/json",
        b"/exec",
        b"/images/load",
        b"..",
        b"/",
        b"//",
        b"%2f",
        b"%2e%2e",
        b"%252f",
        b"%00",
        b"\\",
        b";",
        b"#",
        b"\xc0\xaf",
        b"\n",
    ]
)


def read(
    method: str = "GET",
    path: bytes = b"/services/engine/workers",
    query: bytes = b"",
    *headers: tuple[bytes, bytes],
) -> Action:
    return read_action(method, path, query, headers, SERVICES)


def read_or_refusal(method: str, path: bytes) -> Action | Refused:
    try:
        return read(method, path)
    except Refused as refused:
        return refused


def test_the_three_requests_pass() -> None:
    assert read() == Action("list", "engine")
    assert read("POST") == Action("start", "engine")
    path = b"/services/encoder/workers/12"
    assert read("DELETE", path, b"", (b"Content-Length", b"0")) == Action("stop", "encoder", 12)


@given(METHODS, st.lists(PARTS, max_size=8).map(b"".join) | st.binary(max_size=60))
@example("POST", b"/services/engine/workers/../../../v1.41/containers/create")
@example("POST", b"/services/engine%2fworkers")
@example("POST", b"/services/engine/workers/")
@example("DELETE", b"/services/engine/workers/1\n")
@example("DELETE", b"/services/engine/workers/01")
@example("DELETE", "/services/engine/workers/\u0661".encode())
@example("GET", b"//services/engine/workers")
def test_nothing_else_passes(method: str, path: bytes) -> None:
    action = read_or_refusal(method, path)
    if isinstance(action, Refused):
        assert action.refusal.kind in ("path", "service", "method")
        return
    number = path.rpartition(b"/")[2]
    is_stop = method == "DELETE" and path.removesuffix(number) in PREFIXES and number.isdigit()
    assert is_stop or (method in ("GET", "POST") and path in PATHS)
    assert action.service in SERVICES


@pytest.mark.parametrize(
    ("method", "path", "query", "header", "status", "kind"),
    [
        ("POST", b"", b"", (b"Transfer-Encoding", b"chunked"), 400, "body"),
        ("GET", b"", b"", (b"transfer-encoding", b"identity"), 400, "body"),
        ("POST", b"", b"", (b"content-length", b"17"), 400, "body"),
        ("POST", b"", b"", (b"content-length", b"0, 17"), 400, "body"),
        ("POST", b"", b"Image=other", None, 400, "query"),
        ("DELETE", b"/services/engine/workers/1", b"force=1", None, 400, "query"),
        ("GET", b"/version", b"", None, 404, "path"),
        ("GET", b"/services/gateway/workers", b"", None, 403, "service"),
        ("GET", b"/services/Engine/workers", b"", None, 403, "service"),
        ("DELETE", b"", b"", None, 405, "method"),
        ("POST", b"/services/engine/workers/1", b"", None, 405, "method"),
    ],
)
def test_refusals_name_what_is_wrong(
    method: str,
    path: bytes,
    query: bytes,
    header: tuple[bytes, bytes] | None,
    status: int,
    kind: str,
) -> None:
    headers = () if header is None else (header,)
    with pytest.raises(Refused) as raised:
        read(method, path or b"/services/engine/workers", query, *headers)
    assert (raised.value.status, raised.value.refusal.kind) == (HTTPStatus(status), kind)
    assert raised.value.refusal.message
