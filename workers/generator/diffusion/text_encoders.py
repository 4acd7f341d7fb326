"""Text encoders of CLIP and T5, which read texts of a fixed length."""

from typing import Any

import torch
from torch import Tensor


class FixedTokenizer:
    """Tokenizer of texts that all have one length: they are filled up, or cut before the end.

    The last token of a text marks its end. Any thread may call the methods.
    """

    def __init__(self, tokenizer: Any, pad_token_id: int, length: int) -> None:
        """`tokenizer` neither cuts texts nor fills them."""
        self._tokenizer, self._pad_token_id = tokenizer, pad_token_id
        self.length = length

    def count(self, text: str) -> int:
        """Return the number of tokens of a text before it is cut."""
        return len(self._tokenizer.encode(text).ids)

    def tokenize(self, text: str, device: torch.device) -> Tensor:
        """Return the token ids of a text, int64 [1, length]."""
        token_ids: list[int] = self._tokenizer.encode(text).ids
        if len(token_ids) > self.length:
            token_ids = [*token_ids[: self.length - 1], token_ids[-1]]
        padding = [self._pad_token_id] * (self.length - len(token_ids))
        return torch.tensor([token_ids + padding], device=device)


class TextEncoder:
    """A network of CLIP or T5 with its tokenizer."""

    def __init__(self, tokenizer: FixedTokenizer, network: Any) -> None:
        self.tokenizer, self._network = tokenizer, network

    def encode(self, text: str, *, hidden_states: bool = False) -> Any:
        """Return the network's output for a text, with one row.

        As in the pipelines, there is no mask: padding is read like a text.
        """
        token_ids = self.tokenizer.tokenize(text, self._network.device)
        return self._network(token_ids, output_hidden_states=hidden_states)
