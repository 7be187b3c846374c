"""The command `granikv`."""

import argparse
import sys
from collections.abc import Sequence

from hf_granikv import __version__
from hf_granikv.bench.command import main as run_bench
from hf_granikv.calibrating import run_calibration, usable_device
from hf_granikv.demo import run_demo
from hf_granikv.dispatch.known_devices import ON_PAPER
from hf_granikv.dispatch.prediction import Load
from hf_granikv.explaining import DTYPES, KNOWN_MODELS, explained, known_constants, model_shape


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, by default this process's, and gives the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["bench"]:
        # its sections have options of their own
        return run_bench(argv[1:])
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="granikv",
        description="One shared prefix for many agents, in Hugging Face transformers.",
    )
    parser.add_argument("--version", action="version", version=f"granikv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("bench", help="measures it beside other caches and engines")
    demo = commands.add_parser(
        "demo",
        help="eight agents over one document, beside stock generate",
        description="Eight agents answer from one document of 3,000 tokens, then stock generate "
        "answers the same; prints tokens, bytes and times of both. Exits with 1 if an answer differs.",
    )
    demo.add_argument(
        "--model",
        metavar="PATH_OR_ID",
        help="default: SmolLM2-135M-Instruct, from this machine, the hub or a wheel",
    )
    demo.add_argument("--device", help="default: cuda if there is one, else cpu")
    demo.add_argument(
        "--max-new-tokens", type=_at_least_two, default=48, metavar="N", help="default: 48"
    )
    demo.set_defaults(run=_run_demo)
    calibrate = commands.add_parser(
        "calibrate",
        help="measures this device, so that the fastest way is chosen on it",
        description="Measures what a launch, a read, matrix products, merging, gathering and every "
        "way to read a prefix cost on this device, and saves it for all later runs. Under torchrun, "
        "the link between the ranks as well.",
    )
    calibrate.add_argument("--device", help="default: cuda if there is one, else cpu")
    calibrate.add_argument(
        "--seconds",
        type=_seconds,
        default=45.0,
        metavar="S",
        help="to spend, about, and more where the least to measure takes longer; default: 45",
    )
    calibrate.add_argument("--out", metavar="FILE", help="default: where later runs look for it")
    calibrate.set_defaults(run=_run_calibrate)
    explain = commands.add_parser(
        "explain",
        help="predicts a decode step of a model on a device, on paper",
        description="Predicts what attention of one decode step takes, by every way to read the "
        "prefix and with DynamicCache, and the bytes of both caches. Runs no model.",
    )
    explain.add_argument(
        "model",
        metavar="MODEL",
        help=f"config path or folder, hub id, or {', '.join(KNOWN_MODELS)}",
    )
    explain.add_argument("--rows", type=_count, default=16, metavar="N", help="default: 16")
    explain.add_argument(
        "--prefix", type=_count, default=4096, metavar="N", help="shared tokens; default: 4096"
    )
    explain.add_argument(
        "--suffix", type=_count, default=64, metavar="N", help="private tokens a row; default: 64"
    )
    explain.add_argument(
        "--device", help=f"default: this one; {', '.join(ON_PAPER)} are known on paper"
    )
    explain.add_argument("--dtype", choices=DTYPES, help="default: the config's")
    explain.set_defaults(run=_run_explain)
    return parser


def _run_demo(arguments: argparse.Namespace) -> int:
    try:
        is_same = run_demo(arguments.model, arguments.device, arguments.max_new_tokens)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        # the errors of libraries may run over many lines
        print(f"granikv demo: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0 if is_same else 1


def _run_calibrate(arguments: argparse.Namespace) -> int:
    try:
        device = usable_device(arguments.device)
        report = run_calibration(device, arguments.seconds, arguments.out)
    except (OSError, ValueError) as error:
        print(f"granikv calibrate: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print("\n".join(report))
    return 0


def _run_explain(arguments: argparse.Namespace) -> int:
    try:
        shape = model_shape(arguments.model, arguments.dtype)
        constants = known_constants(arguments.device)
    except ValueError as error:
        print(f"granikv explain: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    load = Load(arguments.rows, arguments.prefix, arguments.suffix)
    print("\n".join(explained(shape, load, constants)))
    return 0


def _at_least_two(text: str) -> int:
    # speed is measured between the first token and the last
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 2 or more")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 1 to 3600")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
