"""The part of the configuration about pools of workers whose size follows the load."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.scaling.pools import Count, PoolSettings


class PoolConfig(PoolSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The workers of one role, or of one stage of a model, whose number the autoscaler decides."""

    role: str
    """Role of the workers; it must serve a stage of a pipeline."""
    model: str | None = None
    """Model that the workers serve; needed only when several are configured, and refused for a role
    whose workers serve all models."""
    stage: str | None = None
    """Stage that the workers serve; by default the one named like the role."""
    service: Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Service of the compose project whose containers are the workers; by default the one named
    like the stage. Only `actuator: docker` reads it."""


class ScaleConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Pools of workers that grow and shrink with the load. Without pools nothing is scaled, and no
    autoscaler is started."""

    pools: list[PoolConfig] = []
    """The pools; a pool's `min` takes the place of its stage's `replicas`."""
    budget: Count | None = None
    """Workers of all pools together; by default as many as the pools' `max` allow."""
    actuator: Literal["up", "kubernetes", "docker"] = "up"
    """`up`: `pagemill up` starts and drains the workers. `kubernetes`: autoscalers, as pods, set
    the sizes of the Deployments that `pagemill manifests` has written. `docker`: autoscalers, in
    containers, start and stop containers of a compose project, for which they ask `pagemill
    docker-proxy`."""
    docker_proxy: str = "/run/docker-proxy/socket"
    """Unix socket on which `pagemill docker-proxy` listens; only `actuator: docker` uses it."""
