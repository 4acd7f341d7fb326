"""`/v1/audio/transcriptions`: the plan of a request, and the assembler of its text. Pure.

Each piece of a long recording is a separate request on the bus.
"""

from collections.abc import Sequence
from typing import Any

from shared.errors import InvalidRequest
from shared.protocol.records import AnyRecord, Finish, TokenChunk, Usage
from shared.protocol.requests import AudioPart, AudioURL, GenerateRequest, Message, TextPart
from workers.gateway.core.assembler import PROMPT_FIELDS, Answering, AnswerOptions, Assembler
from workers.gateway.core.field_names import ClientFields
from workers.gateway.core.kinds import AnswerKind
from workers.gateway.core.order import in_part_order
from workers.gateway.core.plan import Delivery, SubmitPlan, check_choice
from workers.gateway.http.errors import UnsupportedParameter
from workers.gateway.schemas.transcription import (
    UNSUPPORTED_FORMATS,
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    TranscriptionForm,
    TranscriptionUsage,
)

JSON, TEXT = "json", "text"

_NAMES = """
af Afrikaans; am Amharic; ar Arabic; as Assamese; az Azerbaijani; ba Bashkir; be Belarusian; bg
Bulgarian; bn Bengali; bo Tibetan; br Breton; bs Bosnian; ca Catalan; cs Czech; cy Welsh; da
Danish; de German; el Greek; en English; es Spanish; et Estonian; eu Basque; fa Persian; fi
Finnish; fo Faroese; fr French; gl Galician; gu Gujarati; ha Hausa; haw Hawaiian; he Hebrew; hi
Hindi; hr Croatian; ht Haitian Creole; hu Hungarian; hy Armenian; id Indonesian; is Icelandic; it
Italian; ja Japanese; jw Javanese; ka Georgian; kk Kazakh; km Khmer; kn Kannada; ko Korean; la
Latin; lb Luxembourgish; ln Lingala; lo Lao; lt Lithuanian; lv Latvian; mg Malagasy; mi Maori; mk
Macedonian; ml Malayalam; mn Mongolian; mr Marathi; ms Malay; mt Maltese; my Myanmar; ne Nepali;
nl Dutch; nn Nynorsk; no Norwegian; oc Occitan; pa Punjabi; pl Polish; ps Pashto; pt Portuguese;
ro Romanian; ru Russian; sa Sanskrit; sd Sindhi; si Sinhala; sk Slovak; sl Slovenian; sn Shona; so
Somali; sq Albanian; sr Serbian; su Sundanese; sv Swedish; sw Swahili; ta Tamil; te Telugu; tg
Tajik; th Thai; tk Turkmen; tl Tagalog; tr Turkish; tt Tatar; uk Ukrainian; ur Urdu; uz Uzbek; vi
Vietnamese; yi Yiddish; yo Yoruba; yue Cantonese; zh Chinese
"""
LANGUAGES = dict(entry.split(maxsplit=1) for entry in _NAMES.split(";"))
"""Names of languages for the instruction, by their codes."""
WITHOUT_SPACES = frozenset({"ja", "lo", "my", "th", "yue", "zh"})
"""Languages that write words without spaces between them."""


class TranscriptionOptions(AnswerOptions, frozen=True, kw_only=True):
    parts: int = 1
    in_order: bool = True
    """Whether each part is added after the end of the part before it."""
    separator: str = " "
    """Text between the texts of two pieces."""


def check_transcription(form: TranscriptionForm) -> None:
    """Raises InvalidRequest or UnsupportedParameter with the field."""
    if (reason := UNSUPPORTED_FORMATS.get(form.response_format)) is not None:
        raise UnsupportedParameter(
            f"response_format {form.response_format} is not supported: {reason}",
            field="response_format",
        )
    check_choice("response_format", form.response_format, [JSON, TEXT])
    if form.stream and form.response_format == TEXT:
        raise InvalidRequest(
            f"response_format {TEXT} is not available in a stream, which has events",
            field="response_format",
        )
    if form.language is not None:
        check_choice("language", form.language, LANGUAGES)


def plan_transcription(
    form: TranscriptionForm, pieces: Sequence[str]
) -> SubmitPlan[TranscriptionOptions]:
    """Return the plan for the pieces of a recording, each a URL."""
    content = TextPart(instruction_of(form))
    requests = [
        GenerateRequest(
            form.model,
            messages=[Message("user", [AudioPart(AudioURL(piece)), content])],
            timeout_s=form.timeout_s,
            template_kwargs=_variables_of(form),
        )
        for piece in pieces
    ]
    # A transcript is the most probable text, unless the client sets a temperature.
    sampling = {"temperature": form.temperature or 0.0}
    separator = "" if form.language in WITHOUT_SPACES else " "
    options = TranscriptionOptions(parts=len(pieces), separator=separator)
    return SubmitPlan(
        requests,
        sampling,
        options,
        delivery=Delivery.EVENTS if form.stream else Delivery.WHOLE,
        durable=bool(form.durable),
    )


def instruction_of(form: TranscriptionForm) -> str:
    language = "" if form.language is None else f"{LANGUAGES[form.language]} "
    instruction = f"Transcribe the {language}speech into text."
    return instruction if not form.prompt else f"{instruction}\n{form.prompt}"


def _variables_of(form: TranscriptionForm) -> dict[str, Any]:
    """Return the variables for chat templates that have tokens for them, such as Whisper's."""
    variables = {"task": "transcribe", "language": form.language, "prompt": form.prompt}
    return {name: value for name, value in variables.items() if value}


class TranscriptionAssembler(Assembler[TranscriptionOptions]):
    """Assembler of a transcript, which has the texts of all pieces in order."""

    max_events = 2

    def __init__(self, request: Answering[TranscriptionOptions]) -> None:
        super().__init__(request)
        self.texts: list[str] = []
        self.usages: list[Usage] = []

    def add(self, part: int, record: AnyRecord, file: str = "") -> list[Any]:
        match record:
            case TokenChunk():
                return self._add_tokens(part, record)
            case Finish():
                return self._finish(part, record.usage)
            case _:
                return []

    def _add_tokens(self, part: int, record: TokenChunk) -> list[Any]:
        text = "".join(delta.text for delta in record.choices)
        if not text:
            return []
        if part == len(self.texts):
            self.texts.append("")
            # Some models begin a text with a space.
            if any(self.texts) and not text[0].isspace():
                text = self.options.separator + text
        self.texts[-1] += text
        return [TranscriptDelta(text)]

    def _finish(self, part: int, usage: Usage) -> list[Any]:
        if part == len(self.texts):
            self.texts.append("")
        self.usages.append(usage)
        if len(self.usages) < self.options.parts:
            return []
        whole = self.answer()
        return [TranscriptDone(whole.text, whole.usage)]

    def answer(self) -> Transcription:
        num_in = sum(usage.prompt_tokens for usage in self.usages)
        num_out = sum(usage.completion_tokens for usage in self.usages)
        usage = TranscriptionUsage(num_in, num_out, num_in + num_out)
        return Transcription("".join(self.texts).strip(), usage)


TRANSCRIPTION = AnswerKind(
    name="transcription",
    id_prefix="transcr",
    options=TranscriptionOptions,
    assembler=TranscriptionAssembler,
    client_fields=ClientFields(dict.fromkeys((*PROMPT_FIELDS, "items", "url"), "file")),
    order=in_part_order,
)
