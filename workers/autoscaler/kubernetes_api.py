"""The scale subresource of Deployments, over the API server of Kubernetes.

See https://kubernetes.io/docs/reference/kubernetes-api/ (Scale, autoscaling/v1). It contains the
desired and the current number of pods of a Deployment, and a Role may permit it alone.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from shared.errors import Unavailable
from workers.kubernetes import ABSENT, CONFLICT, ApiServer

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


class ScaleApi(ApiServer):
    """Reads and sets sizes of the Deployments of one namespace."""

    field = "scale.actuator"
    needed_right = "the Role of the chart with `scaling: pagemill`"

    async def get(self, name: str) -> Scale:
        if (scale := await self._request("GET", name)) is None:
            raise Unavailable(f"a read of the size of {name!r} was answered with a conflict")
        return scale

    async def set(self, name: str, current: Scale, replicas: int) -> Scale | None:
        """Set the size of a Deployment. Return None if it has changed since `current` was read."""
        return await self._request(
            "PATCH",
            name,
            {
                "metadata": {"resourceVersion": current.metadata.resource_version},
                "spec": {"replicas": replicas},
            },
        )

    async def _request(self, method: str, name: str, body: Any = None) -> Scale | None:
        path = f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{name}/scale"
        about = f"{method.lower()} deployments/scale {name!r} in namespace {self.namespace!r}"
        answer = await self._send(method, path, about, body, "application/merge-patch+json")
        if answer.status_code == CONFLICT:
            return None
        if answer.status_code == ABSENT:
            raise Unavailable(f"{about}: there is no such Deployment: apply the chart again")
        if answer.is_error:
            raise Unavailable(f"{about}: HTTP status {answer.status_code}")
        try:
            return msgspec.json.decode(answer.content, type=Scale)
        except msgspec.MsgspecError as error:
            raise Unavailable(f"{about}: no Scale in the answer: {error}") from error
