"""The sections of a run: their order, their limits of time, and the question that each answers."""

from dataclasses import dataclass

CUDA_TESTS = (
    "tests/engine/cuda/test_cuda_graphs.py",
    "tests/engine/cuda/test_fused_layers.py",
    "tests/engine/cuda/kernels/test_elementwise.py",
    "tests/engine/cuda/kernels/test_sampling.py",
)
MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")


@dataclass(frozen=True)
class Section:
    """A part of a run, which is a process with a separate limit of time."""

    name: str
    limit_s: int
    question: str
    module: str = ""
    """Module with a function `run(session)`."""
    num_processes: int = 1
    """Processes among which the items of the section are divided."""
    share: str = ""
    """Share of the items that is run, such as 0/9; by default all."""
    arguments: tuple[str, ...] = ()
    """Arguments of Python, instead of a module."""
    tool: tuple[str, ...] = ()
    """Command under which the section runs on a GPU; the section is left out without it."""


def _section(name: str, limit_s: int, question: str, num_processes: int = 1) -> Section:
    return Section(name, limit_s, question, f"ops.gpu.sections.{name}", num_processes)


_PYTEST = ("-m", "pytest", "-q", "--timeout", "60", "-p", "no:cacheprovider", "-W", "default")

# The most valuable sections come first. The limits up to `greedy_moe` add up to 380 s: with 20 s
# for the installation of packages, that is the default budget.
SECTIONS = (
    _section("env", 30, "Which card, versions and ceilings?"),
    _section("kernels", 55, "Are the kernels right on the card?", 6),
    _section("greedy", 50, "Are the tokens those of a CPU, with and without graphs?", 6),
    _section("images", 25, "Are the tokens of prompts with images those of a CPU?", 4),
    _section("serving", 75, "How fast are 1.5B and 7B, and how long is the GPU idle?"),
    _section("attention", 35, "Which share of the bandwidth do the kernels reach?"),
    _section("sampling", 15, "Are the sampler's tokens right, and how long does it take?"),
    _section("tower", 20, "Which share of the matrix rate does a tower reach?"),
    _section("peer", 40, "How fast is transformers' continuous batching on 1.5B?"),
    _section("faults", 15, "What do errors of the device raise?"),
    _section("greedy_moe", 20, "The question of `greedy`, for mixtures of experts", 2),
    # These have the time that is left, or a second run.
    _section("peer_7b", 60, "How fast is transformers' continuous batching on 7B?"),
    Section(
        "tests",
        90,
        "Do the CUDA tests pass?",
        arguments=(*_PYTEST, *CUDA_TESTS),
    ),
    Section(
        "sanitizer",
        90,
        "Does a ninth of `kernels` access foreign memory?",
        module="ops.gpu.sections.kernels",
        share="0/9",
        tool=MEMCHECK,
    ),
)
