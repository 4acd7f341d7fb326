"""Targets of HTTP: bodies, forms, headers, URLs, media files, and the text of answers."""

import contextlib
import io
from typing import Any

import msgspec
from PIL import Image
from starlette.requests import Request

from ops.demo import IMAGES
from ops.fuzz_decoders.seeds import json_messages
from ops.fuzz_decoders.target import FuzzTarget
from shared.config.schema import RendererConfig
from shared.decoding.refusal import Refusal
from shared.decoding.still_image import read_still_image
from shared.errors import InvalidMedia, InvalidRequest, MediaTooLarge, RequestError
from shared.net.ip_policy import parse_address
from shared.net.targets import parse_target
from shared.protocol.json_limits import json_limit_error
from shared.protocol.value_limits import check_json
from shared.state.media_store import parse_media_url
from shared.tool_calls.parser import ToolParser
from shared.tool_calls.scanner import Call, Piece
from shared.tool_calls.turn_text import TurnText
from workers.agent import mcp_protocol
from workers.gateway.core.byte_ranges import cut, read_range
from workers.gateway.core.ids import read_start
from workers.gateway.core.multipart import FileHead, FormStream, FormValue, parse_form
from workers.gateway.http.body import check_num_values
from workers.gateway.http.body_types import decoded
from workers.gateway.http.errors import RangeNotSatisfiable
from workers.gateway.schemas.embeddings import EmbeddingRequest
from workers.gateway.schemas.generate import RenderedRequest
from workers.gateway.schemas.images import ImagesRequest
from workers.gateway.schemas.openai_request import ChatRequest, CompletionRequest
from workers.gateway.schemas.responses import ResponseRequest
from workers.gateway.schemas.scores import RerankRequest, ScoreRequest
from workers.gateway.schemas.speech import SpeechRequest
from workers.gateway.vllm.generate_request import parse
from workers.renderer.decoding.animations import count_animation, is_animation
from workers.renderer.decoding.containers import find_container
from workers.renderer.decoding.sound_file import is_sound
from workers.renderer.media.image_decoder import decode_data_url

_BODIES = (
    ChatRequest,
    CompletionRequest,
    ResponseRequest,
    EmbeddingRequest,
    ScoreRequest,
    RerankRequest,
    ImagesRequest,
    SpeechRequest,
)
_FORMS = ("hermes", "llama3_json", "mistral", "named", "required")
_RENDERER = RendererConfig()


def _body(kind: Any) -> FuzzTarget:
    def run(data: bytes) -> None:
        check_num_values(data)
        decoded(data, kind)

    name = f"body_{kind.__name__.removesuffix('Request').lower()}"
    return FuzzTarget(name, run, lambda: json_messages(kind), (RequestError,), "json")


def _vllm_bodies() -> list[bytes]:
    return [*json_messages(RenderedRequest), b'{"token_ids":[1,2],"sampling_params":{"n":2}}']


def _parse_vllm(data: bytes) -> None:
    parse(decoded(data, RenderedRequest, root="body"))


def _json_limits(data: bytes) -> None:
    check_json(data)
    value = msgspec.json.decode(data)
    json_limit_error(value)
    json_limit_error(value, 3, 4)


def _mcp(data: bytes) -> None:
    mcp_protocol.result_of(mcp_protocol.decode_json(data), 1)


# -- forms, headers and URLs ----------------------------------------------------------------------


def _multipart(data: bytes) -> None:
    """Parse a body at once and in pieces. The first line is the header Content-Type."""
    head, _, body = data.partition(b"\n")
    content_type = head.decode("latin-1")
    _read_events(content_type, [body])
    _read_events(content_type, [body[at : at + 7] for at in range(0, len(body), 7)])
    parse_form(body, content_type)


def _read_events(content_type: str, pieces: list[bytes]) -> None:
    form = FormStream(content_type)
    for piece in pieces:
        for event in form.feed(piece):
            match event:
                case FileHead(name, value) | FormValue(name, value):
                    # The client's names and values are written as JSON, and so as UTF-8.
                    msgspec.json.encode((name, value))


def _forms() -> list[bytes]:
    head = b"multipart/form-data; boundary=b\n"
    part = b'--b\r\nContent-Disposition: form-data; name="'
    value = part + b'a"\r\n\r\n1\r\n'
    file = part + b'f"; filename="a.png"\r\nContent-Type: image/png\r\n\r\nbytes\r\n'
    coded = part + b"f\"; filename*=utf-8'en'%e2%82%ac.png\r\n\r\nbytes\r\n"
    return [head + value + file + b"--b--\r\n", head + coded + b"--b--"]


def _byte_range(data: bytes) -> None:
    text = data.decode("latin-1")
    for total in (None, 100):
        part = read_range(text, total)
        if part is not None:
            assert part.first >= 0
            assert cut(b"x" * 100, 0, part) is not None
            assert part.num_bytes is None or part.num_bytes >= 0
            assert part.header


def _event_id(data: bytes) -> None:
    scope = {"type": "http", "query_string": b"", "headers": [(b"last-event-id", data)]}
    read_start(Request(scope), 2)


