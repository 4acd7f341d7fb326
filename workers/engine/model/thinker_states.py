"""Hidden states of a thinker, for a talker that speaks answers about media.

The engine that writes an answer does not send these states. The talker has a copy of the thinker,
whole or its first layers, and computes them again in one pass.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shared.models.families.qwen_omni import ThinkerAdapter
from shared.models.language import PromptPositions
from shared.models.registry import adapt
from shared.models.tower import Tower
from shared.models.tower_adapter import refuse
from workers.engine.core.sequence import Item, SpokenText
from workers.engine.model.item_rows import scatter_embeddings
from workers.engine.transfers import upload, upload_parts


class ThinkerStates:
    """A thinker without its head, and its tower unless encoders compute all embeddings."""

    def __init__(self, model: Any, has_tower: bool, num_layers: int | None = None) -> None:
        """Keep `num_layers` layers and no norm after them; by default all of the decoder."""
        family = adapt(model)
        assert isinstance(family, ThinkerAdapter)
        self._family = family
        self._num_layers = num_layers
        assert family.tower is not None
        self._tower = Tower(family.tower, model) if has_tower else None
        if num_layers is not None and num_layers < len(family.decoder.layers):
            family.decoder.layers = family.decoder.layers[:num_layers]
            family.decoder.norm = nn.Identity()

    def check(self, speech: SpokenText) -> None:
        """Check the items of a prompt. Raises UnsupportedContent or InvalidRequest."""
        self._family.check(speech)
        if self._tower is None and any(item.embedding is None for item in speech.items):
            refuse("an item has no embedding, and the talker has no tower")

    def locate(self, speech: SpokenText) -> PromptPositions | None:
        """Return the positions of a prompt; None if they are the tokens' indexes."""
        return self._family.locate(speech)

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary."""
        num_tokens: int = self._family.input_embeddings.num_embeddings
        return num_tokens

    def embed(self, token_ids: list[int]) -> Tensor:
        ids = upload(token_ids, self._family.model.device)
        embeddings: Tensor = self._family.input_embeddings(ids)
        return embeddings

    def run(self, speech: SpokenText, token_ids: list[int]) -> Tensor:
        """Return the hidden states [len(token_ids), hidden_size] of a prompt and its answer.

        `token_ids` has the prompt at least up to the end of its last item.
        """
        embeddings = self.embed(token_ids)
        width, levels = embeddings.shape[1], None
        for item, embedding in zip(speech.items, self._encode(speech.items), strict=True):
            place = item.placeholder
            span = slice(place.offset, place.offset + place.length)
            scatter_embeddings(embeddings[span], embedding[:, :width], place, 0)
            if embedding.shape[1] > width:
                if levels is None:
                    levels = embeddings.new_zeros(len(embeddings), embedding.shape[1] - width)
                scatter_embeddings(levels[span], embedding[:, width:], place, 0)
        deepstack = None
        if levels is not None:
            deepstack = levels.view(len(levels), -1, width).transpose(0, 1)
            # The last layer's own output comes before its features are added.
            deepstack = deepstack[: None if self._num_layers is None else self._num_layers - 1]
        positions = self._positions(speech, len(token_ids))
        return self._family.hidden_states(embeddings[None], positions, deepstack)[0]

    def _encode(self, items: list[Item]) -> list[Tensor]:
        model = self._family.model
        missing = [item for item in items if item.embedding is None]
        computed: Iterator[Tensor] = iter(())
        if missing and self._tower is not None:
            computed = iter(self._tower.encode([item.fields for item in missing]))
        return [
            next(computed)
            if item.embedding is None
            else item.embedding.to(model.device, model.dtype)
            for item in items
        ]

    def _positions(self, speech: SpokenText, num_tokens: int) -> Tensor:
        located = self.locate(speech)
        if located is None:
            positions = torch.arange(num_tokens).expand(self._family.num_position_rows, -1)
        else:
            positions = located.prompt[:, :num_tokens]
            rest = torch.arange(positions.shape[1], num_tokens) + located.delta
            positions = torch.cat([positions, rest.expand(len(positions), -1)], dim=1)
        return upload_parts([positions.numpy()], self._family.model.device)[0]
