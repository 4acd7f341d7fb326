"""Pools, reports and heartbeats for tests of the autoscaler."""

from shared.config.schema import Config, ModelConfig, PoolConfig, ScaleConfig
from shared.protocol.messages import BlobAddress, Heartbeat, PoolReport, WorkerSlot
from workers.pools import Pools, pools_of

ENGINE, ENCODER = "engine/demo", "encoder/demo"


def make_pools(*entries: PoolConfig) -> Pools:
    models = {"demo": ModelConfig("demo", tower="encoder")}
    return pools_of(Config(models, scale=ScaleConfig(list(entries))))


def two_pools() -> Pools:
    return make_pools(PoolConfig(role="engine", max=4), PoolConfig(role="encoder", max=2))


def report(engine: list[WorkerSlot], actuator: str = "actuator-1") -> PoolReport:
    return PoolReport(ENGINE, actuator, "here", engine)


def beat(pid: int, role: str = "engine", host: str = "here", **load: float) -> Heartbeat:
    address = BlobAddress(host, "socket")
    return Heartbeat(role, f"{role}-{pid}", "1", pid, ["demo"], load, address)
