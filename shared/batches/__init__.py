"""Batches: their state, their input file and the format of their results. Pure."""
