"""Forms as browsers and OpenAI's client send them, and bytes that are none."""

import contextlib

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from workers.gateway.core.multipart import parse_form

TYPE = "multipart/form-data; boundary=XX"


def encode(data: dict[str, str], files: dict[str, tuple[str, bytes]]) -> tuple[bytes, str]:
    """The form as httpx writes it."""
    request = httpx.Request("POST", "http://pagemill", data=data, files=files)
    return request.read(), request.headers["content-type"]


@given(st.binary(max_size=300), st.text(max_size=40))
def test_fields_and_files_come_back(content: bytes, text: str) -> None:
    body, kind = encode({"model": "m", "prompt": text}, {"file": ('a"b;.wav', content)})
    values, files = parse_form(body, kind)
    assert values == {"model": ["m"], "prompt": [text]}
    assert files == {"file": [content]}


def test_files_may_have_one_name() -> None:
    body = 2 * PART.replace(b'"a"', b'"a"; filename="b"') + b"--XX--"
    assert parse_form(body, TYPE).files == {"a": [b"b", b"b"]}


@given(st.integers(0, 400))
def test_a_body_that_ends_early_is_refused(length: int) -> None:
    body, kind = encode({"model": "m"}, {"file": ("a.wav", b"\r\n--\r\n" * 9)})
    cut = body[: min(length, len(body) - 5)]
    with pytest.raises(InvalidRequest, match="not valid multipart/form-data"):
        parse_form(cut, kind)


@given(st.binary(max_size=200), st.binary(max_size=60))
def test_other_bytes_raise_nothing_else(head: bytes, content: bytes) -> None:
    for body in (head, b"--XX\r\n" + head + b"\r\n\r\n" + content + b"\r\n--XX--"):
        with contextlib.suppress(InvalidRequest):
            parse_form(body, TYPE)


PART = b'--XX\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n'
BAD = [
    (b"", TYPE, "ends before its last boundary"),
    (PART + b"--XX--", "multipart/form-data", "no boundary"),
    (PART * 65 + b"--XX--", TYPE, "more than 64 parts"),
    (b"--XX\r\nContent-Type: a/b\r\n\r\nb\r\n--XX--", TYPE, "no name"),
    (b"--XX\r\n" + b"X: y\r\n" * 1000 + b"\r\nb\r\n--XX--", TYPE, "more than 4096 bytes"),
    (PART.replace(b"\r\nb", b"\r\n\xff") + b"--XX--", TYPE, "a is not UTF-8"),
    (b"", f"multipart/form-data; boundary*{'9' * 5000}=b", "more than 4096 characters"),
    (b"", "multipart/form-data; boundary*=b; boundary*0=c", "content-type is there both whole"),
    (PART.replace(b'"a"', b'"a"; filename*=b; filename*0=c'), TYPE, "both whole and in pieces"),
    (PART.replace(b'="a"', b"*=a; name*0=b"), TYPE, "content-disposition is there both whole"),
    *(
        (PART.replace(b'"a"', b'"a"; filename*=' + name) + b"--XX--", TYPE, "utf-8, iso-8859-1")
        for name in (b"idna''a", b"punycode''%ff", b"a%00''b", b"unicode_escape''%5cudc80")
    ),
]


@pytest.mark.parametrize(("body", "kind", "message"), BAD)
def test_the_fault_of_a_form_is_named(body: bytes, kind: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_form(body, kind)
