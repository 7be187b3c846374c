"""What `granikv bench` measures when no section is named: the workloads of `benchmarks/README.md`."""

from typing import NamedTuple


class Part(NamedTuple):
    """One command of the suite.

    Attributes:
        section: The section.
        options: Those that make its workload.
    """

    section: str
    options: str


# longer ones have fewer steps: the slowest peer takes seconds for each
SUITE = (
    Part("decode", "--rows 16 --prefix 4096 --suffix 64 --steps 16"),
    Part("decode", "--rows 16 --prefix 8192 --suffix 64 --steps 8"),
    Part("decode", "--rows 64 --prefix 4096 --suffix 64 --steps 8"),
    Part("decode", "--rows 1 --prefix 4096 --suffix 64 --steps 40"),
    Part("decode", "--rows 1 4 16 --prefix 16 128 512 --suffix 64 --steps 20"),
    Part("decode", "--rows 4 --prefix 4096 --suffix 64 --steps 20"),
    Part("decode", "--rows 16 --prefix 1024 2048 --suffix 64 --steps 20"),
    Part("groups", "--prefixes 1024 2048 3072 4096 --agents 4 --steps 8"),
    Part("groups", "--prefixes 512 1024 1536 2048 2560 3072 3584 4096 --agents 2 --steps 6"),
    Part("trace", "--rate 0.5"),
    Part("ttft", "--rows 16 --prefix 4096 --suffix 32"),
    Part("drop-in", "--rows 1 --prompt 800 --tokens 1000"),
    Part("drop-in", "--rows 16 --prompt 960 --tokens 1000"),
)

# a look at whether everything runs here; its figures say nothing
QUICK = (
    Part("decode", "--rows 3 --prefix 16 --suffix 4 --steps 2 --warmup 1"),
    Part("groups", "--prefixes 16 32 --agents 2 --suffix 4 --steps 2 --warmup 1"),
    Part(
        "trace", "--prefixes 16 32 --requests 4 --rate 50 --suffix 4 --output 4 --longest-output 8"
    ),
    Part("ttft", "--rows 2 --prefix 32 --suffix 4"),
    Part("drop-in", "--rows 2 --prompt 4 --tokens 8"),
)
