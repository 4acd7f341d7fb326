"""The scale subresource of Deployments, over the API server of Kubernetes.

See https://kubernetes.io/docs/reference/kubernetes-api/ (Scale, autoscaling/v1). It contains the
desired and the current number of pods of a Deployment, and a Role may permit it alone.
"""

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import httpx2
import msgspec
from msgspec import Meta, Struct

from shared.errors import ConfigError, Unavailable
from shared.helpers.validation import reason_of

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 5.0
CONFLICT = 409
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_ABSENT = 404
_REFUSALS = {
    401: "the API server does not accept the token of the service account",
    403: "the service account has no such right: it needs the Role of `pagemill manifests"
    " --scaling pagemill`",
}

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0)]


class _Metadata(Struct):
    resource_version: str = msgspec.field(name="resourceVersion")


class _Replicas(Struct):
    replicas: Count = 0


class _Present(_Replicas):
    selector: str = ""


class Scale(Struct):
    """The size of a Deployment."""

    metadata: _Metadata
    spec: _Replicas
    status: _Present

    @property
    def wanted(self) -> int:
        return self.spec.replicas

    @property
    def present(self) -> int:
        """Number of existing pods, ready or not."""
        return self.status.replicas


class _Named(Struct):
    name: str


class _Pod(Struct):
    metadata: _Named


class _Pods(Struct):
    items: list[_Pod]


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
        if (scale := await self._scale("GET", name)) is None:
            raise Unavailable(f"a read of the size of {name!r} was answered with a conflict")
        return scale

    async def set(self, name: str, current: Scale, replicas: int) -> Scale | None:
        """Set the size of a Deployment. Return None if it has changed since `current` was read."""
        return await self._scale(
            "PATCH",
            name,
            json={
                "metadata": {"resourceVersion": current.metadata.resource_version},
                "spec": {"replicas": replicas},
            },
        )

    async def pods(self, scale: Scale) -> list[str]:
        """Return the names of a Deployment's pods."""
        params = {"labelSelector": scale.status.selector}
        about = f"list pods in namespace {self._namespace!r}"
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        content = await self._request("GET", path, about, params=params)
        return [pod.metadata.name for pod in _decode(content or b"", _Pods, about).items]

    async def set_deletion_cost(self, pod: str, cost: int) -> None:
        """Set the cost of a pod. A Deployment that shrinks ends its cheapest pods first."""
        await self._request(
            "PATCH",
            f"/api/v1/namespaces/{self._namespace}/pods/{pod}",
            f"patch pods {pod!r} in namespace {self._namespace!r}",
            json={"metadata": {"annotations": {DELETION_COST: str(cost)}}},
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

    async def _scale(self, method: str, name: str, json: Any = None) -> Scale | None:
        # Written like a rule of a Role, for operators who have to add it.
        about = f"{method.lower()} deployments/scale {name!r} in namespace {self._namespace!r}"
        path = f"/apis/apps/v1/namespaces/{self._namespace}/deployments/{name}/scale"
        content = await self._request(method, path, about, json)
        return None if content is None else _decode(content, Scale, about)

    async def _request(
        self,
        method: str,
        path: str,
        about: str,
        json: Any = None,
        params: Mapping[str, str] | None = None,
    ) -> bytes | None:
        """Return the answer; None for a conflict."""
        headers = {"Authorization": f"Bearer {self._read_token()}"}
        if json is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        try:
            answer = await self._client.request(
                method, path, json=json, headers=headers, params=params
            )
        except httpx2.HTTPError as error:
            raise Unavailable(f"{about}: {error or type(error).__name__}") from error
        if answer.status_code == CONFLICT:
            return None
        if (reason := _REFUSALS.get(answer.status_code)) is not None:
            raise ConfigError(f"scale.actuator: {about}: {reason}", field="scale.actuator")
        if answer.status_code == _ABSENT:
            raise Unavailable(
                f"{about}: there is no such Deployment or pod:"
                " apply what `pagemill manifests` writes"
            )
        if answer.is_error:
            raise Unavailable(f"{about}: HTTP status {answer.status_code}")
        return answer.content


def _decode(content: bytes, kind: type[T], about: str) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise Unavailable(
            f"{about}: no {kind.__name__.lstrip('_')} in the answer: {error}"
        ) from error
