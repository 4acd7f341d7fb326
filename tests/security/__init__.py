"""Attacks, each with the answer that it must get."""
