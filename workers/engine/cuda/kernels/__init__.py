"""What the engine computes on a GPU by kernels of its own, in Triton; nobody else imports Triton.

The modules are imported one by one, `plan` also where there is no Triton. Shapes are as in the
torch versions beside them: tokens in rows, heads, the dimensions of a head. A row that a CUDA graph
is padded with does no harm: its slot is -1, where nothing is written, and nobody reads its result.
"""
