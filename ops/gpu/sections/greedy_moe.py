"""Tokens of mixtures of experts, compared with the CPU, with and without graphs."""

from ops.gpu.session import Session
from ops.gpu.token_checks import check_families

FAMILIES = ("mixtral", "qwen3_moe")


def run(session: Session) -> None:
    check_families(session, FAMILIES)
