"""Weights go to a device tensor by tensor: the memory of the host never has a whole model.

The device is `meta`, which stores nothing, so that the memory of the process is memory of the host.
The same model on the device `cpu` shows that a copy would be found.
"""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from shared.errors import ConfigError
from shared.vision.weights import load_weights
from tests.preloaded import PYTHON, ROOT
from tests.quantized_checkpoints import FORMS, quantize

NUM_LAYERS = 40
WIDTH = 256
"""Threads of transformers hold several weights at once, so weights are small."""

ROOM_BYTES = 60 << 20

SCRIPT = """
import ctypes
import gc
import sys
from pathlib import Path
import torch
from transformers import LlamaForCausalLM
from shared.vision.weights import load_weights

def read_bytes(name):
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(name + ":")[2].split()[0])

for path in sys.argv[1:]:
    folder = Path(path)
    # The first load imports modules, which also need memory.
    load_weights(LlamaForCausalLM, folder.with_name(folder.name + "-small"), torch.float32, "cpu")
    for device in ("meta", "cpu"):
        # Memory of the last load that is not returned would be used again, and not be counted.
        model = None
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = read_bytes("VmRSS")
        model = load_weights(LlamaForCausalLM, folder, torch.float32, device)
        assert {weight.device.type for weight in model.parameters()} == {device}
        print(folder.name, device, read_bytes("VmHWM") - before)
"""


def _save(model: Any, folder: Path) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(-1, 1)
    model.to(torch.bfloat16).save_pretrained(folder)


def _write_llama(folder: Path, num_layers: int) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    _save(model.to_empty(device="cpu"), folder)


def _write_numbers(folder: Path, num_layers: int) -> None:
    _write_llama(folder, num_layers)
    twin = folder.with_name(f"{folder.name}-twin")
    shutil.copytree(folder, twin)
    quantize(folder, twin, FORMS["int8_channels"])


def test_the_host_has_no_copy_of_a_model_that_goes_to_a_device(tmp_path: Path) -> None:
    folders = []
    writers = {"float": _write_llama, "numbers": _write_numbers}
    for name, write in writers.items():
        write(tmp_path / f"{name}-small", 1)
        write(tmp_path / name, NUM_LAYERS)
        folders.append(str(tmp_path / name))
    done = subprocess.run(
        [*PYTHON, "-c", SCRIPT, *folders], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        name, device, peak = line.split()
        # The pages of a file that is read count too.
        files = (tmp_path / name).glob("*.safetensors")
        limit = sum(file.stat().st_size for file in files) + ROOM_BYTES
        assert (int(peak) < limit) is (device == "meta"), (line, limit)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", "meta"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights, name: weights.pop(name), "lacks weights: {}$"),
        (lambda weights, name: weights.update({name: torch.ones(9)}), r"has {} of shape \[9\]"),
    ],
)
def test_weights_that_do_not_go_to_a_device_are_named(
    tmp_path: Path, device: str, change: Callable[[dict[str, Any], str], object], message: str
) -> None:
    """Weights go to any device but `cpu` on one path, by the name that the device has."""
    _write_llama(tmp_path, 1)
    file, name = tmp_path / "model.safetensors", "model.layers.0.self_attn.k_proj.weight"
    weights = load_file(file)
    change(weights, name)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=message.format(name)):
        load_weights(LlamaForCausalLM, tmp_path, torch.float32, device)
