"""Execution of batches by calls of the gateway's own endpoints."""
