"""Requests with videos and sounds for both servers, with greedy decoding."""

import base64
import io
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from ops.bench.media.clips import make_clip
from ops.interop.cases import Case, Content, chat, image_url

RATE = 16_000
"""Samples a second of the sounds, and of what the models hear: vLLM resamples others otherwise."""
MAX_TOKENS = 15


def video_cases() -> list[Case]:
    clip, small = make_clip(3, (196, 140)), make_clip(2, (112, 84))
    return [
        Case("a video", _chat(video_part(clip), "What happens?")),
        Case(
            "two videos with text between", _chat(video_part(small), "and", video_part(clip), "?")
        ),
        Case("the same video twice", _chat(video_part(small), video_part(small))),
        Case("frames in JPEG", _chat(_sequence_part(5, (140, 112)), "Describe.")),
        Case("a video and an image", _chat("See", video_part(small), image_url(0, 224, 224), "?")),
    ]


def omni_cases() -> list[Case]:
    # Two frames a second, which vLLM's renderer takes for granted in this family, and few of them:
    # the processor makes them large.
    video = Case("a video", _chat(video_part(make_clip(2, (112, 84))), "What happens?"))
    return [video, *sound_cases()]


def sound_cases() -> list[Case]:
    wav, flac = make_sound(0, 2.5), make_sound(1, 1.0, "FLAC")
    return [
        Case("a sound", _chat(_url_part("audio_url", "audio/wav", wav), "What is it?")),
        Case("a sound as OpenAI sends it", _chat(_input_part(make_sound(2, 3.3), "wav"), "?")),
        Case("two channels", _chat(_input_part(make_sound(3, 2.0, channels=2), "wav"), "?")),
        Case(
            "two sounds with text between",
            _chat(_input_part(flac, "flac"), "and", _input_part(wav, "wav")),
        ),
        Case("the same sound twice", _chat(_input_part(wav, "wav"), _input_part(wav, "wav"))),
        Case("MP3", _chat(_input_part(make_sound(4, 2.0, "MP3"), "mp3"), "?")),
        Case(
            "Vorbis",
            _chat(_url_part("audio_url", "audio/ogg", make_sound(5, 2.0, "OGG")), "?"),
            compares_text=False,
        ),
        Case(
            "a fifth of a second",
            _chat(_input_part(make_sound(6, 0.19), "wav"), "?"),
            compares_text=False,
        ),
        Case("half a minute", _chat(_input_part(make_sound(7, 30.0), "wav"), "?")),
    ]


def video_part(file: bytes) -> dict[str, Any]:
    return _url_part("video_url", "video/mp4", file)


def make_sound(seed: int, seconds: float, kind: str = "WAV", channels: int = 1) -> bytes:
    """Return noise below a sine, neither of which is loud."""
    generator = np.random.default_rng(seed)
    tone = np.sin(np.arange(int(seconds * RATE)) * generator.uniform(0.02, 1.2))
    samples = 0.2 * tone[:, None] + generator.normal(0, 0.05, (len(tone), channels))
    file = io.BytesIO()
    soundfile.write(file, samples.astype(np.float32), RATE, format=kind)
    return file.getvalue()


def _chat(*parts: Content) -> dict[str, Any]:
    return chat(parts, max_tokens=MAX_TOKENS)


def _sequence_part(num_frames: int, size: tuple[int, int]) -> dict[str, Any]:
    """Return a video in vLLM's form of frames that the client has chosen."""
    y, x = np.mgrid[0 : size[1], 0 : size[0]]
    files = []
    for number in range(num_frames):
        planes = x + 20 * number, y + 9 * number, np.full_like(x, 40 * number)
        file = io.BytesIO()
        Image.fromarray(np.stack(planes, axis=-1).astype(np.uint8)).save(file, "JPEG")
        files.append(_base64(file.getvalue()))
    url = f"data:video/jpeg;base64,{','.join(files)}"
    return {"type": "video_url", "video_url": {"url": url}}


def _url_part(name: str, media_type: str, file: bytes) -> dict[str, Any]:
    return {"type": name, name: {"url": f"data:{media_type};base64,{_base64(file)}"}}


def _input_part(file: bytes, name: str) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": _base64(file), "format": name}}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
