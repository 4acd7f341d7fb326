"""The bytes of tokens, asked of renderers and kept: a model has only so many."""

from collections.abc import Collection

from shared import client
from shared.bus.bus import Bus
from shared.protocol.renderer_rpc import DetokenizeRequest, ErrorReply
from workers.gateway.core.assembler import TokenBytes
from workers.gateway.http.errors import RequestFailed


class TokenBytesCache:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: dict[str, dict[int, bytes]] = {}

    def of(self, model: str) -> TokenBytes:
        return self._known.setdefault(model, {})

    async def learn(self, model: str, token_ids: Collection[int], tenant: str) -> None:
        """Returns when the model's spelling has all of these, asked for in the turn of `tenant`.
        Raises Unavailable."""
        known = self._known.setdefault(model, {})
        unknown = [token_id for token_id in token_ids if token_id not in known]
        if not unknown:
            return
        question = DetokenizeRequest(unknown)
        answer = await client.detokenize(self._bus, model, question, tenant=tenant)
        if isinstance(answer, ErrorReply):
            raise RequestFailed(answer.error, "")
        known.update(zip(unknown, answer.token_bytes, strict=True))
