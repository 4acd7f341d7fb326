"""The peers: the interpreter, the model and the settings of each.

A peer's environment is a folder with its name among the peers; a peer without one is skipped.
`install.sh` creates them. transformers is in our own environment, and so always present.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
TCMALLOC = "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"
OURS, BUS = "pagemill", "pagemill-bus"
# Peers that need images for such models get the language model alone.
TEXT_ALONE = {"mid-qwen2vl": "mid-qwen2"}


@dataclass(frozen=True, slots=True)
class Spec:
    name: str
    module: tuple[str, ...]
    """Module in this package, with arguments."""
    home: str | None = None
    """Name of its environment among the peers; None for our own."""
    sees: bool = True
    """Whether the peer supports images."""
    exported: bool = False
    """Whether the peer has the models in a special format."""
    compiles: bool = True
    """Whether its warm-up is a complete repetition; for the others, two requests suffice."""
    extra_bytes: int = GIB
    """Memory beyond three times the weights, approximately."""

    def python(self, peers: Path) -> Path | None:
        """Return the interpreter, or None if the peer is not installed."""
        if self.home is None:
            return Path(sys.executable)
        python = peers / self.home / "bin" / "python"
        return python if python.exists() else None

    def folder(self, models: Path, model: str, *, images: bool) -> Path | None:
        """Return the model's folder for this peer; None if unsupported or absent."""
        if images and not self.sees:
            return None
        if self.exported:
            name = model if images else TEXT_ALONE.get(model, model)
            models, model = models / "openvino", name
        folder = models / model
        return folder if folder.is_dir() else None


ROSTER = (
    Spec(OURS, ("pagemill",)),
    Spec(BUS, ("pagemill_bus",), extra_bytes=2 * GIB),
    Spec("vllm", ("vllm",), home="vllm", extra_bytes=4 * GIB),
    Spec("openvino", ("openvino",), home="openvino", exported=True),
    Spec("transformers", ("transformers", "padded"), compiles=False),
    Spec("transformers-cb", ("transformers", "continuous"), sees=False, compiles=False),
)


def environment(spec: Spec, python: Path, threads: int, kv_cache_gib: int) -> dict[str, str]:
    root = Path(__file__).parents[3]
    variables = {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if spec.name == OURS:
        # `pagemill worker` sets this too.
        variables["OMP_WAIT_POLICY"] = "PASSIVE"
    if spec.name == "vllm":
        variables |= {
            "DO_NOT_TRACK": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        }
        # OpenVINO's documentation advises this for CPUs.
        libraries = [TCMALLOC, str(python.parents[1] / "lib" / "libiomp5.so")]
        if all(Path(library).exists() for library in libraries):
            variables["LD_PRELOAD"] = ":".join(libraries)
    return os.environ | variables
