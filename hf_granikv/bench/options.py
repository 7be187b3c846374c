"""Options that the sections of `granikv bench` have in common, and what is checked about them."""

import argparse
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_granikv.config import check_is_there, check_out
from hf_granikv.demo_model import obtain_model


def add_common(parser: argparse.ArgumentParser) -> None:
    """Adds the options of every section."""
    parser.add_argument(
        "--model", metavar="PATH_OR_ID", help="default: SmolLM2-135M-Instruct, as for the demo"
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="default: bfloat16"
    )
    parser.add_argument(
        "--threads", type=positive, default=os.cpu_count(), metavar="N", help="default: all cores"
    )
    parser.add_argument("--out", metavar="FILE", help="JSON lines file to append the rows to")
    parser.add_argument(
        "--plot",
        metavar="DIR",
        help="folder for plots of all rows in --out, or of this run's; needs matplotlib",
    )


def add_peers(parser: argparse.ArgumentParser, known: Iterable[str], default: list[str]) -> None:
    """Adds the option that says who is measured; the first one is what others are compared with."""
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=list(known),
        metavar="PEER",
        help=f"of {', '.join(known)}; default: those that run here of {', '.join(default)}",
    )
    parser.set_defaults(default_peers=default)


def check_common(arguments: argparse.Namespace) -> None:
    """Refuses what could not be written, before anything is measured.

    Raises:
        ImportError: Plots are wanted, and matplotlib is not there.
        ValueError: A folder of a file to write is not there, or the file is one.
    """
    if arguments.out:
        check_out(arguments.out)
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            f"--plot {arguments.plot} needs matplotlib, which is not installed; run: "
            "pip install 'hf-granikv[plots]', or leave --plot out."
        )


def loaded_model(arguments: argparse.Namespace) -> PreTrainedModel:
    """The model that is asked for, in the dtype that is asked for.

    Raises:
        ValueError: It cannot be loaded.
    """
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    source = arguments.model or obtain_model(print)
    try:
        check_is_there(source)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, arguments.dtype)
        )
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"--model {source} cannot be loaded: {reason}") from error
    return model.eval()


def model_name(arguments: argparse.Namespace) -> str:
    """What the model is called in results."""
    if not arguments.model:
        return "SmolLM2-135M-Instruct"
    return Path(arguments.model).name


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)
