"""Kernel ops: one folder each, a torch reference first; none of them imports transformers."""
