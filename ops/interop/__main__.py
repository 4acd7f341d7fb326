"""Compare Pagemill and vLLM, each as renderer and as engine of the other, on random weights.

    python -m ops.interop --peers FOLDER

FOLDER has vLLM's environment as `vllm`, see ops/bench/peers/install.sh. Both serve a small Qwen2-VL
in float32 and decode greedily, so that each request has one right answer. Bodies go unchanged from
one server to the other, except for the hashes of images with other pixels. Exits 0 only if
everything that must be equal is.
"""

from rich.console import Console

from ops.bench.models import write_tiny
from ops.bench.servers import vllm_of_command_line
from ops.interop.checks import check_all
from ops.interop.pairs import report, serve_both


def main() -> None:
    console = Console(soft_wrap=True)
    binary = vllm_of_command_line(__doc__, console)
    if binary is None:
        return
    with serve_both(console, binary, "tiny-qwen2vl", write_tiny) as (us, them):
        report(console, check_all(us, them))


if __name__ == "__main__":
    main()
