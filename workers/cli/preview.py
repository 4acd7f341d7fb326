"""`pagemill render` and `tokenize`: what a renderer makes of a prompt, without an engine."""

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from shared import client
from shared.bus.bus import Bus
from shared.codec.envelope import TensorData
from shared.protocol.messages import to_json
from shared.protocol.renderer_rpc import ErrorReply, RenderedPrompt, Tokenized, TokenizeRequest
from workers.cli.ask import CONNECT_TIMEOUT_S, AskOptions, build_request, print_error

out = Console()


async def render_and_print(question: AskOptions, url: str, *, as_json: bool) -> int:
    """Returns the exit code: 0, or 1 for a refusal."""
    request = build_request(question)
    bus = await Bus.connect(url, "render", CONNECT_TIMEOUT_S)
    try:
        answer = await client.render(bus, request)
    finally:
        await bus.close()
    if isinstance(answer, ErrorReply):
        return _print_refusal(answer, as_json=as_json)
    rendered, tensors = answer
    if as_json:
        _print_json(_described(rendered, tensors))
        return 0
    _plain_line(f"{len(rendered.prompt_token_ids)} tokens")
    for item in rendered.items:
        offset, length = item.placeholder.offset, item.placeholder.length
        _plain_line(f"{item.modality} {item.mm_hash}: tokens {offset} to {offset + length - 1}")
        for name, index in item.fields.items():
            _plain_line(f"  {name:<16} {tensors[index].dtype} {list(tensors[index].shape)}")
    return 0


async def tokenize_and_print(model: str, text: str, url: str, *, as_json: bool) -> int:
    """Returns the exit code: 0, or 1 for a refusal."""
    bus = await Bus.connect(url, "tokenize", CONNECT_TIMEOUT_S)
    try:
        answer = await client.tokenize(bus, model, TokenizeRequest(prompt=text))
    finally:
        await bus.close()
    if isinstance(answer, ErrorReply):
        return _print_refusal(answer, as_json=as_json)
    _print_json(answer) if as_json else _print_tokens(answer)
    return 0


def _described(rendered: RenderedPrompt, tensors: Sequence[TensorData]) -> dict[str, Any]:
    """Tensors by dtype and shape; their bytes are nothing for a terminal."""
    return {
        "prompt_token_ids": rendered.prompt_token_ids,
        "items": [
            {
                "modality": item.modality,
                "mm_hash": item.mm_hash,
                "offset": item.placeholder.offset,
                "length": item.placeholder.length,
                "fields": {
                    name: {"dtype": tensors[index].dtype, "shape": tensors[index].shape}
                    for name, index in item.fields.items()
                },
            }
            for item in rendered.items
        ],
    }


def _print_tokens(answer: Tokenized) -> None:
    _plain_line(f"{answer.count} tokens of at most {answer.max_model_len}")
    _plain_line(" ".join(map(str, answer.token_ids)))


def _print_refusal(refusal: ErrorReply, *, as_json: bool) -> int:
    _print_json(refusal) if as_json else print_error(refusal.error)
    return 1


def _plain_line(text: str) -> None:
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def _print_json(value: Any) -> None:
    sys.stdout.write(to_json(value).decode() + "\n")
