"""Language adapter: positions, embeddings and forward pass of a family's language model.

An adapter wraps an unchanged transformers model. It is independent of the KV cache and of batches.
Towers compute the embeddings of items; here the items are only checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from transformers import PreTrainedConfig, PreTrainedModel

from shared.errors import UnsupportedContent
from shared.models.reach import check_reach, count_positions
from shared.models.tower_adapter import TowerAdapter, refuse
from shared.protocol.multimodal import PlaceholderRange

if TYPE_CHECKING:
    from torch import Tensor


class MediaItem(Protocol):
    """A multimodal item of a prompt."""

    @property
    def modality(self) -> str: ...
    @property
    def placeholder(self) -> PlaceholderRange: ...
    @property
    def fields(self) -> Mapping[str, Any]: ...
    @property
    def embedding(self) -> Any: ...


class MediaPrompt(Protocol):
    """A prompt and the items in it; an engine request is one."""

    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def items(self) -> Sequence[MediaItem]: ...


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """Rotary positions of a prompt. Each later token t has the position t + delta in every row."""

    prompt: Tensor  # [num_position_rows, num_prompt_tokens]
    delta: float


class AttendItems(Protocol):
    """Cross attention of a step: each token attends to the item of its request."""

    def __call__(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Return the attention of `query` in a layer, [num_tokens, num_heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Tokens that a model's answer must or must not have."""

    beginning: tuple[tuple[int, ...], ...] = ()
    """Tokens of which the answer has one at each of its first positions."""
    suppressed: tuple[int, ...] = ()
    """Tokens that never follow the beginning."""
    suppressed_first: tuple[int, ...] = ()
    """Tokens that do not follow it directly."""


