"""Sections of a run: modules with a function `run(session)`, listed in `ops.gpu.plan`."""
