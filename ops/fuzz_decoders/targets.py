"""The table of all targets."""

from ops.fuzz_decoders.bus_targets import BUS_TARGETS
from ops.fuzz_decoders.door_targets import DOOR_TARGETS
from ops.fuzz_decoders.target import FuzzTarget

TARGETS: dict[str, FuzzTarget] = {target.name: target for target in BUS_TARGETS + DOOR_TARGETS}
