"""Simulated engines under a simulated load: which routing and which scaling is worth building."""
