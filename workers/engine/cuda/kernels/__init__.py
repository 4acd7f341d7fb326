"""The engine's Triton kernels. No other package imports Triton.

Modules are imported one by one; `plan` works without Triton. Tensors have the shapes of the torch
implementations: [tokens, heads, head dimension]. Rows that pad a CUDA graph are harmless: their
slot is -1, so nothing is written, and their results are not read.
"""
