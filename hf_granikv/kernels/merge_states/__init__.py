"""Merges partial attention results by their log-sum-exp."""

from hf_granikv.kernels.merge_states.reference import merge_states, merged_out

__all__ = ["merge_states", "merged_out"]
