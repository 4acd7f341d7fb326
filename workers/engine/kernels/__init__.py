"""What the engine computes on a GPU by kernels of its own, in Triton; nobody else imports Triton.

The modules are imported one by one, `plan` also where there is no Triton. Shapes are as in the
torch versions beside them: tokens in rows, heads, the dimensions of a head. Every row with nothing
in it, as a CUDA graph is padded with, is harmless: its tile has no queries and its slot is -1.
"""
