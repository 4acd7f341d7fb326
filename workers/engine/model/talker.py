"""Talkers of omni models: decoders with codes as tokens and additional inputs.

The input rows of a prompt are made from the text that is spoken. The row of a frame is made from
all of its codes and the next row of the text: a talker reads while it speaks. Some talkers can
start before the text is complete.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.errors import InvalidRequest, UnsupportedContent
from shared.models.language import LanguageAdapter, PromptPositions
from workers.engine.core.sequence import ScheduledSequence, SpokenText
from workers.engine.core.sequence import Sequence as EngineSequence
from workers.engine.model.thinker_states import ThinkerStates
from workers.engine.sampling.frame_codes import HostFrameCodes, NewFrameCodes
from workers.engine.transfers import upload

MediaParts = Literal["none", "embeddings", "tower"]
"""Parts of a thinker for answers about media: none, the parts that read embeddings of encoders, or
these and the tower."""


@dataclass(slots=True)
class SpeechRows:
    """Rows of a text in the inputs of a talker, as far as the text has been read."""

    prompt: Tensor  # [num_prompt_tokens, hidden_size], one row less while `last` is not None
    text: Tensor  # [num_rows, width], one row for each frame; later frames use the last row
    last: Tensor | None = None
    """The prompt's last row without the text's first row, [1, hidden_size], until that is read."""
    num_read: int = 0
    """Tokens of the answer that have been read."""
    is_whole: bool = False
    """Whether the end of the answer has been read."""


class Talker(LanguageAdapter):
    """Talker of a model, with the other parts of the model that it needs."""

    num_position_rows = 3
    codes: range
    """Ids of the tokens that are codes of the first codebook."""
    end_token_ids: frozenset[int]
    num_codebooks: int
    num_text_tokens: int
    """Size of the vocabulary of the texts."""
    voices: Mapping[str, int]
    """Numbers of the voices in the talker, by name."""
    thinker: ThinkerStates | None
    """The thinker, or its part that is needed; None for a talker that does not need it."""

    def __init__(self, model: PreTrainedModel, decoder: PreTrainedModel) -> None:
        """`model` has the input embeddings, and `decoder` is its language model."""
        super().__init__(model)
        self._decoder = decoder
        self.new_frame_codes: NewFrameCodes = HostFrameCodes
        """Chooses the codes of further codebooks, on the device of the model."""

    @property
    def decoder(self) -> PreTrainedModel:
        return self._decoder

    @abstractmethod
    def prompt_tokens(self, speech: SpokenText) -> list[int]:
        """Return placeholder tokens for the rows of a prompt; the repetition penalty counts them.

        Raises InvalidRequest for a prompt that cannot be spoken.
        """

    def num_inputs(self, prompt_token_ids: list[int]) -> int | None:
        """Return the number of tokens in a sequence with rows that depend on the prompt alone.

        Each token of the answer adds one, except the last token, which is not spoken. Returns None
        for a talker that reads only whole answers.
        """
        return None

    def locate_speech(self, speech: SpokenText | None) -> PromptPositions | None:
        """Return the positions of the rows of a prompt; None if they are the rows' indexes.

        Raises InvalidRequest or UnsupportedContent for invalid items.
        """
        if speech is None or not speech.items:
            return None
        if self.thinker is None:
            raise UnsupportedContent(
                "this stage speaks only answers to texts: the model's limits allow no media",
                field="outputs",
            )
        self.thinker.check(speech)
        return self._locate_rows(self.thinker, speech)

    @abstractmethod
    def _locate_rows(self, thinker: ThinkerStates, speech: SpokenText) -> PromptPositions | None:
        """Return the positions of the rows of a prompt with checked items."""

    @abstractmethod
    def make_rows(self, speech: SpokenText) -> SpeechRows:
        """Return the rows of the available part of a text."""

    def read_on(self, rows: SpeechRows, speech: SpokenText) -> None:
        """Add the rows of text that has arrived since the last call."""

    @abstractmethod
    def frame_rows(self, frames: Tensor, text: Tensor) -> Tensor:
        """Return input rows for frames [n, num_codebooks] and their rows of the text [n, width]."""

    def residuals(self, hidden: Tensor, codes: Tensor, sequences: list[EngineSequence]) -> Tensor:
        """Return the codes of further codebooks: int64 [n, num_codebooks - 1], on their device.

        They follow from hidden states [n, hidden_size] and codes of the first codebook, int64 [n].
        """
        return codes.new_empty(len(codes), 0)

    def has_voice(self, name: str) -> bool:
        return name in self.voices

    def speech_rows_of(self, speech: SpokenText | None) -> SpeechRows:
        """Return the rows of a request's text. Raises InvalidRequest for a request without one."""
        if speech is None:
            raise InvalidRequest("this stage speaks the text of another stage", field="prompt")
        token_ids = [*speech.prompt_token_ids, *speech.answer_token_ids]
        if any(not 0 <= token_id < self.num_text_tokens for token_id in token_ids):
            raise InvalidRequest(
                f"the text's token ids must be from 0 to {self.num_text_tokens - 1}", field="prompt"
            )
        return self.make_rows(speech)

    def write_rows(self, rows: Tensor, s: ScheduledSequence, speech: SpeechRows) -> None:
        """Write the rows of a sequence's tokens in a step into `rows`, [num_new_tokens, …]."""
        sequence = s.sequence
        assert sequence.speech is not None
        self.read_on(speech, sequence.speech)
        start = s.start
        in_prompt = speech.prompt[start : start + len(rows)]
        rows[: len(in_prompt)] = in_prompt
        first = start + len(in_prompt) - sequence.num_prompt_tokens
        numbers = range(first, first + len(rows) - len(in_prompt))
        if not numbers:
            return
        codes = sequence.token_ids[sequence.num_prompt_tokens :]
        frames = [[codes[i], *self._residual_of(sequence, i)] for i in numbers]
        text = speech.text[min(first, len(speech.text) - 1) :][: len(frames)]
        # The last row of a text belongs to all later frames.
        text = torch.cat([text, text[-1:].expand(len(frames) - len(text), -1)])
        rows[len(in_prompt) :] = self.frame_rows(upload(frames, rows.device), text)

    def _residual_of(self, sequence: EngineSequence, number: int) -> list[int]:
        return sequence.residuals[number] if self.num_codebooks > 1 else []


def run_decoder(
    decoder: Any, head: Any, embeddings: Tensor, positions: Tensor, rows: Tensor, **attention: Any
) -> Tensor:
    """Return the logits of some rows: [1, num_rows, vocab_size]."""
    hidden = decoder(
        inputs_embeds=embeddings, position_ids=positions[:, None], use_cache=False, **attention
    ).last_hidden_state
    logits: Tensor = head(hidden[:, rows])
    return logits
