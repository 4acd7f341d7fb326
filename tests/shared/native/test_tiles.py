"""The code for a matrix extension, on a model of its instructions in software.

The model counts the products that tiles have computed, and the instructions of threads that had not
configured their tiles, for which a processor ends the process.
"""

import copy
import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from shared.models.registry import adapt
from shared.native import library, targets, tower_kernels
from shared.native.choices import NEVER
from shared.native.matrices import PANEL, Format, PackedMatrix
from shared.native.tower_kernels import TOKEN_GROUP, TowerKernels
from tests import preloaded
from tests.engine.model.test_parity import TEXT
from tests.shared.native.test_numbers import NUMBERS, SHAPES, check_products
from tests.shared.native.test_tower_kernels import assert_near, attend, needs_kernels, starts
from workers.engine.cpu.decoder import NativeModel
from workers.engine.model.flat_model import BatchLayout, StepInputs

ROOT = Path(__file__).parents[3]
SOURCES = Path(library.__file__).parent
pytestmark = needs_kernels


@pytest.fixture(scope="module")
def software_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels as compiled for a processor with the extension, with the model in its place."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    target = tmp_path_factory.mktemp("tiles") / "tiles.so"
    subprocess.run(
        [
            compiler,
            *library.FLAGS,
            "-O0",
            "-include",
            "software_tiles.h",
            "-I",
            str(Path(__file__).parent),
            "-I",
            str(SOURCES),
            *(str(SOURCES / name) for name in targets.SOURCES),
            "-o",
            str(target),
        ],
        check=True,
    )
    return target


@pytest.fixture
def tiles(software_library: Path) -> Iterator[ctypes.CDLL]:
    """The library, with which a test must compute by tiles, and by configured ones only."""
    loaded: Any = library._declare(ctypes.CDLL(str(software_library)))
    before = loaded.num_tile_products()
    yield loaded
    assert loaded.num_unconfigured_tiles() == 0
    assert loaded.num_tile_products() > before


