"""JSON for messages that clients write or read, msgpack for those of workers alone."""

import msgspec

to_json = msgspec.json.Encoder().encode


to_msgpack = msgspec.msgpack.Encoder().encode


def is_packed(data: bytes) -> bool:
    """JSON objects start with a brace, after white space at most; msgpack maps never do."""
    return bool(data) and data[0] >= 0x80
