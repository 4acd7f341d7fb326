"""The scale subresource of Deployments, over the API server of Kubernetes.

See https://kubernetes.io/docs/reference/kubernetes-api/ (Scale, autoscaling/v1). It contains the
desired and the current number of pods of a Deployment, and a Role may permit it alone.
"""

from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec import Meta, Struct

from shared.errors import Unavailable
from workers.kubernetes import ABSENT, CONFLICT, ApiServer

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"

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


class ScaleApi(ApiServer):
    """Reads and sets sizes of the Deployments of one namespace."""

    field = "scale.actuator"
    needed_right = "the Role of the chart with `scaling: pagemill`"

    async def get(self, name: str) -> Scale:
        if (scale := await self._scale("GET", name)) is None:
            raise Unavailable(f"a read of the size of {name!r} was answered with a conflict")
        return scale

    async def set(self, name: str, current: Scale, replicas: int) -> Scale | None:
        """Set the size of a Deployment. Return None if it has changed since `current` was read."""
        return await self._scale(
            "PATCH",
            name,
            {
                "metadata": {"resourceVersion": current.metadata.resource_version},
                "spec": {"replicas": replicas},
            },
        )

    async def pods(self, scale: Scale) -> list[str]:
        """Return the names of a Deployment's pods."""
        about = f"list pods in namespace {self.namespace!r}"
        query = urlencode({"labelSelector": scale.status.selector})
        content = await self._request(
            "GET", f"/api/v1/namespaces/{self.namespace}/pods?{query}", about
        )
        return [pod.metadata.name for pod in _decode(content or b"", _Pods, about).items]

    async def set_deletion_cost(self, pod: str, cost: int) -> None:
        """Set the cost of a pod. A Deployment that shrinks ends its cheapest pods first."""
        await self._request(
            "PATCH",
            f"/api/v1/namespaces/{self.namespace}/pods/{pod}",
            f"patch pods {pod!r} in namespace {self.namespace!r}",
            {"metadata": {"annotations": {DELETION_COST: str(cost)}}},
        )

    async def _scale(self, method: str, name: str, body: Any = None) -> Scale | None:
        about = f"{method.lower()} deployments/scale {name!r} in namespace {self.namespace!r}"
        path = f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{name}/scale"
        content = await self._request(method, path, about, body)
        return None if content is None else _decode(content, Scale, about)

    async def _request(self, method: str, path: str, about: str, body: Any = None) -> bytes | None:
        """Return the answer; None for a conflict."""
        answer = await self._send(method, path, about, body, "application/merge-patch+json")
        if answer.status_code == CONFLICT:
            return None
        if answer.status_code == ABSENT:
            raise Unavailable(f"{about}: there is no such Deployment or pod: apply the chart again")
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
