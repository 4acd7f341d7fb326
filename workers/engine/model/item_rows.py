"""Rows of items in a batch."""

import bisect

from torch import Tensor

from shared.protocol.multimodal import PlaceholderRange
from workers.engine.transfers import upload


def scatter_embeddings(
    rows: Tensor, embedding: Tensor, placeholder: PlaceholderRange, start: int
) -> None:
    """Write the embeddings of the placeholder's tokens [start, start + len(rows)) into `rows`.

    `rows` are [num_tokens, width] and `embedding` is [num_embeds, width].
    """
    if placeholder.is_embed is None:
        rows[:] = embedding[start : start + len(rows)]
        return
    indexes = placeholder.embed_indexes()
    first = bisect.bisect_left(indexes, start)
    last = bisect.bisect_left(indexes, start + len(rows))
    positions = upload([index - start for index in indexes[first:last]], rows.device)
    rows[positions] = embedding[first:last]
