"""Acceptance test of the compose cluster."""
