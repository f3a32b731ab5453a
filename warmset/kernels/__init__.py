"""Triton kernels: one op is one file, kernel and launcher; `reference` holds the same ops in plain torch.

`dispatch` chooses between them and imports without Triton.
"""
