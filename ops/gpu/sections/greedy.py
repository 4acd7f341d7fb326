"""Tokens of dense families, compared with the CPU, with and without graphs."""

from ops.gpu.session import Session
from ops.gpu.token_checks import check_families

FAMILIES = (
    "qwen2_vl",
    "qwen3_vl",
    "qwen2_5_vl",
    "llama",
    "qwen3",
    "qwen2",
    "mistral",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "phi3",
)


def run(session: Session) -> None:
    check_families(session, FAMILIES)
