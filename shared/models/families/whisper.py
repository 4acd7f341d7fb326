"""Whisper: an encoder whose output the decoder attends to, instead of reading it in the prompt.

A prompt has the tokens of a language and a task. Without a language, the answer begins with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig, PreTrainedModel

from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import WireField
from shared.errors import ConfigError, UnsupportedContent
from shared.models.families.qwen2_audio import Qwen2AudioLayout, Qwen2AudioTower
from shared.models.family import MediaInput, ModelFamily
from shared.models.language import AttendItems, LanguageAdapter, MediaItem, MediaPrompt, TokenRules
from shared.models.lazy_module import LazyModule
from shared.models.tower_adapter import Fields, TowerAdapter, refuse
from shared.protocol.multimodal import AUDIO

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

GENERATION = "generation_config.json"
NO_EXCHANGE = "sounds of this model are not exchanged with other servers"

# Texts of messages are the text before the sound, unless `task` shows that they are instructions.
_TEMPLATE = """
{%- set seen = namespace(text=prompt or '', sounds=0) -%}
{%- for message in messages -%}
{%- for part in message.content -%}
{%- if part.type == 'audio' -%}{%- set seen.sounds = seen.sounds + 1 -%}
{%- elif task is undefined -%}{%- set seen.text = seen.text + ' ' + part.text -%}{%- endif -%}
{%- endfor -%}
{%- endfor -%}
{%- if seen.sounds != 1 -%}
{{- raise_exception('this model transcribes one sound in each request') -}}
{%- endif -%}
{%- set language = language or LANGUAGE -%}
{%- set task = task or TASK -%}
{%- if language and language not in LANGUAGES -%}
{{- raise_exception('this model does not know the language ' + language) -}}
{%- endif -%}
{%- if task not in TASKS -%}
{{- raise_exception('this model does not have the task ' + task) -}}
{%- endif -%}
{%- if task != TASK and not language -%}
{{- raise_exception('the task ' + task + ' needs the language of the sound') -}}
{%- endif -%}
{%- if seen.text.strip() -%}<|startofprev|> {{ seen.text.strip() }}{%- endif -%}
<|startoftranscript|>
{%- if language -%}
{%- if NAMES -%}<|{{ language }}|><|{{ task }}|>{%- endif -%}
<|notimestamps|>
{%- endif -%}
"""


class _Speech:
    """Languages and tasks of a model, as its generation_config.json names them."""

    def __init__(self, settings: Mapping[str, Any], folder: str | None) -> None:
        """Raise ConfigError if tokens are missing."""
        self.languages: dict[str, int] = {}
        self.tasks: dict[str, int] = {}
        # Models of English alone have tokens for neither languages nor tasks.
        names = ["no_timestamps_token_id"]
        if settings.get("is_multilingual", True):
            names += ["lang_to_id", "task_to_id"]
        if missing := [name for name in names if settings.get(name) is None]:
            raise ConfigError(
                f"{folder}: {GENERATION} has no {missing[0]}, which names tokens of the prompt:"
                " copy the file from the original model",
                field="path",
            )
        self.no_timestamps: int = settings["no_timestamps_token_id"]
        if len(names) > 1:
            self.languages = {_code_of(name): i for name, i in settings["lang_to_id"].items()}
            self.tasks = settings["task_to_id"]
        # Older files have the defaults as tokens by their position.
        forced: dict[int, Any] = dict(settings.get("forced_decoder_ids") or ())
        names_of: dict[Any, str] = {i: name for name, i in (self.languages | self.tasks).items()}
        self.task: str = settings.get("task") or names_of.get(forced.get(2), "transcribe")
        self.language: str | None = _find_code(settings.get("language")) or names_of.get(
            forced.get(1)
        )
        """Language of a request that names none; None to detect it."""

    def template(self) -> str:
        """Return the chat template."""
        values = {
            "LANGUAGES": [*self.languages] or ["en"],
            "LANGUAGE": self.language if self.languages else "en",
            "TASKS": [*self.tasks] or ["transcribe"],
            "TASK": self.task,
            "NAMES": bool(self.languages),
        }
        # JSON differs from the template's language in the name of null.
        settings = (f"{{%- set {name} = {json.dumps(v)} -%}}" for name, v in values.items())
        return "".join(settings).replace("null", "none") + _TEMPLATE

    def beginning(self) -> tuple[tuple[int, ...], ...]:
        """Return the tokens that an answer begins with if the prompt names no language."""
        if not self.languages:
            return ()
        return (*self.languages.values(),), (self.tasks[self.task],), (self.no_timestamps,)


def _code_of(token: str) -> str:
    return token.strip("<|>")


def _find_code(language: str | None) -> str | None:
    """Return the code of a language that a file names by its code, its token or its name."""
    if language is None:
        return None
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    name = _code_of(language.lower())
    code: str = TO_LANGUAGE_CODE.get(name, name)
    return code


def chat_template(folder: Path) -> str:
    """Return the chat template of a model folder. Raises ConfigError."""
    file = folder / GENERATION
    settings = json.loads(file.read_bytes()) if file.is_file() else {}
    return _Speech(settings, str(folder)).template()


class WhisperLayout(Qwen2AudioLayout):
    """Whisper's features. A sound has one token in the prompt, which the decoder reads as text."""

    def count(self, num_frames: int) -> int:
        return min(1, super().count(num_frames))

    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        raise UnsupportedContent(NO_EXCHANGE, field="features")

    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        raise UnsupportedContent(NO_EXCHANGE, field=field)


