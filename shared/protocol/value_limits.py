"""Limits on the number and depth of values in a client's bytes, before they are decoded. Pure.

A decoder makes objects on an event loop: 8 MB of nested empty lists were seen to hold one for 7 s.
These walks make none, and end as soon as a limit is exceeded. Bytes that are malformed pass, up to
where they are: the decoder tells what is wrong with them.
"""

import re

import msgspec

from shared.protocol.msgpack_formats import FORMATS, RUN_LEN, RUN_OF_SCALARS, step

# The tasks that a request becomes are counted in the same way, up to a higher limit,
# `shared.codec.envelope.MAX_NODES`.
MAX_VALUES = 50_000
"""Limit on strings, arrays and objects, and on other values outside of runs of RUN_LEN in an
array."""
MAX_NUMBERS = 2**20
"""Limit on other values within runs, which take little time: the token ids of a prompt."""
# More than any field may have by itself, so that the errors of fields are more exact.
MAX_DEPTH = 64

# Up to the next bracket or the end of the next string. A string without an end has no match.
_JSON_TOKEN = re.compile(
    rb'[^"\[\]{}]*+(?:(?P<string>"[^"\\]*+(?:\\.[^"\\]*+)*+")|(?P<open>[\[{])|(?P<close>[\]}]))',
    re.DOTALL,
)
_JSON_SCALAR = re.compile(rb"[^\s,:]+")
_NO_SCALARS = frozenset((b"", b",", b", ", b":", b": "))
"""Usual text between two strings or brackets, without another value."""


def check_msgpack(data: bytes) -> None:
    """Raise ValidationError for a limit that the bytes exceed."""
    walk_msgpack(data)


def check_json(data: bytes, max_values: int = MAX_VALUES) -> None:
    """Raise ValidationError for a limit that the text exceeds."""
    num_brackets = data.count(b"[") + data.count(b"{")
    num_quotes, num_commas = data.count(b'"'), data.count(b",")
    num_tokens = num_brackets + num_quotes // 2
    # Each of the other values is behind a bracket or a comma, and RUN_LEN of them count at most
    # between two tokens, which include the closing brackets.
    num_others = min(num_brackets + num_commas, RUN_LEN * (num_brackets + num_tokens))
    # Nearly all requests end here, although these numbers include what is within strings.
    if num_brackets > MAX_DEPTH or num_tokens + num_others > max_values or num_commas > MAX_NUMBERS:
        walk_json(data, max_values)


def walk_msgpack(data: bytes, max_values: int = MAX_VALUES) -> bool:
    """Return whether the bytes are one whole value of msgpack.

    Raises ValidationError, which names the field of the outermost map, if a limit is exceeded
    before the end or the first malformed byte.
    """
    offset = num_values = num_numbers = 0
    key = (0, 0)
    pending = [1]  # values that are left, per open container
    maps = [False]  # whether it is a map, per open container
    while pending:
        left = pending[-1]
        if not left:
            pending.pop()
            maps.pop()
            continue
        if left >= RUN_LEN and not maps[-1] and (run := RUN_OF_SCALARS.match(data, offset)):
            pending[-1] -= RUN_LEN
            num_numbers += RUN_LEN
            offset = run.end()
            if num_numbers > MAX_NUMBERS:
                raise _too_many(MAX_NUMBERS, _packed_key(data, key))
            continue
        start, found = offset, step(data, offset)
        if found is None:
            return False
        offset, children, form = found
        if len(pending) == 2 and left % 2 == 0:
            key = (start, offset)
        pending[-1] = left - 1
        num_values += 1
        if num_values > max_values:
            raise _too_many(max_values, _packed_key(data, key))
        if children:
            pending.append(children)
            maps.append(form.is_map)
            if len(pending) > MAX_DEPTH + 1:
                raise _too_deep(_packed_key(data, key))
    return offset == len(data)


def walk_json(data: bytes, max_values: int = MAX_VALUES) -> bool:
    """Return whether all strings and brackets of the JSON text are closed.

    Raises ValidationError, which names the field of the outermost object, as `walk_msgpack` does.
    """
    offset = depth = num_values = num_commas = 0
    key = last_string = b""
    while token := _JSON_TOKEN.match(data, offset):
        start, stop = token.start(token.lastgroup or 0), token.end()
        gap = data[offset:start]
        num_before = gap.count(b",")
        num_commas += num_before
        num_values += _num_scalars(gap, num_before)
        if depth == 1 and b":" in gap:
            key = last_string
        if token.lastgroup == "close":
            depth -= 1
        else:
            num_values += 1
            if token.lastgroup == "string":
                last_string = data[start + 1 : stop - 1] if depth == 1 else b""
            else:
                depth += 1
        offset = stop
        if num_values > max_values:
            raise _too_many(max_values, key)
        if num_commas > MAX_NUMBERS:
            raise _too_many(MAX_NUMBERS, key)
        if depth > MAX_DEPTH:
            raise _too_deep(key)
        if depth < 0:
            return False
    num_commas += data.count(b",", offset)
    if num_commas > MAX_NUMBERS:
        raise _too_many(MAX_NUMBERS, key)
    return depth == 0 and data.find(b'"', offset) < 0


def _num_scalars(gap: bytes, num_commas: int) -> int:
    """Return the number of values between two strings or brackets, without those in runs."""
    if gap in _NO_SCALARS:
        return 0
    return num_commas % RUN_LEN if num_commas >= RUN_LEN else len(_JSON_SCALAR.findall(gap))


def _packed_key(data: bytes, key: tuple[int, int]) -> bytes:
    """Return the string at this place; empty for a key that is none."""
    start, stop = key
    form = FORMATS[data[start]]
    is_string = 0xA0 <= data[start] <= 0xBF or data[start] in (0xD9, 0xDA, 0xDB)
    return data[start + 1 + form.length_bytes : stop] if is_string else b""


def _too_many(limit: int, key: bytes) -> msgspec.ValidationError:
    return _error(f"Expected at most {limit} values", key)


def _too_deep(key: bytes) -> msgspec.ValidationError:
    return _error(f"Expected at most {MAX_DEPTH} levels of nesting", key)


def _error(complaint: str, key: bytes) -> msgspec.ValidationError:
    """Return an error in the form of msgspec's own."""
    name = key.decode(errors="replace")
    return msgspec.ValidationError(f"{complaint} - at `$.{name}`" if name else complaint)
