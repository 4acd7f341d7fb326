"""Qwen3-Omni's talker: several codebooks a frame; a small decoder predicts all but the first.

The talker needs the thinker's table of embeddings and, for media in prompts of the user, the hidden
states of one of the thinker's layers at their tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import Tensor
from transformers import DynamicCache
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe

from shared.errors import ConfigError, InvalidRequest
from shared.models.families.qwen_omni import OmniTower
from shared.models.language import PromptPositions
from shared.vision.weights import load_weights
from workers.engine.core.sequence import Sequence as EngineSequence
from workers.engine.core.sequence import SpokenText
from workers.engine.model.talker import MediaParts, SpeechRows, Talker, run_decoder
from workers.engine.model.thinker_states import ThinkerStates
from workers.engine.transfers import upload

# Tokens at the end of the vocabulary that are not codes.
NUM_RESERVED = 1024
HEADER_LEN = 3
"""Tokens before an answer: its start, the role, and a line break."""
OPENING_LEN = HEADER_LEN + 6
TEXT_TOKENS = ("tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id", "im_start_token_id")
CODEC_TOKENS = (
    "codec_pad_id",
    "codec_bos_id",
    "codec_eos_token_id",
    "codec_nothink_id",
    "codec_think_bos_id",
    "codec_think_eos_id",
)
OTHER_PARTS = ("code2wav", "thinker.lm_head")
LAYERS = "thinker.model.language_model.layers"


class Qwen3Talker(Talker):
    position_type = "float32"

    def __init__(self, whole: Any, thinker: ThinkerStates | None) -> None:
        super().__init__(whole.talker, whole.talker.model)
        self.thinker = thinker
        self._config = whole.config
        self._talker = whole.talker
        self._predictor = whole.talker.code_predictor
        self._embed_text = whole.thinker.get_input_embeddings()
        self.num_text_tokens = self._embed_text.num_embeddings
        config = whole.config.talker_config
        self.codes = range(config.text_config.vocab_size - NUM_RESERVED)
        self.end_token_ids = frozenset([config.codec_eos_token_id])
        self.num_codebooks = config.num_code_groups
        self.voices = dict(config.speaker_id)

    def prompt_tokens(self, speech: SpokenText) -> list[int]:
        user, _ = self._split(speech.prompt_token_ids)
        # This token is never sampled, so no penalty applies to it.
        return [self._config.talker_config.codec_pad_id] * (len(user) + OPENING_LEN)

    def has_voice(self, name: str) -> bool:
        return name.lower() in self.voices

    def num_inputs(self, prompt_token_ids: list[int]) -> int:
        user, turn = self._split(prompt_token_ids)
        # The last row of the prompt is made of the first token of the text.
        return len(user) + OPENING_LEN - 1 + len(turn) - HEADER_LEN

    def _locate_rows(self, thinker: ThinkerStates, speech: SpokenText) -> PromptPositions | None:
        return thinker.locate(self._user_part(speech))

    def make_rows(self, speech: SpokenText) -> SpeechRows:
        config, talker = self._config.talker_config, self._talker
        _, turn = self._split(speech.prompt_token_ids)
        codec = [
            config.codec_nothink_id,
            config.codec_think_bos_id,
            config.codec_think_eos_id,
            self.voices[(speech.voice or next(iter(self.voices))).lower()],
            config.codec_pad_id,
            config.codec_bos_id,
        ]
        pad, bos = self._config.tts_pad_token_id, self._config.tts_bos_token_id
        opening = self._project([*turn[:HEADER_LEN], pad, pad, pad, pad, bos])
        codec_rows = talker.get_input_embeddings()(self._tensor(codec))
        opening[HEADER_LEN:] = opening[HEADER_LEN:] + codec_rows[:-1]
        prompt = torch.cat([self._user_rows(speech), opening])
        rows = SpeechRows(prompt, opening[:0], codec_rows[-1:])
        self._add_text(rows, turn[HEADER_LEN:])
        self.read_on(rows, speech)
        return rows

    def _user_part(self, speech: SpokenText) -> SpokenText:
        """Return the turns of the user in a prompt, with their items."""
        prompt = speech.prompt_token_ids
        user, _ = self._split(prompt)
        rows = {index: row for row, index in enumerate(user)}
        items = [
            replace(item, placeholder=structs.replace(item.placeholder, offset=rows[start]))
            for item in speech.items
            if (start := item.placeholder.offset) in rows
        ]
        return SpokenText([prompt[index] for index in user], [], None, items=items)

    def _user_rows(self, speech: SpokenText) -> Tensor:
        part = self._user_part(speech)
        rows = self._project(part.prompt_token_ids)
        if not part.items:
            return rows
        assert self.thinker is not None
        user, _ = self._split(speech.prompt_token_ids)
        last = max(item.placeholder.offset + item.placeholder.length for item in speech.items)
        states = self.thinker.run(speech, speech.prompt_token_ids[:last])
        for item in part.items:
            start = item.placeholder.offset
            places = [start + index for index in item.placeholder.embed_indexes()]
            sources = [user[place] for place in places]
            rows[places] = self._talker.hidden_projection(states[sources])
        return rows

    def read_on(self, rows: SpeechRows, speech: SpokenText) -> None:
        if rows.is_whole:
            return
        # The last token of an answer is not spoken, and this may be the last one.
        token_ids = speech.answer_token_ids[rows.num_read : -1]
        rows.num_read += len(token_ids)
        rows.is_whole = speech.num_inputs is None
        end = [self._config.tts_eos_token_id, self._config.tts_pad_token_id]
        self._add_text(rows, [*token_ids, *(end if rows.is_whole else [])])

    def _add_text(self, rows: SpeechRows, token_ids: list[int]) -> None:
        if not token_ids:
            return
        text = self._project(token_ids)
        if rows.last is not None:
            rows.prompt = torch.cat([rows.prompt, rows.last + text[:1]])
            rows.last, text = None, text[1:]
        rows.text = torch.cat([rows.text, text])

    def frame_rows(self, frames: Tensor, text: Tensor) -> Tensor:
        tables = [self._talker.get_input_embeddings(), *self._predictor.get_input_embeddings()]
        parts = [table(codes) for table, codes in zip(tables, frames.T, strict=True)]
        rows: Tensor = torch.stack(parts, dim=1).sum(1) + text
        return rows

    def residuals(self, hidden: Tensor, codes: Tensor, sequences: list[EngineSequence]) -> Tensor:
        predictor = self._predictor
        frame_codes = self.new_frame_codes(sequences, self.num_codebooks)
        cache = DynamicCache(config=predictor.config)
        first = self._talker.get_input_embeddings()(codes)
        inputs, residuals = torch.stack([hidden, first], dim=1), []
        for number, (table, head) in enumerate(
            zip(predictor.get_input_embeddings(), predictor.lm_head, strict=True), 1
        ):
            states = predictor.model(inputs_embeds=inputs, past_key_values=cache, use_cache=True)
            logits = head(states.last_hidden_state[:, -1])
            residuals.append(frame_codes.choose(logits, number))
            inputs = table(residuals[-1])[:, None]
        return torch.stack(residuals, dim=1)

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        sampled_rows: Tensor,
        deepstack: Tensor | None,
        **attention: Any,
    ) -> Tensor:
        head = self._talker.codec_head
        return run_decoder(self.decoder, head, embeddings, positions, sampled_rows, **attention)

    def _split(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        """Return the indexes of the user's tokens, and the prompt from the assistant's turn on."""
        config = self._config
        user, turn, begin = [], 0, None
        for index, token_id in enumerate(prompt):
            if token_id == config.im_start_token_id:
                turn = index
                if prompt[index + 1 : index + 2] == [config.assistant_token_id]:
                    begin = index
            if prompt[min(turn + 1, len(prompt) - 1)] == config.user_token_id:
                user.append(index)
        if begin is None or len(prompt) - begin < HEADER_LEN:
            raise InvalidRequest("the prompt has no turn of the assistant to speak", field="prompt")
        return user, prompt[begin:]

    def _project(self, token_ids: list[int]) -> Tensor:
        rows: Tensor = self._talker.text_projection(self._embed_text(self._tensor(token_ids)))
        return rows

    def _tensor(self, token_ids: Sequence[int]) -> Tensor:
        return upload(token_ids, self.model.device)


def load(folder: Path, config: Any, dtype: torch.dtype, device: str, media: MediaParts) -> Talker:
    """Load the talker of a model's folder. Raises ConfigError."""
    _check(folder, config)
    num_layers = config.talker_config.accept_hidden_layer
    total = config.thinker_config.text_config.num_hidden_layers
    without = [*OTHER_PARTS, *(f"{LAYERS}.{number}" for number in range(num_layers, total))]
    if media == "none":
        without = [*OTHER_PARTS, LAYERS]
    if media != "tower":
        without += [f"thinker.{name}" for name in OmniTower.modules]
    kind = modeling_qwen3_omni_moe.Qwen3OmniMoeForConditionalGeneration
    whole: Any = load_weights(kind, folder, dtype, device, without)
    if media == "none":
        return Qwen3Talker(whole, None)
    return Qwen3Talker(whole, ThinkerStates(whole.thinker, media == "tower", num_layers))


def _check(folder: Path, config: Any) -> None:
    """Raise ConfigError for a number of config.json that is out of its range."""
    talker, thinker = config.talker_config, config.thinker_config.text_config
    tokens, codes = range(thinker.vocab_size), range(talker.text_config.vocab_size)
    groups = talker.code_predictor_config.num_code_groups
    layers = range(1, thinker.num_hidden_layers + 1)
    voices = talker.speaker_id or {"": None}
    ranges = [
        *((name, getattr(config, name), tokens) for name in TEXT_TOKENS),
        *((f"talker_config.{name}", getattr(talker, name), codes) for name in CODEC_TOKENS),
        *((f"talker_config.speaker_id.{name}", code, codes) for name, code in voices.items()),
        ("talker_config.accept_hidden_layer", talker.accept_hidden_layer, layers),
        ("talker_config.num_code_groups", talker.num_code_groups, range(groups, groups + 1)),
    ]
    for name, number, allowed in ranges:
        if number not in allowed:
            limits = f"{allowed.start} to {allowed.stop - 1}" if len(allowed) > 1 else allowed.start
            raise ConfigError(
                f"models.path: {folder}: config.json has {name}: {number}, which must be {limits}",
                field="models.path",
            )