class WhisperTower(Qwen2AudioTower):
    """The encoder. A sound of any length has a row for each position of the whole window."""

    modules = ("model.encoder",)
    language_modules = ("model.decoder", "proj_out")

    def count(self, fields: Fields) -> int:
        super().count(fields)
        return self._num_window_frames // 2

    def encode(self, model: Any, batch: Sequence[Fields]) -> list[Tensor]:
        features = torch.stack([self.restore(fields) for fields in batch])
        features = features.to(model.device, model.dtype)
        return list(model.model.encoder(features).last_hidden_state)


class WhisperLanguage(LanguageAdapter):
    """The decoder, with learned positions and cross attention in each layer."""

    attends_items = True

    def __init__(
        self,
        model: PreTrainedModel,
        tower: TowerAdapter | None = None,
        placeholders: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(model, tower, placeholders)
        settings = model.generation_config.to_dict()
        self._speech = _Speech(settings, model.config.name_or_path)
        self._suppressed = tuple(settings.get("suppress_tokens") or ())
        self._suppressed_first = tuple(settings.get("begin_suppress_tokens") or ())
        decoder: Any = self.decoder
        for layer in decoder.layers:
            layer.encoder_attn.forward = _CrossAttention(layer.encoder_attn)

    @property
    def decoder_config(self) -> PreTrainedConfig:
        return self.model.config.get_text_config(decoder=True)

    def check(self, prompt: MediaPrompt) -> None:
        if len(prompt.items) != 1:
            refuse(f"this model transcribes one sound, and the prompt has {len(prompt.items)}")
        super().check(prompt)

    def rules_of(self, prompt: MediaPrompt) -> TokenRules:
        start: int = self.model.config.decoder_start_token_id
        is_complete = prompt.prompt_token_ids[-1] != start
        beginning = () if is_complete else self._speech.beginning()
        return TokenRules(beginning, self._suppressed, self._suppressed_first)

    def project(self, embedding: Tensor) -> list[tuple[Tensor, Tensor]]:
        decoder: Any = self.decoder
        return [
            tuple(
                linear(embedding).view(len(embedding), layer.encoder_attn.num_heads, -1)
                for linear in (layer.encoder_attn.k_proj, layer.encoder_attn.v_proj)
            )
            for layer in decoder.layers
        ]

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        sampled_rows: Tensor,
        deepstack: Tensor | None,
        *,
        attend_items: AttendItems | None = None,
        **attention: Any,
    ) -> Tensor:
        decoder: Any = self.decoder
        model: Any = self.model
        hidden = decoder(
            inputs_embeds=embeddings,
            position_ids=positions,
            # Layers pass it on to their cross attention, which does not need the encoder's output.
            encoder_hidden_states=attend_items,
            use_cache=False,
            **attention,
        ).last_hidden_state
        logits: Tensor = model.proj_out(hidden[:, sampled_rows])
        return logits

    def _check_placeholder(self, item: MediaItem, count: int, prompt_token_ids: list[int]) -> None:
        # The sound's token is in the prompt, and its rows are not.
        super()._check_placeholder(item, 1, prompt_token_ids)


class _CrossAttention:
    """Attention of a layer to items, with the projections of transformers' module."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention

    def __call__(
        self, hidden_states: Tensor, key_value_states: AttendItems, **_: Any
    ) -> tuple[Tensor, None]:
        attention = self._attention
        query = attention.q_proj(hidden_states[0]) * attention.scaling
        query = query.view(len(query), attention.num_heads, -1)
        output = key_value_states(attention.layer_idx, query, 1.0)
        return attention.out_proj(output.flatten(1))[None], None


FAMILIES = (
    ModelFamily(
        "Whisper",
        frozenset({"whisper"}),
        media={AUDIO: MediaInput(WhisperLayout, placeholder="decoder_start_token_id")},
        tower=WhisperTower,
        language=WhisperLanguage,
        model_class="WhisperForConditionalGeneration",
        chat_template=chat_template,
    ),
)
