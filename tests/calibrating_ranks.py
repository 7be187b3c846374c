"""One of two processes that calibrate together: run by `dispatch/test_ranks.py`.

python -m torch.distributed.run --standalone --nproc-per-node 2 tests/calibrating_ranks.py <file>
"""

import sys

import torch

from hf_granikv import cli
from hf_granikv.dispatch import calibration


def main() -> None:
    (out,) = sys.argv[1:]
    torch.set_num_threads(1)
    # small operands: a test has no minute
    calibration.STORE_BYTES, calibration._AT_LEAST, calibration._MAX_PRODUCTS = 16 << 20, 8, 1 << 22
    code = cli.main(["calibrate", "--device", "cpu", "--seconds", "1", "--out", out])
    assert code == 0
    assert not torch.distributed.is_initialized()


if __name__ == "__main__":
    main()
