"""Tokens of prompts with images: the tower, rows of items, positions of three axes, DeepStack."""

from functools import partial

import torch

from ops.gpu.models import build, image_request, text_request, widen
from ops.gpu.session import Session
from ops.gpu.token_checks import compare_devices
from shared.protocol.sampling import SamplingParams

FAMILIES = ("qwen2_vl", "qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe")


def run(session: Session) -> None:
    for name in FAMILIES[:1] if session.dry else session.share_of(FAMILIES):
        session.attempt(f"{name}, images", partial(_check, session, name))


def _check(session: Session, name: str) -> None:
    torch.manual_seed(0)
    model = build(name)
    widen(model)
    sampling = SamplingParams(temperature=0, max_tokens=2 if session.dry else 16, ignore_eos=True)
    requests = [image_request(1, [(4, 6)], sampling)]
    if not session.dry:
        requests += [
            image_request(2, [(8, 4), (6, 10)], sampling),
            text_request(3, 23, sampling),
        ]
    compare_devices(session, f"{name}, images", model, requests)
