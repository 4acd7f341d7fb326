"""Implementation of `pagemill render` and `pagemill tokenize`, which need no engine."""

from collections.abc import Sequence
from typing import Any

from shared import client
from shared.codec.envelope import TensorData
from shared.protocol.renderer_rpc import ErrorReply, RenderedPrompt, TokenizeRequest
from shared.protocol.requests import GenerateRequest
from workers.cli.ask import print_error
from workers.cli.terminal import connected, print_json, print_line


async def render_and_print(request: GenerateRequest, url: str, *, as_json: bool) -> int:
    """Return the exit code: 0, or 1 for an error of the renderer."""
    async with connected(url, "render") as bus:
        answer = await client.render(bus, request)
    if isinstance(answer, ErrorReply):
        return _print_error_reply(answer, as_json=as_json)
    rendered, tensors = answer
    if as_json:
        print_json(_describe(rendered, tensors))
        return 0
    print_line(f"{len(rendered.prompt_token_ids)} tokens")
    for item in rendered.items:
        offset, length = item.placeholder.offset, item.placeholder.length
        print_line(f"{item.modality} {item.mm_hash}: tokens {offset} to {offset + length - 1}")
        for name, index in item.fields.items():
            print_line(f"  {name:<16} {tensors[index].dtype} {list(tensors[index].shape)}")
    return 0


async def tokenize_and_print(model: str, text: str, url: str, *, as_json: bool) -> int:
    """Return the exit code: 0, or 1 for an error of the renderer."""
    async with connected(url, "tokenize") as bus:
        answer = await client.tokenize(bus, model, TokenizeRequest(prompt=text))
    if isinstance(answer, ErrorReply):
        return _print_error_reply(answer, as_json=as_json)
    if as_json:
        print_json(answer)
    else:
        print_line(f"{answer.count} tokens of at most {answer.max_model_len}")
        print_line(" ".join(map(str, answer.token_ids)))
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


def _print_error_reply(reply: ErrorReply, *, as_json: bool) -> int:
    print_json(reply) if as_json else print_error(reply.error)
    return 1
