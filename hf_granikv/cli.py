"""The command `granikv`."""

import argparse
import sys
from collections.abc import Sequence

from hf_granikv import __version__
from hf_granikv.bench.command import main as run_bench
from hf_granikv.demo import run_demo


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
    return parser


def _run_demo(arguments: argparse.Namespace) -> int:
    try:
        is_same = run_demo(arguments.model, arguments.device, arguments.max_new_tokens)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        # the errors of libraries may run over many lines
        print(f"granikv demo: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0 if is_same else 1


def _at_least_two(text: str) -> int:
    # speed is measured between the first token and the last
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 2 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
