"""Eight agents over one document: with the shared prefix, then with stock `generate`."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from hf_granikv.cache import AsymmetricPagedCache
from hf_granikv.compat import CACHE_ARGUMENT
from hf_granikv.config import DISPATCH_CHOICES, check_is_there
from hf_granikv.demo_model import obtain_model
from hf_granikv.multi_agent import MultiAgentRunner
from hf_granikv.prompts import left_padded
from hf_granikv.settings import GenerationSettings, padding_id
from hf_granikv.timing import StepTimer

OPENING = "Answer in one or two sentences, from this file only.\n\n"

# name, instructions, question
AGENTS = (
    (
        "historian",
        "You care for dates.",
        "When was the cooperative founded, with how many members?",
    ),
    ("accountant", "You care for sums.", "What is the surplus, and what is proposed for it?"),
    (
        "fund keeper",
        "You save.",
        "How much does the treasurer propose to put into the repair fund?",
    ),
    ("engineer", "You care for machines.", "What is wrong with the gearbox of Old Tom?"),
    ("sceptic", "You doubt a lot.", "What does Ruaridh Venn want the money to be put into?"),
    ("clerk", "You prepare the vote.", "What does Motion A ask for?"),
    ("host", "You cook the soup.", "When and where does the meeting take place?"),
    ("teller", "You count.", "How many members have a vote, and how many must be present?"),
)


@dataclass(frozen=True, slots=True)
class _Measured:
    """One side of the comparison; times in seconds from the first token computed."""

    answers: list[tuple[int, ...]]
    computed_tokens: int
    first_token_s: float
    decode_s: float
    total_s: float
    held_bytes: int

    @property
    def tokens_per_s(self) -> float:
        return (sum(map(len, self.answers)) - len(self.answers)) / self.decode_s


def run_demo(model_id: str | None, device: str | None, max_new_tokens: int) -> bool:
    """Runs the demo and prints what it finds.

    Args:
        model_id: A folder or hub id; None obtains SmolLM2-135M-Instruct.
        device: Where to run; None takes the accelerator if there is one.
        max_new_tokens: Most tokens per answer.

    Returns:
        Whether all agents gave the same tokens on both sides.

    Raises:
        ValueError: The device cannot be used, or the model cannot be loaded.
    """
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_device(device)
    source = model_id or obtain_model(_say)
    _say(f"loading {source} in float32 on {device}")
    model, tokenizer = _loaded(source)
    model.to(device).eval()
    with torch.no_grad():
        # the first forward pays for threads and memory that both sides use later
        model(torch.zeros(len(AGENTS), 16, dtype=torch.long, device=device))
    ours, prompts, report = _ours(model, tokenizer, max_new_tokens)
    stock = _stock(model, tokenizer, prompts, max_new_tokens)
    _print_table(ours, stock)
    steps = ", ".join(f"{name} {count}" for name, count in report.backend_steps.items())
    print(f"\nbackends that ran (steps): {steps}")
    num_same = sum(a == b for a, b in zip(ours.answers, stock.answers, strict=True))
    print(f"identical answers {num_same}/{len(AGENTS)} (compared token by token)")
    return num_same == len(AGENTS)


def _check_device(device: str) -> None:
    try:
        torch.zeros(1, device=device)
    # a build without the device asserts
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"--device {device} cannot be used here ({_first_line(error)}); give cpu, or leave it out."
        ) from error


def _loaded(source: str) -> tuple[Any, Any]:
    try:
        check_is_there(source)
        tokenizer = AutoTokenizer.from_pretrained(source)
        # the same tokens to the last one is a promise of float32
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, attn_implementation="granikv"
        )
    except (OSError, ValueError) as error:
        place = "this folder" if Path(source).is_dir() else "not a folder here"
        raise ValueError(
            f"--model {source} ({place}) cannot be loaded: {_first_line(error)} "
            "Give the folder or the hub id of a causal language model."
        ) from error
    return model, tokenizer


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _ours(
    model: Any, tokenizer: Any, max_new_tokens: int
) -> tuple[_Measured, list[list[int]], Any]:
    document = resources.files("hf_granikv").joinpath("data/skerry_sound.md").read_text("utf-8")
    with _heartbeat("warming up; kernels are compiled the first time"):
        _warm_up(model)
    runner = MultiAgentRunner(model, tokenizer)
    with _counted_tokens(model) as counts:
        with _heartbeat("reading the shared document once"):
            prefix = runner.share(OPENING + document)
        for name, instructions, _ in AGENTS:
            runner.agent(name, prefix, instructions)
        questions = {name: question for name, _, question in AGENTS}
        prompts = [runner.prompt_ids(name, question) for name, question in questions.items()]
        _say(
            f"{len(AGENTS)} agents ask about {prefix.num_tokens} shared tokens (a small model: fluent, not wise)"
        )
        replies = runner.run(
            questions,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=_AnswerPrinter(tokenizer, _settings(model, tokenizer)),
        )
    report = runner.report()
    assert report.suffix_prefill_s is not None
    assert report.decode_s is not None
    measured = _Measured(
        answers=[reply.token_ids for reply in replies.values()],
        computed_tokens=sum(counts),
        first_token_s=report.prefix_prefill_s + report.suffix_prefill_s,
        decode_s=report.decode_s,
        total_s=report.prefix_prefill_s + report.generate_s,
        held_bytes=report.held_bytes,
    )
    return measured, prompts, report


def _warm_up(model: Any) -> None:
    """Decodes a few tokens over a prefix in every way: what only a first step takes is no time of either."""
    ids = torch.ones(len(AGENTS), 8, dtype=torch.long, device=model.device)
    mask = torch.ones_like(ids)
    for dispatch in DISPATCH_CHOICES:
        cache = AsymmetricPagedCache(model.config, dispatch=dispatch)
        cache.prefill(model, ids[:1, :6])
        options = {"max_new_tokens": 3, "do_sample": False, CACHE_ARGUMENT: cache}
        model.generate(input_ids=ids, attention_mask=mask, **options)


def _stock(model: Any, tokenizer: Any, prompts: list[list[int]], max_new_tokens: int) -> _Measured:
    model.set_attn_implementation("sdpa")
    pad_id = padding_id(tokenizer)
    ids, mask = left_padded(prompts, pad_id)
    cache: Any = DynamicCache(config=model.config)
    timer = StepTimer(None, max_new_tokens)
    with (
        _counted_tokens(model) as counts,
        _heartbeat(f"stock generate: the same {len(prompts)} prompts in one batch"),
        timer,
    ):
        sequences = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=pad_id,
            streamer=timer,
            **{CACHE_ARGUMENT: cache},
        )
    settings = _settings(model, tokenizer)
    assert timer.prefill_s is not None
    assert timer.decode_s is not None
    return _Measured(
        answers=[
            tuple(settings.answer_ids(row)[0]) for row in sequences[:, ids.shape[1] :].tolist()
        ],
        computed_tokens=sum(counts),
        first_token_s=timer.prefill_s,
        decode_s=timer.decode_s,
        total_s=timer.total_s,
        held_bytes=sum(
            tensor.untyped_storage().nbytes()
            for layer in cache.layers
            for tensor in (layer.keys, layer.values)
        ),
    )


def _print_table(ours: _Measured, stock: _Measured) -> None:
    rows = [
        ("tokens computed", ours.computed_tokens, stock.computed_tokens, ",d", False),
        ("bytes held for keys and values", ours.held_bytes, stock.held_bytes, ",d", False),
        ("time to first token, s", ours.first_token_s, stock.first_token_s, ".2f", False),
        ("decode, tokens/s", ours.tokens_per_s, stock.tokens_per_s, ".1f", True),
        ("total time, s", ours.total_s, stock.total_s, ".2f", False),
    ]
    print(f"\n{'':32}{'hf_granikv':>16}{'DynamicCache':>16}{'better by':>12}")
    for label, mine, theirs, form, is_more_better in rows:
        ratio = mine / theirs if is_more_better else theirs / mine
        print(f"{label:32}{mine:>16{form}}{theirs:>16{form}}{ratio:>11.2f}x")


class _AnswerPrinter(BaseStreamer):
    """Prints each agent's answer as soon as its row has ended."""

    def __init__(self, tokenizer: Any, settings: GenerationSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._rows: list[list[int]] | None = None
        self._open = list(range(len(AGENTS)))

    def put(self, value: Tensor) -> None:
        # the first call carries the prompts
        if self._rows is None:
            self._rows = [[] for _ in AGENTS]
            return
        for row in list(self._open):
            self._rows[row].append(int(value[row]))
            if self._rows[row][-1] in self._settings.end_ids:
                self._print(row)

    def end(self) -> None:
        for row in list(self._open):
            self._print(row)

    def _print(self, row: int) -> None:
        assert self._rows is not None
        self._open.remove(row)
        name, _, question = AGENTS[row]
        text = self._tokenizer.decode(self._rows[row], skip_special_tokens=True)
        print(f"\n  {name}: {question}\n    {' '.join(text.split())}", flush=True)


def _settings(model: Any, tokenizer: Any) -> GenerationSettings:
    return GenerationSettings.checked({}, model.generation_config, tokenizer)


@contextmanager
def _counted_tokens(model: Any) -> Iterator[list[int]]:
    """Counts the tokens that really pass the embedding, pads included."""
    counts: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: counts.append(args[0].numel())
    )
    try:
        yield counts
    finally:
        hook.remove()


@contextmanager
def _heartbeat(text: str) -> Iterator[None]:
    """Says every few seconds that the work goes on."""
    _say(text)
    start = time.perf_counter()
    is_done = threading.Event()

    def beat() -> None:
        while not is_done.wait(10):
            _say(f"  ... {time.perf_counter() - start:.0f} s")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
    _say(f"  done in {time.perf_counter() - start:.1f} s")


def _say(text: str) -> None:
    print(text, flush=True)
