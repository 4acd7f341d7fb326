"""Limits on the number and depth of values in a client's bytes, before they are decoded. Pure.

A decoder makes objects on an event loop: 8 MB of nested empty lists were seen to hold one for 7 s.
These walks make none, and end as soon as a limit is exceeded. Bytes that are malformed pass, up to
where they are: the decoder tells what is wrong with them.
"""

import re

import msgspec

from shared.protocol.msgpack_formats import FORMATS, RUN_LEN, RUN_OF_SCALARS, step

# Below `shared.codec.envelope.MAX_NODES`, which holds for the tasks that a request becomes.
MAX_VALUES = 50_000
"""Limit on strings, arrays and objects; in msgpack also on numbers outside of long runs."""
MAX_NUMBERS = 2**20
"""Limit on all other values, which take little time: a prompt may have as many token ids."""
# More than any field may have by itself, so that the errors of fields are more exact.
MAX_DEPTH = 64

# Up to the next bracket or the end of the next string. A string without an end has no match.
_JSON_TOKEN = re.compile(
    rb'[^"\[\]{}]*+(?:(?P<string>"[^"\\]*+(?:\\.[^"\\]*+)*+")|(?P<open>[\[{])|(?P<close>[\]}]))',
    re.DOTALL,
)


def check_msgpack(data: bytes) -> None:
    """Raise ValidationError for a limit that the bytes exceed."""
    walk_msgpack(data)


def check_json(data: bytes, max_values: int = MAX_VALUES) -> None:
    """Raise ValidationError for a limit that the text exceeds."""
    num_brackets = data.count(b"[") + data.count(b"{")
    num_quotes = data.count(b'"')
    # Nearly all requests end here, although these numbers include what is within strings.
    if (
        num_brackets > MAX_DEPTH
        or num_brackets + num_quotes // 2 > max_values
        or data.count(b",") > MAX_NUMBERS
    ):
        walk_json(data, max_values)


def walk_msgpack(data: bytes, max_values: int = MAX_VALUES) -> bool:
    """Return whether the bytes are one whole value of msgpack.

    Raises ValidationError, which names the field of the outermost map, if a limit is exceeded
    before the end or the first malformed byte.
    """
    offset = num_values = num_numbers = 0
    key = (0, 0)
    pending = [1]  # values that are left, per open container
    while pending:
        left = pending[-1]
        if not left:
            pending.pop()
            continue
        if left >= RUN_LEN and (run := RUN_OF_SCALARS.match(data, offset)):
            pending[-1] -= RUN_LEN
            num_numbers += RUN_LEN
            offset = run.end()
            if num_numbers > MAX_NUMBERS:
                raise _too_many(MAX_NUMBERS, _packed_key(data, key))
            continue
        start, found = offset, step(data, offset)
        if found is None:
            return False
        offset, children, _ = found
        if len(pending) == 2 and left % 2 == 0:
            key = (start, offset)
        pending[-1] = left - 1
        num_values += 1
        if num_values > max_values:
            raise _too_many(max_values, _packed_key(data, key))
        if children:
            pending.append(children)
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
        num_commas += data.count(b",", offset, start)
        if depth == 1 and data.find(b":", offset, start) >= 0:
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