def _url(data: bytes) -> None:
    text = data.decode(errors="replace")
    parse_media_url(text)
    if (target := parse_target(text)) is not None:
        assert target.host_header
    with contextlib.suppress(ValueError):
        parse_address(text)


def _data_url(data: bytes) -> None:
    decode_data_url(data.decode(errors="replace"), _RENDERER, "url")


# -- files ----------------------------------------------------------------------------------------


def _still_image(data: bytes) -> None:
    read_still_image(data)


def _pictures() -> list[bytes]:
    image = Image.new("RGB", (8, 8), "red")
    files = [_saved(image, form) for form in ("JPEG", "PNG", "WEBP")]
    exif = image.getexif()
    exif[0x0112] = 6
    files += [_saved(image, form, exif=exif.tobytes()) for form in ("JPEG", "PNG", "WEBP")]
    return [*files, _saved(image, "JPEG", progressive=True)]


def _saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def _container(data: bytes) -> None:
    find_container(data)
    is_sound(data)
    if is_animation(data):
        count_animation(data, 1000)


def _animations() -> list[bytes]:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    more = {"save_all": True, "append_images": frames[1:], "duration": 50}
    files = [_saved(frames[0], form, **more) for form in ("GIF", "PNG", "WEBP")]
    heads = [b"\0\0\0\x18ftypisom", b"\x1aE\xdf\xa3", b"RIFF\0\0\0\0AVI ", b"RIFF\0\0\0\0WAVE"]
    return [*files, *heads, (IMAGES / "red.png").read_bytes()[:512]]


# -- text of answers ------------------------------------------------------------------------------


def _tool_calls(data: bytes) -> None:
    """Parse a text at once and by character: how it is cut makes no difference."""
    text = data[1:].decode(errors="replace")
    form = _FORMS[data[0] % len(_FORMS)] if data else _FORMS[0]
    whole = _parsed(form, [text])
    assert whole == _parsed(form, list(text))
    turn = TurnText(form, ("f", "search"), one_call=True)
    turn.feed(text, is_last=True)
    assert len(turn.calls) <= 1
    assert turn.content is not None


def _parsed(form: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content, and name and arguments of each call."""
    parser = ToolParser(form, ("f", "search"))
    decoded: list[Piece] = [piece for text in pieces for piece in parser.feed(text)]
    content, calls = "", list[tuple[str, str]]()
    for piece in decoded + parser.end():
        if not isinstance(piece, Call):
            content += piece.text
        elif piece.name is not None:
            assert piece.index == len(calls)
            calls.append((piece.name, piece.arguments))
        else:
            calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.arguments)
    return content, calls


def _answers() -> list[bytes]:
    call = b'{"name": "f", "arguments": {"a": [1, "}"]}}'
    return [
        b"\0Hello <tool_call>\n" + call + b"\n</tool_call> <tool_call>" + call + b"</tool_call>",
        b"\1<|python_tag|>" + call + b'; {"parameters": "{}", "name": "search"}',
        b"\2[TOOL_CALLS][" + call + b", " + call + b"]",
        b'\2[TOOL_CALLS]search[ARGS]{"a": 1}[TOOL_CALLS]f{}',
        b'\3{"a": 1}',
        b"\4[" + call + b"] rest",
    ]


_SSE_ID = b"12,-1"
DOOR_TARGETS = [
    *map(_body, _BODIES),
    FuzzTarget("body_vllm", _parse_vllm, _vllm_bodies, (RequestError,), "json"),
    FuzzTarget(
        "json_limits",
        _json_limits,
        lambda: [b'{"a": [1, "b\\n", {"c": 1e300}]}'],
        (msgspec.DecodeError, UnicodeDecodeError, RecursionError),
        "json",
    ),
    FuzzTarget(
        "mcp",
        _mcp,
        lambda: [b'{"jsonrpc":"2.0","id":1,"result":{"tools":[]}}', b'{"id":1,"error":{"code":1}}'],
        (mcp_protocol.McpFault, mcp_protocol.McpRefusal),
        "json",
    ),
    FuzzTarget("multipart", _multipart, _forms, (InvalidRequest,)),
    FuzzTarget(
        "byte_range",
        _byte_range,
        lambda: [b"bytes=0-9", b"bytes=5-", b"bytes=-5"],
        (RangeNotSatisfiable,),
    ),
    FuzzTarget("event_id", _event_id, lambda: [_SSE_ID], (InvalidRequest,)),
    FuzzTarget("url", _url, lambda: [b"https://a.b:8080/c?d", b"::1%eth0", b"media:" + b"0" * 64]),
    FuzzTarget(
        "data_url",
        _data_url,
        lambda: [b"data:image/png;base64,aGk=", b"data:video/jpeg;base64,aGk=,aGk="],
        (InvalidMedia, MediaTooLarge),
    ),
    FuzzTarget("still_image", _still_image, _pictures, (Refusal,)),
    FuzzTarget("container", _container, _animations, (ValueError,)),
    FuzzTarget("tool_calls", _tool_calls, _answers),
]
