"""A form that is parsed while it arrives, cut anywhere, is the form that is parsed at once."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from tests.gateway.core.test_multipart import BAD, PART, TYPE, encode
from workers.gateway.core.multipart import FileHead, FormEvent, FormStream, FormValue

BOUNDARY = b"\r\n--XX"


def parse(body: bytes, kind: str, sizes: list[int]) -> list[FormEvent]:
    """Return the events of a body that arrives in pieces of these sizes, again and again."""
    form = FormStream(kind)
    events: list[FormEvent] = []
    at = number = 0
    while at < len(body):
        size = sizes[number % len(sizes)]
        events += form.feed(body[at : at + size])
        at, number = at + size, number + 1
    assert form.is_complete
    return events


@given(
    st.lists(st.sampled_from([b"\r", b"\n", b"-", b"XX", BOUNDARY[:-1], b"abc"])).map(b"".join),
    st.text(max_size=40),
    st.lists(st.integers(1, 70), min_size=1, max_size=5),
)
def test_the_events_do_not_depend_on_the_pieces(
    content: bytes, text: str, sizes: list[int]
) -> None:
    assume(BOUNDARY not in content)
    body, kind = encode({"purpose": text}, {"file": ('a"b;.mp4', content)})
    for upload, upload_type in ((body, kind), (PART + _file(content), TYPE)):
        events = parse(upload, upload_type, sizes)
        values = [event for event in events if isinstance(event, FormValue)]
        assert values == [FormValue("purpose", text) if upload is body else FormValue("a", "b")]
        assert [event.field for event in events if isinstance(event, FileHead)] == ["file"]
        assert b"".join(event for event in events if isinstance(event, bytes)) == content


def _file(content: bytes) -> bytes:
    head = b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    return head + content + b"\r\n--XX--"


def test_no_more_than_a_boundary_is_kept_of_a_file() -> None:
    form = FormStream(TYPE)
    form.feed(_file(b"")[: -len(b"\r\n--XX--")])
    for _ in range(100):
        events = form.feed(bytes(10_000))
        assert sum(len(event) for event in events if isinstance(event, bytes)) >= 9_990


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        *((body, kind, "not valid") for body, kind, _ in BAD[1:6]),
        (b"hello, hello", TYPE, "does not begin with its boundary"),
        (b"--XXY\r\n", TYPE, "not followed by a line"),
        (PART.replace(b"b\r\n", b"b" * 20_000), TYPE, "more than 16384 bytes"),
        (b"--XX\r\nX: " + bytes(5000), TYPE, "more than 4096 bytes"),
    ],
)
def test_the_fault_of_a_form_is_named(body: bytes, kind: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        FormStream(kind).feed(body)
