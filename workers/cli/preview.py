"""Implementation of `pagemill render` and `pagemill tokenize`, which need no engine."""

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from shared import client
from shared.bus.bus import Bus
from shared.codec.envelope import TensorData
from shared.protocol.encoding import to_json
from shared.protocol.renderer_rpc import ErrorReply, RenderedPrompt, Tokenized, TokenizeRequest
from workers.cli.ask import CONNECT_TIMEOUT_S, AskOptions, build_request, print_error

out = Console()


async def render_and_print(question: AskOptions, url: str, *, as_json: bool) -> int:
    """Return the exit code: 0, or 1 for an error of the renderer."""
    request = build_request(question)
    bus = await Bus.connect(url, "render", CONNECT_TIMEOUT_S)
    try:
        answer = await client.render(bus, request)
    finally:
        await bus.close()
    if isinstance(answer, ErrorReply):
        return _print_error_reply(answer, as_json=as_json)
    rendered, tensors = answer
    if as_json:
        _print_json(_describe(rendered, tensors))
        return 0
    _print_line(f"{len(rendered.prompt_token_ids)} tokens")
    for item in rendered.items:
        offset, length = item.placeholder.offset, item.placeholder.length
        _print_line(f"{item.modality} {item.mm_hash}: tokens {offset} to {offset + length - 1}")
        for name, index in item.fields.items():
            _print_line(f"  {name:<16} {tensors[index].dtype} {list(tensors[index].shape)}")
    return 0


async def tokenize_and_print(model: str, text: str, url: str, *, as_json: bool) -> int:
    """Return the exit code: 0, or 1 for an error of the renderer."""
    bus = await Bus.connect(url, "tokenize", CONNECT_TIMEOUT_S)
    try:
        answer = await client.tokenize(bus, model, TokenizeRequest(prompt=text))
    finally:
        await bus.close()
    if isinstance(answer, ErrorReply):
        return _print_error_reply(answer, as_json=as_json)
    _print_json(answer) if as_json else _print_tokens(answer)
    return 0


def _describe(rendered: RenderedPrompt, tensors: Sequence[TensorData]) -> dict[str, Any]:
    """Return a JSON object for a prompt; tensors are shown by dtype and shape."""
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
    _print_line(f"{answer.count} tokens of at most {answer.max_model_len}")
    _print_line(" ".join(map(str, answer.token_ids)))


def _print_error_reply(reply: ErrorReply, *, as_json: bool) -> int:
    _print_json(reply) if as_json else print_error(reply.error)
    return 1


def _print_line(text: str) -> None:
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def _print_json(value: Any) -> None:
    sys.stdout.write(to_json(value).decode() + "\n")
