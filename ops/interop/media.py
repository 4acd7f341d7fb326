"""Compare Pagemill and vLLM on videos and sounds, each as renderer and as engine of the other.

    python -m ops.interop.media --peers FOLDER

As `python -m ops.interop`, with a random model of each family that vLLM has and that sees videos or
hears sounds. Exits 0 only if everything that must be equal is.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from ops.bench.servers import vllm_of_command_line
from ops.interop import models
from ops.interop.cases import Case
from ops.interop.checks import Finding, check_cases
from ops.interop.media_cases import sound_cases, video_cases
from ops.interop.pairs import report, serve_both

Write = Callable[[Path], None]
MODELS: dict[str, tuple[Write, Callable[[], list[Case]]]] = {
    "qwen2vl": (models.write_qwen2vl, video_cases),
    "qwen25vl": (models.write_qwen25vl, video_cases),
    "qwen3vl": (models.write_qwen3vl, video_cases),
    "qwen2audio": (models.write_qwen2audio, sound_cases),
    "omni": (models.write_omni, lambda: [*video_cases(), *sound_cases()]),
}


def main() -> None:
    console = Console(soft_wrap=True)
    binary = vllm_of_command_line(__doc__, console)
    if binary is not None:
        report(console, _check(console, binary))


def _check(console: Console, binary: Path) -> Iterator[Finding]:
    for name, (write, cases) in MODELS.items():
        with serve_both(console, binary, name, write) as (us, them):
            for finding in check_cases(cases(), us, them):
                yield Finding(f"{name}: {finding.what}", finding.equal, finding.detail)


if __name__ == "__main__":
    main()
