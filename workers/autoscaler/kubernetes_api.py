"""The scale subresource of Deployments, over the API server of Kubernetes.

See https://kubernetes.io/docs/reference/kubernetes-api/ (Scale, autoscaling/v1). It contains the
desired and the current number of pods of a Deployment, and a Role may permit it alone.
"""

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import httpx2
import msgspec
from msgspec import Meta, Struct

from shared.errors import ConfigError, Unavailable
from shared.helpers.validation import reason_of

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 5.0
CONFLICT = 409
_ABSENT = 404
_REFUSALS = {
    401: "the API server does not accept the token of the service account",
    403: "the service account has no such right: it needs the Role of `pagemill manifests"
    " --scaling pagemill`",
}

Count = Annotated[int, Meta(ge=0)]


class _Metadata(Struct):
    resource_version: str = msgspec.field(name="resourceVersion")


class _Replicas(Struct):
    replicas: Count = 0


class Scale(Struct):
    """The size of a Deployment."""

    metadata: _Metadata
    spec: _Replicas
    status: _Replicas

    @property
    def wanted(self) -> int:
        return self.spec.replicas

    @property
    def present(self) -> int:
        """Number of existing pods, ready or not."""
        return self.status.replicas


class ScaleApi:
    """Reads and sets sizes of the Deployments of one namespace.

    Methods raise ConfigError for a permanent refusal, and Unavailable for everything else.
    """

    def __init__(
        self, url: str, namespace: str, token: Path, trust: ssl.SSLContext | bool = True
    ) -> None:
        self._token = token
        self._namespace = namespace
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
                f"scale.actuator: kubernetes needs a pod with a service account: {error}",
                field="scale.actuator",
            ) from error
        literal = f"[{host}]" if ":" in host else host
        return cls(f"https://{literal}:{port}", namespace, account / "token", trust)

    async def get(self, name: str) -> Scale:
        if (scale := await self._request("GET", name)) is None:
            raise Unavailable(f"a read of the size of {name!r} was answered with a conflict")
        return scale

    async def set(self, name: str, current: Scale, replicas: int) -> Scale | None:
        """Set the size of a Deployment. Return None if it has changed since `current` was read."""
        return await self._request(
            "PATCH",
            name,
            json={
                "metadata": {"resourceVersion": current.metadata.resource_version},
                "spec": {"replicas": replicas},
            },
        )

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

    async def _request(self, method: str, name: str, json: Any = None) -> Scale | None:
        path = f"/apis/apps/v1/namespaces/{self._namespace}/deployments/{name}/scale"
        headers = {"Authorization": f"Bearer {self._read_token()}"}
        if json is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        # Written like a rule of a Role, for operators who have to add it.
        about = f"{method.lower()} deployments/scale {name!r} in namespace {self._namespace!r}"
        try:
            answer = await self._client.request(method, path, json=json, headers=headers)
        except httpx2.HTTPError as error:
            raise Unavailable(f"{about}: {error or type(error).__name__}") from error
        if answer.status_code == CONFLICT:
            return None
        if (reason := _REFUSALS.get(answer.status_code)) is not None:
            raise ConfigError(f"scale.actuator: {about}: {reason}", field="scale.actuator")
        if answer.status_code == _ABSENT:
            raise Unavailable(
                f"{about}: there is no such Deployment: apply what `pagemill manifests` writes"
            )
        if answer.is_error:
            raise Unavailable(f"{about}: HTTP status {answer.status_code}")
        try:
            return msgspec.json.decode(answer.content, type=Scale)
        except msgspec.MsgspecError as error:
            raise Unavailable(f"{about}: no Scale in the answer: {error}") from error
