"""Orders of clients for batches: the same JSON over HTTP and over NATS.

BatchOrder    pm.batch.<id>           JetStream publish
(empty)       pm.batch.<id>.cancel    JetStream publish
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

MAX_BATCH_ID_LEN = 64
MIN_LIFE_S, MAX_LIFE_S = 3600, 2_592_000
Life = Annotated[int, Meta(ge=MIN_LIFE_S, le=MAX_LIFE_S)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class OutputExpiry(Struct, frozen=True, forbid_unknown_fields=True):
    seconds: Life
    """Seconds for which the results are stored after the end of the window, at most for
    `batch.ttl_s` after the batch was created."""
    anchor: Literal["created_at"] = "created_at"


class BatchOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """Order to run a batch, with exactly one of `input_file_id` and `lines`."""

    endpoint: Annotated[str, Meta(max_length=128)]
    """Path of the endpoint that each line calls, such as `/v1/chat/completions`."""
    input_file_id: Annotated[str, Meta(max_length=128)] | None = None
    """Id of a file of JSON lines with the purpose `batch`."""
    lines: list[Raw] | None = None
    """The lines themselves, each an object as in a file, if all of them fit into the message."""
    completion_window: Annotated[str, Meta(max_length=16)] = "24h"
    """Time in which the batch must end: a number with `m`, `h` or `d`, such as `24h`, up to
    `batch.max_window_h`. Lines without a result then get the error `batch_expired`."""
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None


decode_batch_order = msgspec.json.Decoder(BatchOrder).decode
