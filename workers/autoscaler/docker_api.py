"""Requests to `pagemill docker-proxy`, which starts and stops containers of pools."""

import httpx2
import msgspec

from shared.errors import ConfigError, Unavailable
from workers.docker_messages import DockerWorker, Kind, decode_refusal, decode_workers

# The proxy inspects containers, and creates one within a request.
TIMEOUT_S = 60.0
# Another attempt will meet these refusals, too.
_LASTING: tuple[Kind, ...] = ("body", "query", "path", "method", "service")


class ProxyApi:
    """Lists, starts and stops workers of services, over the proxy's Unix socket.

    Methods return the workers that there are then. They raise ConfigError for a refusal that
    another attempt will meet too, and Unavailable for everything else.
    """

    def __init__(self, socket: str) -> None:
        transport = httpx2.AsyncHTTPTransport(uds=socket)
        self._client = httpx2.AsyncClient(
            transport=transport, base_url="http://docker-proxy", timeout=TIMEOUT_S, trust_env=False
        )
        self._socket = socket

    async def workers(self, service: str) -> list[DockerWorker]:
        return await self._request("GET", f"/services/{service}/workers")

    async def start(self, service: str) -> list[DockerWorker]:
        """Start one more worker."""
        return await self._request("POST", f"/services/{service}/workers")

    async def stop(self, service: str, number: int) -> list[DockerWorker]:
        """Begin to stop a worker, which drains."""
        return await self._request("DELETE", f"/services/{service}/workers/{number}")

    async def close(self) -> None:
        await self._client.aclose()

    async def _request(self, method: str, path: str) -> list[DockerWorker]:
        try:
            answer = await self._client.request(method, path)
        except httpx2.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise Unavailable(
                f"scale.docker_proxy: no proxy answers at {self._socket}: {reason}"
            ) from error
        try:
            if not answer.is_error:
                return decode_workers(answer.content)
            refusal = decode_refusal(answer.content)
        except msgspec.MsgspecError as error:
            status = answer.status_code
            raise Unavailable(
                f"scale.docker_proxy: {method} {path}: status {status}, and no answer of"
                f" `pagemill docker-proxy`: {error}"
            ) from error
        if refusal.kind in _LASTING:
            raise ConfigError(
                f"scale.docker_proxy: {method} {path}: {refusal.message}",
                field="scale.docker_proxy",
            )
        raise Unavailable(f"{method} {path}: {refusal.message}")