class LanguageAdapter:
    """Adapter of a plain decoder. Its positions are one row, the indexes of the tokens."""

    num_position_rows = 1
    position_type: Literal["int64", "float32"] = "int64"
    """Type of rotary positions: "float32" if the positions of some items have fractions."""
    opens_full_layers = True
    """Whether spans attend in both directions also in layers without a window."""
    exceeds_windows = False
    """Whether the tokens of a span attend to each other beyond the window of a layer."""
    shares_prefixes = True
    """Whether keys and values of a prompt's tokens depend on earlier tokens alone, so that other
    prompts can use them."""
    attends_items = False
    """Whether all tokens attend to the embeddings of items (cross attention). The prompt then has
    none of their rows."""

    def __init__(
        self,
        model: PreTrainedModel,
        tower: TowerAdapter | None = None,
        placeholders: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap `model`, which may lack the modules of its tower.

        `placeholders` maps each modality to the name of its placeholder token in the config.
        """
        self.model = model
        self.tower = tower
        self._placeholders = placeholders or {}

    @property
    def decoder(self) -> PreTrainedModel:
        """Language model without its head and towers."""
        model: Any = self.model
        return cast(PreTrainedModel, model.get_decoder())

    @property
    def decoder_config(self) -> PreTrainedConfig:
        """Config with the number and the shapes of the decoder's layers."""
        return self.decoder.config

    @property
    def _num_positions(self) -> int:
        """Number of positions of the decoder, which is the length of its rotary table."""
        return count_positions(self.decoder_config)

    @property
    def input_embeddings(self) -> Any:
        """Module that embeds token ids."""
        model: Any = self.model
        return model.get_input_embeddings()

    def check(self, prompt: MediaPrompt) -> None:
        """Check the items. Towers and `locate` require valid items.

        Raises UnsupportedContent or InvalidRequest.
        """
        for item in prompt.items:
            if self.tower is None:
                raise UnsupportedContent("this model accepts only text", field="items")
            if item.modality not in self._placeholders:
                raise UnsupportedContent(
                    f"this model does not accept {item.modality!r}", field="items"
                )
            if item.embedding is None:
                self.tower.check(item.fields)
            else:
                self.tower.check_embedding(item.fields, item.embedding)
            self._check_placeholder(item, self.tower.count(item.fields), prompt.prompt_token_ids)

    def locate(self, prompt: MediaPrompt) -> PromptPositions | None:
        """Return the positions of a prompt with items; None if they are the tokens' indexes."""
        return None

    def spans_of(self, prompt: MediaPrompt) -> list[tuple[int, int]]:
        """Return the runs [start, stop) of tokens that attend to each other in both directions.

        Other tokens attend to earlier ones only. Raises InvalidRequest.
        """
        return []

    def rules_of(self, prompt: MediaPrompt) -> TokenRules | None:
        """Return the rules for the answers to a prompt; None if all tokens are allowed."""
        return None

    def project(self, embedding: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of an item for the cross attention of each layer.

        They are [num_embeds, num_heads, head_dim]. Only decoders with `attends_items` have them.
        """
        raise NotImplementedError

    def count_free_positions(self, prompt: MediaPrompt) -> int:
        """Return the number of rotary positions after a checked prompt.

        Raises InvalidRequest for a prompt that reaches beyond the last one.
        """
        located = self.locate(prompt) if prompt.items else None
        return self.count_positions_after(located, len(prompt.prompt_token_ids))

    def count_positions_after(self, located: PromptPositions | None, length: int) -> int:
        """Do the same for the positions of a prompt with `length` tokens."""
        limit = self._num_positions
        if located is None:
            return limit - length
        check_reach(int(located.prompt.max()), limit, "the prompt's items reach", "items")
        return math.floor(limit - length - located.delta)

    @cached_property
    def uses_token_ids(self) -> bool:
        """Whether layers use the ids of tokens besides the embeddings."""
        return bool(getattr(self.decoder.config, "hidden_size_per_layer_input", None))

    def layer_inputs(self, token_ids: Tensor | None) -> dict[str, Tensor]:  # [num_tokens]
        """Return the arguments of `forward` for layers that use the ids of tokens."""
        if not self.uses_token_ids:
            return {}
        assert token_ids is not None
        decoder: Any = self.decoder
        return {"per_layer_inputs": decoder.get_per_layer_inputs(token_ids[None])}

    def forward(
        self,
        embeddings: Tensor,  # [1, num_tokens, hidden_size]
        positions: Tensor,  # [num_position_rows, num_tokens]
        sampled_rows: Tensor,  # [num_sampled]
        deepstack: Tensor | None,  # [num_levels, num_tokens, hidden_size]
        **attention: Any,
    ) -> Tensor:  # logits, [1, num_sampled, vocab_size]
        """Run the model with its own head, because some families scale or limit their logits there.

        `attention` is passed to the attention of every layer, except for `layer_inputs`.
        """
        assert deepstack is None, "this family has no further levels of features"
        model: Any = self.model
        logits: Tensor = model(
            inputs_embeds=embeddings,
            position_ids=positions if len(positions) == 1 else positions[:, None],
            logits_to_keep=sampled_rows,
            use_cache=False,
            **attention,
        ).logits
        return logits

    def _check_placeholder(self, item: MediaItem, count: int, prompt_token_ids: list[int]) -> None:
        start, num_embeds = item.placeholder.offset, item.placeholder.num_embeds
        if num_embeds != count:
            refuse(f"{num_embeds} placeholders for {count} embeddings")
        tokens = [
            prompt_token_ids[start + i : start + i + 1] for i in item.placeholder.embed_indexes()
        ]
        if start < 0 or tokens != [[token_id] for token_id in self._embed_ids(item, count)]:
            refuse(f"the prompt has no {num_embeds} {item.modality} tokens at {start}")

    def _embed_ids(self, item: MediaItem, count: int) -> Sequence[int]:
        """Return the placeholder tokens that an item's embeddings replace, in order."""
        return [getattr(self.model.config, self._placeholders[item.modality])] * count
