"""Images of a response. Each is an ordinary request, with an id that is made from the call."""

import asyncio
import base64
import hashlib
import secrets
from collections.abc import AsyncIterator, Mapping

from shared import client
from shared.bus.bus import Bus
from shared.errors import PayloadTooLarge, WorkerFailure
from shared.protocol.images import AUTO, ImageParams
from shared.protocol.records import ErrorInfo, Failure, ImageRecord, LogRecord, error_info
from shared.protocol.requests import GenerateRequest
from shared.protocol.steps import PaintTool, Result, Sending, painting_id
from shared.responses.calls import ServerCall
from shared.responses.tools import prompt_of
from shared.state.media_store import hash_media, media_url
from shared.state.step_log import StepLog
from shared.state.token_log import last_record

HEAD_BYTES = 4096
"""Room in a message for the other fields of a step with an image."""
NO_PROMPT = "not painted: the arguments have no prompt"


class Painter:
    """Sender of the image requests of one response."""

    def __init__(self, bus: Bus, log: StepLog, timeout_s: float) -> None:
        """`timeout_s` is the time limit of a request."""
        self._bus = bus
        self._log = log
        self._timeout_s = timeout_s

    async def paint(self, call: ServerCall) -> Result | ErrorInfo:
        """Return the result of an image call, or the error that ends the response.

        An error ends a response that consists of this image alone. No image is painted twice,
        because a later attempt finds the log of the same request. Raises Fenced.
        """
        begun = self._log.state.begun
        assert begun is not None
        assert begun.painter is not None
        prompt, tool = prompt_of(call.arguments), begun.painter
        if prompt is None:
            return _failed(call, NO_PROMPT)
        name = painting_id(self._log.tenant, self._log.response_id, call.turn, call.number)
        if not call.sendings:
            digest = hashlib.sha256(call.arguments.encode()).hexdigest()
            by = secrets.token_hex(8)
            sending = Sending(0, call.turn, call.number, 0, name, digest, by, may_repeat=True)
            await self._log.append(sending)
        params = ImageParams(
            None if tool.size == AUTO else tool.size,
            1,
            partial_images=tool.partial_images or None,
            input_images=await self._input_images(tool, call.turn),
        )
        request = GenerateRequest(
            tool.model, prompt=prompt, image=params, outputs=[tool.output], lane=begun.lane
        )
        try:
            error = await self._await_end(request, name, begun.trace)
            image = error or await self._image(call, name, tool)
        except asyncio.CancelledError:
            # If the response has not ended, another agent waits for the same image.
            if self._log.state.ended is not None:
                await client.cancel(self._bus, name)
            raise
        if isinstance(image, Result):
            return image
        return image if tool.prompt is not None else _failed(call, image.message, image.code)

    async def _input_images(self, tool: PaintTool, turn: int) -> tuple[str, ...]:
        """Return the images to edit. An image of an earlier turn is the last of the conversation.

        It was stored when it was painted.
        """
        painted = self._log.state.painted_before(turn) if tool.input_images else None
        if painted is None:
            return tuple(tool.input_images)
        return (media_url(await hash_media(base64.b64decode(painted))),)

    async def _await_end(
        self, request: GenerateRequest, name: str, trace: Mapping[str, str]
    ) -> ErrorInfo | None:
        """Wait for the end of the request. Return its error; None if it has succeeded."""
        records: AsyncIterator[LogRecord]
        if await last_record(self._bus, name) is not None:
            records = client.follow(self._bus, name, timeout_s=self._timeout_s)
        else:
            # An earlier agent may have published the request.
            records = client.ask(self._bus, request, name, trace=trace, is_repeated=True)
        async for record in records:
            if isinstance(record, Failure):
                return record.error
        return None

    async def _image(self, call: ServerCall, name: str, tool: PaintTool) -> Result | ErrorInfo:
        """Return the image in base64 as the result of the call, or an error."""
        records = client.follow_output(self._bus, name, tool.output, timeout_s=self._timeout_s)
        images = [record async for record in records if isinstance(record, ImageRecord)]
        if not images:
            return error_info(WorkerFailure("the request has ended without its image"))
        file = await client.find_media(self._bus, images[0].media, self._log.tenant)
        if file is None:
            return error_info(WorkerFailure("the image is not stored any more"))
        encoded = await asyncio.to_thread(base64.b64encode, file)
        limit = self._bus.max_payload - HEAD_BYTES
        if len(encoded) > limit:
            message = f"the image has {len(encoded)} bytes in base64, and a step at most {limit}"
            return error_info(PayloadTooLarge(message))
        size = f"{images[0].width}x{images[0].height}"
        return Result(0, call.turn, call.number, "result", encoded.decode(), size=size)


def _failed(call: ServerCall, message: str, code: str | None = None) -> Result:
    error = {"type": "image_generation_error", "message": message}
    if code is not None:
        error["code"] = code
    return Result(0, call.turn, call.number, "failed", error=error)
