"""Limits on the number and depth of values in a client's bytes, before they are decoded. Pure.

A decoder creates objects and blocks the event loop, for example for 7 s with 8 MB of nested empty
lists. These walks create no objects, and end as soon as a limit is exceeded. They end at malformed
bytes without an error, because the decoder then raises a better one.
"""

import re

import msgspec

from shared.protocol.msgpack_formats import FORMATS, RUN_LEN, RUN_OF_SCALARS, step

# Tasks are counted in the same way, up to the higher limit `shared.codec.envelope.MAX_NODES`.
MAX_VALUES = 50_000
"""Limit on strings, arrays and objects, and on other values outside of runs of RUN_LEN in an
array."""
MAX_NUMBERS = 2**20
"""Limit on other values within runs, which take little time: the token ids of a prompt."""
MAX_EXPONENTS = 10_000
"""Limit on the numbers of a JSON text with exponents of three digits. A decoder takes 10 µs for
such a number, so 6 MB of 1e308 would block an event loop for 10 s."""
MAX_BARE_BYTES = 2**24
"""Limit on the bytes of a JSON text outside of strings. Numbers of hundreds of digits are slow."""
MAX_ESCAPES = 2**22
"""Limit on escapes in the strings of a JSON text. More do not fit into a message of the bus."""
# Higher than the limit of any field, because errors of fields are more exact.
MAX_DEPTH = 64

LARGE_BYTES = 2**12

# Up to the next bracket or the end of the next string. A string without an end has no match.
_JSON_TOKEN = re.compile(
    rb'[^"\[\]{}]*+(?:(?P<string>"[^"\\]*+(?:\\.[^"\\]*+)*+")|(?P<open>[\[{])|(?P<close>[\]}]))',
    re.DOTALL,
)
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789E", b"000000000e")
_LONG_EXPONENTS = (b"e000", b"e+000", b"e-000")
_SEPARATORS_AS_SPACES = bytes.maketrans(b",:", b"  ")
_NO_SCALARS = frozenset((b"", b",", b", ", b":", b": "))
"""Usual text between two strings or brackets that contains no value."""


def check_msgpack(data: bytes) -> None:
    """Raise ValidationError for a limit that the bytes exceed."""
    walk_msgpack(data)


def check_json(data: bytes, max_values: int = MAX_VALUES) -> None:
    """Raise ValidationError for a limit that the text exceeds."""
    num_arrays, num_objects, num_quotes, num_commas, num_backslashes = count_bytes(data, b'[{",\\')
    num_brackets = num_arrays + num_objects
    if num_backslashes > 2 * MAX_ESCAPES:
        raise _error(f"must have at most {MAX_ESCAPES} escapes", b"")
    num_tokens = num_brackets + num_quotes // 2
    # Each of the other values follows a bracket or a comma. Between two tokens, which include the
    # closing brackets, at most RUN_LEN of them count.
    num_others = min(num_brackets + num_commas, RUN_LEN * (num_brackets + num_tokens))
    # Nearly all requests pass here, although these numbers include the content of strings.
    if (
        num_brackets > MAX_DEPTH
        or num_tokens + num_others > max_values
        or num_commas > MAX_NUMBERS
        or len(data) > MAX_BARE_BYTES
        or (num_brackets + num_commas > MAX_EXPONENTS and _num_exponents(data) > MAX_EXPONENTS)
    ):
        walk_json(data, max_values)


def count_bytes(data: bytes, values: bytes) -> list[int]:
    """Return the number of occurrences of each of `values`.

    NumPy takes a fifth of the time for large bodies, which block a gateway's event loop.
    """
    if len(data) < LARGE_BYTES:
        return [data.count(byte) for byte in values]
    # Imported late, because workers first set the number of its threads.
    import numpy as np

    array = np.frombuffer(data, np.uint8)
    return [int(np.count_nonzero(array == byte)) for byte in values]


