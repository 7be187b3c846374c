"""Measures this package beside other ways to do the same: the command `granikv bench`."""
