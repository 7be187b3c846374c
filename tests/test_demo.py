"""The demo from its document to its table, on a tiny model."""

from importlib import resources

import pytest
from agents import CHATML, llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_granikv import AsymmetricPagedCache, demo
from hf_granikv.backends import BACKENDS
from hf_granikv.demo import AGENTS, run_demo


@pytest.fixture
def folder(tmp_path):
    text = resources.files("hf_granikv").joinpath("data/skerry_sound.md").read_text("utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<pad>", "<bos>", "<eos>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    fast.chat_template = CHATML
    fast.save_pretrained(tmp_path)
    model = llama(vocab_size=len(fast), max_position_embeddings=8192)
    model.save_pretrained(tmp_path)
    return tmp_path


def test_demo_answers_as_stock_generate_and_prints_its_table(folder, capsys):
    assert run_demo(str(folder), "cpu", max_new_tokens=4)
    out = capsys.readouterr().out
    assert f"identical answers {len(AGENTS)}/{len(AGENTS)}" in out
    labels = (
        "tokens computed",
        "bytes held",
        "time to first token",
        "decode, tokens/s",
        "total time",
    )
    for label in labels:
        assert any(line.startswith(label) and line.endswith("x") for line in out.splitlines())
    for name, _, question in AGENTS:
        assert f"  {name}: {question}" in out


def test_every_way_to_read_a_prefix_is_warm_before_anything_is_timed(monkeypatch):
    caches = []

    class Noted(AsymmetricPagedCache):
        def __init__(self, config, **options):
            super().__init__(config, **options)
            caches.append(self)

    monkeypatch.setattr(demo, "AsymmetricPagedCache", Noted)
    demo._warm_up(llama())
    ran = {name for cache in caches for name in cache.stats().backend_steps}
    assert ran == set(BACKENDS)
