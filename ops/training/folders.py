"""Folders of the finished models, which the trainings read and write."""

from __future__ import annotations

from pathlib import Path

OPS = Path(__file__).resolve().parents[1]
SEEING = OPS / "demo_model"
HEARING = OPS / "demo_hearing"
VOICE = OPS / "demo_voice"
PAINTER = OPS / "demo_painter"
RECORDED_TESTS = OPS.parent / "tests" / "recorded"