def test_a_decoder_yields_the_results_of_vectors(
    tiles: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6}
    model: Any = LlamaForCausalLM(LlamaConfig(**{**TEXT, **shape}))
    model = model.to(torch.bfloat16).eval().requires_grad_(False)
    sizes = (1, 9, 16, 17, 32, 33, 70)

    def logits_of(num_tokens: int) -> Tensor:
        native = NativeModel(adapt(copy.deepcopy(model)), 2, "tiles")
        cache = native.new_cache(16, 8)
        positions = torch.arange(num_tokens)
        plan = native.plan(BatchLayout([range(16)], [0, num_tokens], [num_tokens]), cache)
        with torch.inference_mode():
            return native.forward(
                StepInputs(native.embed(positions), positions[None], plan, cache, positions)
            )

    vector = [logits_of(size) for size in sizes]
    monkeypatch.setattr(library, "load", lambda: tiles)
    for size, expected in zip(sizes, vector, strict=True):
        torch.testing.assert_close(logits_of(size), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("num_rows", [16, 17, 31, 32, 33, 47, 48, 100])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_tower_yields_the_results_of_torch(
    tiles: ctypes.CDLL, num_rows: int, num_threads: int
) -> None:
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, 96).bfloat16()
    weight = (0.1 * torch.randn(70, 96)).bfloat16()
    packed = PackedMatrix(tower_kernels.pack_weight(weight))
    kernels = TowerKernels(tiles, num_threads)
    actual = kernels.multiply(x, packed, torch.zeros(96), 70, min_tile_rows=1)
    expected = F.linear(x.float(), weight.float())
    torch.testing.assert_close(actual.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_have_the_products_of_their_values(number: Format, tiles: ctypes.CDLL) -> None:
    for shape in SHAPES:
        check_products(TowerKernels(tiles, 2), number, shape, [16, 17, 31, 40, 70], 1)


# One segment is longer than a chunk of tokens; others have rows and dimensions that fill no tile.
@pytest.mark.parametrize(
    ("lengths", "num_heads", "head_dim"),
    [([600], 1, 16), ([1, 15, 16, 17, 33, 0, 129], 2, 40), ([64, 40], 1, 80)],
)
def test_a_towers_attention_yields_the_results_of_torch(
    tiles: ctypes.CDLL, lengths: list[int], num_heads: int, head_dim: int
) -> None:
    torch.manual_seed(head_dim)
    qkv = torch.randn(sum(lengths), 3, num_heads, head_dim).bfloat16()
    radians = torch.randn(sum(lengths), head_dim // 2).repeat(1, 2) * 3
    angles = (radians.cos(), radians.sin())
    query, key, value = qkv.unbind(1)
    scale = 2 * head_dim**-0.5
    kernels = TowerKernels(tiles, 2)
    actual = kernels.attend(query, key, value, angles, starts(lengths), scale, min_tile_rows=1)
    assert_near(actual, attend(qkv, angles, lengths, scale))


@pytest.mark.parametrize(
    ("num_rows", "seq_len", "head_dim"),
    [(1, 1, 64), (5, 30, 8), (16, 500, 40), (33, 33, 64), (100, 1100, 24), (128, 513, 72)],
)
def test_attention_over_a_cache_yields_the_results_of_vectors(
    tiles: ctypes.CDLL, num_rows: int, seq_len: int, head_dim: int
) -> None:
    torch.manual_seed(seq_len)
    num_blocks = -(-seq_len // TOKEN_GROUP) + 3
    table = torch.randperm(num_blocks).to(torch.int32)
    query = torch.randn(num_rows, head_dim).bfloat16()
    keys = torch.randn(num_blocks, head_dim // 2, TOKEN_GROUP, 2).bfloat16()
    width = -(-head_dim // PANEL) * PANEL
    values = torch.randn(num_blocks, TOKEN_GROUP // 2, width, 2).bfloat16()
    kernels = TowerKernels(tiles, 1)
    by_tiles, by_vectors = (
        kernels.attend_cached(query, keys, values, table, seq_len, min_tile_rows)
        for min_tile_rows in (1, NEVER)
    )
    assert_near(by_tiles, by_vectors.float())


# Rows of inputs that end where the memory ends; a thread that reads on ends the process.
READS_TO_THE_END = """
import ctypes, mmap, sys
import torch
from shared.native import library, matrices, tower_kernels

loaded = library._declare(ctypes.CDLL(sys.argv[1]))
kernels = tower_kernels.TowerKernels(loaded, 1)
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 201 * page)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(address + 200 * page), page, 0) == 0
# Rows so wide are multiplied in blocks of 32.
sizes = [(num_rows, 64) for num_rows in (*range(1, 70), 200)] + [(40, 6144)]
for num_rows, width in sizes:
    weight = tower_kernels.pack_weight(torch.zeros(32, width).bfloat16())
    size = num_rows * width
    x = torch.frombuffer(memory, dtype=torch.bfloat16, count=size, offset=200 * page - 2 * size)
    packed = matrices.PackedMatrix(weight)
    kernels.multiply(x.view(num_rows, width), packed, torch.zeros(32), 32, min_tile_rows=1)
assert loaded.num_tile_products() > 0
"""


def test_nothing_after_the_last_row_is_read(software_library: Path) -> None:
    command = [*preloaded.PYTHON, "-c", READS_TO_THE_END, str(software_library)]
    assert subprocess.run(command, cwd=ROOT, timeout=100).returncode == 0


def test_tile_instructions_are_methods_of_what_configures_the_tiles() -> None:
    for name in (*targets.SOURCES, *targets.HEADERS):
        text = (SOURCES / name).read_text(encoding="utf-8")
        places = {match.start() for match in re.finditer(r"\b_tile_\w+\(", text)}
        if name == "tiles.h":
            begin = text.index("class Tiles {")
            places -= set(range(begin, text.index("\n};", begin)))
        assert not places, name
