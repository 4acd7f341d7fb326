"""Client of the API server of Kubernetes, for processes that run in a pod."""

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import httpx2

from shared.errors import ConfigError, Unavailable
from shared.helpers.validation import reason_of

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 5.0
ABSENT = 404
CONFLICT = 409


class ApiServer:
    """The API server, as the service account of a pod reaches it, for objects of one namespace.

    Methods raise ConfigError for a permanent refusal, and Unavailable for everything else.
    """

    field: ClassVar[str]
    """Setting or command that needs the API server, for errors."""
    needed_right: ClassVar[str]
    """Object that gives the service account its rights, for errors."""

    def __init__(
        self, url: str, namespace: str, token: Path, trust: ssl.SSLContext | bool = True
    ) -> None:
        self._token = token
        self.namespace = namespace
        self._client = httpx2.AsyncClient(
            base_url=url, verify=trust, timeout=TIMEOUT_S, trust_env=False
        )

    @classmethod
    def in_cluster(cls, env: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> Self:
        """Return the API of the cluster in which this process is a pod. Raises ConfigError."""
        try:
            host, port = env["KUBERNETES_SERVICE_HOST"], env["KUBERNETES_SERVICE_PORT"]
            namespace = (account / "namespace").read_text().strip()
            trust = ssl.create_default_context(cafile=account / "ca.crt")
            (account / "token").read_bytes()
        except (KeyError, OSError) as error:
            raise ConfigError(
                f"{cls.field}: kubernetes needs a pod with a service account: {error}",
                field=cls.field,
            ) from error
        literal = f"[{host}]" if ":" in host else host
        return cls(f"https://{literal}:{port}", namespace, account / "token", trust)

    async def close(self) -> None:
        await self._client.aclose()

    def _read_token(self) -> str:
        # The kubelet replaces the token before it expires.
        try:
            return self._token.read_text().strip()
        except OSError as error:
            raise Unavailable(
                f"the token of the service account cannot be read: {reason_of(error)}"
            ) from error

    async def _send(
        self, method: str, path: str, about: str, body: Any = None, kind: str = "application/json"
    ) -> httpx2.Response:
        """Send a request, and return an answer that is no refusal, and maybe an error.

        `about` is written like a rule of a Role, for operators who have to add it.
        """
        headers = {"Authorization": f"Bearer {self._read_token()}"}
        if body is not None:
            headers["Content-Type"] = kind
        try:
            answer = await self._client.request(method, path, json=body, headers=headers)
        except httpx2.HTTPError as error:
            raise Unavailable(f"{about}: {error or type(error).__name__}") from error
        refusals = {
            401: "the API server does not accept the token of the service account",
            403: f"the service account has no such right: it needs {self.needed_right}",
        }
        if (reason := refusals.get(answer.status_code)) is not None:
            raise ConfigError(f"{self.field}: {about}: {reason}", field=self.field)
        return answer