def walk_msgpack(data: bytes, max_values: int = MAX_VALUES) -> bool:
    """Return whether the bytes are exactly one value of msgpack.

    Raises ValidationError, with the field of the outermost map, if a limit is exceeded before the
    end or the first malformed byte.
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
        start, value = offset, step(data, offset)
        if value is None:
            return False
        offset, children, form = value
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

    Raises ValidationError, with the field of the outermost object, like `walk_msgpack`.
    """
    offset = depth = 0
    key = last_string = b""
    counts = _JsonCounts(max_values)
    while token := _JSON_TOKEN.match(data, offset):
        start, stop = token.start(token.lastgroup or 0), token.end()
        if depth == 1 and data.find(b":", offset, start) >= 0:
            key = last_string
        if token.lastgroup == "close":
            depth -= 1
        elif token.lastgroup == "string":
            last_string = data[start + 1 : stop - 1] if depth == 1 else b""
        else:
            depth += 1
        counts.add(data, offset, start, key, is_value=token.lastgroup != "close")
        offset = stop
        if depth > MAX_DEPTH:
            raise _too_deep(key)
        if depth < 0:
            return False
    counts.add(data, offset, len(data), key, is_value=False)
    return depth == 0 and data.find(b'"', offset) < 0


class _JsonCounts:
    """Counts of the values in the read part of a JSON text."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._num_values = self._num_commas = self._num_exponents = self._num_bare = 0

    def add(self, data: bytes, start: int, end: int, key: bytes, *, is_value: bool) -> None:
        """Count the text between two strings or brackets, and the second one if it is a value.

        Raises ValidationError with the field `key`.
        """
        self._num_bare += end - start
        if self._num_bare > MAX_BARE_BYTES:
            raise _error(f"must have at most {MAX_BARE_BYTES} bytes outside of strings", key)
        self._num_values += is_value
        gap = data[start:end]
        if gap not in _NO_SCALARS:
            num_commas = gap.count(b",")
            self._num_commas += num_commas
            self._num_values += _num_scalars(gap, num_commas)
            self._num_exponents += _num_exponents(gap)
        elif gap:
            self._num_commas += gap[0] == 0x2C
        if self._num_values > self._max_values:
            raise _too_many(self._max_values, key)
        if self._num_commas > MAX_NUMBERS:
            raise _too_many(MAX_NUMBERS, key)
        if self._num_exponents > MAX_EXPONENTS:
            raise _error(f"must have at most {MAX_EXPONENTS} exponents of three digits", key)


def _num_exponents(text: bytes) -> int:
    zeros = text.translate(_DIGITS_AS_ZEROS)
    return sum(map(zeros.count, _LONG_EXPONENTS))


def _num_scalars(gap: bytes, num_commas: int) -> int:
    """Return the number of values between two strings or brackets, without those in runs."""
    if num_commas >= RUN_LEN:
        return num_commas % RUN_LEN
    return len(gap.translate(_SEPARATORS_AS_SPACES).split())


def _packed_key(data: bytes, key: tuple[int, int]) -> bytes:
    """Return the string at this place; empty if the key is not a string."""
    start, stop = key
    form = FORMATS[data[start]]
    is_string = 0xA0 <= data[start] <= 0xBF or data[start] in (0xD9, 0xDA, 0xDB)
    return data[start + 1 + form.length_bytes : stop] if is_string else b""


def _too_many(limit: int, key: bytes) -> msgspec.ValidationError:
    return _error(f"must have at most {limit} values", key)


def _too_deep(key: bytes) -> msgspec.ValidationError:
    return _error(f"must have at most {MAX_DEPTH} levels of nesting", key)


def _error(complaint: str, key: bytes) -> msgspec.ValidationError:
    """Return an error in the form of msgspec's own."""
    name = key.decode(errors="replace")
    return msgspec.ValidationError(f"{complaint} - at `$.{name}`" if name else complaint)
