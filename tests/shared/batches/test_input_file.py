"""Input files of batches: lines are cut from pieces of any size, and hostile files are refused."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.batches.input_file import MAX_BLANK, InputCheck, InputLimits, LineCutter, read_line
from shared.errors import MAX_MESSAGE_LEN
from shared.protocol.batch_log import LineError

CHAT = "/v1/chat/completions"
LIMITS = InputLimits(CHAT, {"m"}, 1000, 10_000)
MIB = 2**20


def line(custom_id: object = 1, body: bytes = b'{"model":"m"}') -> bytes:
    head = f'{{"custom_id":"{custom_id}","method":"POST","url":"{CHAT}","body":'
    return head.encode() + body + b"}"


BAD_UTF8 = line().replace(b'"1"', b'"\xff"')


def check(data: bytes, piece: int = 64, limits: InputLimits = LIMITS) -> InputCheck:
    done = InputCheck(limits)
    for start in range(0, max(1, len(data)), piece):
        done.feed(data[start : start + piece], is_last=start + piece >= len(data))
        if done.is_over:
            break
    return done


def one_error(data: bytes) -> LineError:
    (error,) = check(data).errors
    return error


@given(
    st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b"")), max_size=9),
    st.integers(1, 7),
    st.booleans(),
)
def test_lines_and_their_positions_do_not_depend_on_the_pieces(
    lines: list[bytes], piece: int, ends_with_break: bool
) -> None:
    data = b"\n".join(lines) + (b"\n" if ends_with_break else b"")
    cutter = LineCutter(100)
    cut = [
        raw
        for start in range(0, max(1, len(data)), piece)
        for raw in cutter.feed(data[start : start + piece], is_last=start + piece >= len(data))
    ]
    expected = data.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert [raw.content for raw in cut] == expected
    assert [raw.number for raw in cut] == list(range(1, len(cut) + 1))
    for raw in cut:
        assert data[raw.offset :].startswith(raw.content)
        again = LineCutter(100, raw.number, raw.offset)
        assert next(again.feed(data[raw.offset :], is_last=True)) == raw


def test_a_good_file_has_no_errors() -> None:
    for separator in (b"\n", b"\r\n"):
        for end in (b"", separator, separator * 3):
            done = check(separator.join(line(i) for i in range(20)) + end)
            assert (done.errors, done.num_lines) == ([], 20)
    # Only `\n` ends a line: JSON strings may contain other separators.
    separators = line(body='{"model":"m","x":"\u2028\u2029\x85"}'.encode())
    assert [raw.content for raw in LineCutter(1000).feed(separators, is_last=True)] == [separators]
    assert (check(separators).errors, check(separators).num_lines) == ([], 1)
    parsed = read_line(line("a", b'{"model":"m","n":[1]}') + b"\r")
    assert (parsed.custom_id, parsed.model, parsed.body) == ("a", "m", b'{"model":"m","n":[1]}')


@pytest.mark.parametrize(
    ("data", "code", "number", "param", "message"),
    [
        (b"", "empty_file", None, None, "no lines"),
        (b"\n\r\n", "empty_file", None, None, "no lines"),
        (b"\xef\xbb\xbf" + line(), "invalid_file", 1, None, "byte order mark"),
        (b"PK\x03\x04" + bytes(99), "invalid_file", 1, None, "compressed"),
        (b"\x1f\x8b\x08" + bytes(99), "invalid_file", 1, None, "compressed"),
        (line().decode().encode("utf-16"), "invalid_file", 1, None, "UTF-8"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "invalid_file", 1, None, "UTF-8"),
        (b"%PDF-1.7\n" + line(), "invalid_json_line", 1, None, "not valid JSON"),
        (line(1) + b"\n" + line("\\ud800"), "invalid_json_line", 2, None, "byte 21 is wrong"),
        (line(1) + b"\r" + line(2), "invalid_json_line", 1, None, "not valid JSON"),
        (line(1) + b"\n\xef\xbb\xbf" + line(2), "invalid_json_line", 2, None, "not valid JSON"),
        (line(1) + b"\n\n" + line(2), "blank_line", 2, None, "blank"),
        (line(1) + b"\n" + BAD_UTF8, "invalid_json_line", 2, None, "UTF-8 at byte 15"),
        (line(1) + b"\n" + line(1), "duplicate_custom_id", 2, "custom_id", "earlier line"),
        (line(1) + b"\n{", "invalid_json_line", 2, None, "not valid JSON"),
        (b"[1]", "invalid_line", 1, None, "must be an object"),
        (line(body=b"[" * 400), "invalid_line", 1, "body", "64 levels"),
        (line(body=b"[1]"), "invalid_line", 1, "body", "must be an object"),
        (line(body=b"{}"), "invalid_line", 1, "body.model", "missing"),
        (line(body=b'{"model":"other"}'), "model_not_found", 1, "body.model", "'other'"),
        (line(body=b'{"model":"m","stream":true}'), "invalid_line", 1, "body.stream", "streamed"),
        (line(""), "invalid_line", 1, "custom_id", "1 to 512"),
        (line("x" * 513), "invalid_line", 1, "custom_id", "1 to 512"),
        (line().replace(b"POST", b"GET"), "invalid_method", 1, "method", "POST"),
        (line().replace(b"chat/", b""), "mismatched_endpoint", 1, "url", CHAT),
        (line().replace(b'"method":"POST",', b""), "invalid_line", 1, "method", "missing"),
        (line().replace(b'"url"', b'"url":"","url"'), "invalid_line", 1, "url", "twice"),
        (line(body=b'{"model":"m","model":"m"}'), "invalid_line", 1, "body.model", "twice"),
        (line(body=b'{"model":"m","n":"model","n":1}'), "invalid_line", 1, "body.n", "twice"),
        (line()[:-1] + b',"tenant":"other"}', "invalid_line", 1, "tenant", "unknown field"),
        (line("x" * 10_000), "line_too_long", 1, None, "10000"),
    ],
)  # fmt: skip
def test_a_fault_has_one_error_with_its_line(
    data: bytes, code: str, number: int | None, param: str | None, message: str
) -> None:
    error = one_error(data)
    assert (error.code, error.line, error.param) == (code, number, param)
    assert message in error.message


def test_names_of_fields_in_a_body_are_not_taken_for_fields() -> None:
    body = b'{"model":"m","messages":[{"custom_id":1,"url":2,"body":3,"method":"\\"body\\""}]}'
    assert check(line(body=body)).errors == []


def test_a_number_of_many_digits_next_to_names_of_fields_is_read() -> None:
    body = b'{"model":"m","url":%b}' % (b"1" * 5000)
    assert check(line(body=body)).errors == []


def test_errors_are_short_whatever_the_names_in_a_line() -> None:
    long = b"x" * 5000
    for data in (
        line(body=b'{"model":"%b"}' % long),
        line()[:-1] + b',"%b":1}' % long,
        line(body=b'{"model":"m","n":"model","%b":1,"%b":2}' % (long, long)),
    ):
        (error,) = check(data, limits=InputLimits(CHAT, {"m"}, 1000, 100_000)).errors
        assert len(error.message) == MAX_MESSAGE_LEN + 1
        assert len(error.param or "") <= MAX_MESSAGE_LEN + 1


def test_the_first_hundred_errors_are_reported() -> None:
    done = check(b"\n".join([b"[]"] * 500))
    assert [error.line for error in done.errors] == list(range(1, 101))
    assert done.is_over


def test_a_file_with_too_many_lines_is_not_read_to_its_end() -> None:
    done = check(b"\n".join(line(i) for i in range(1100)))
    assert [(error.code, error.line) for error in done.errors] == [("too_many_lines", 1001)]


def test_a_long_line_is_never_held_as_a_whole() -> None:
    done = InputCheck(InputLimits(CHAT, {"m"}, 1000, MIB))
    piece = b"x" * (MIB // 2)
    tracemalloc.start()
    while not done.is_over:
        done.feed(piece, is_last=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [error.code for error in done.errors] == ["line_too_long"]
    assert peak < 4 * MIB


def test_a_file_of_blank_lines_is_not_read_to_its_end() -> None:
    for start in (b"", line() + b"\n"):
        assert check(start + b"\n" * MAX_BLANK).is_over is False
        done = check(start + b"\n" * (MAX_BLANK + 1) + line() * 1000)
        assert done.is_over
        (error,) = done.errors
        assert (error.code, error.line) == ("blank_line", start.count(b"\n") + 1)
