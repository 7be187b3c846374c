"""Pieces of text against the text of all ids at once, on tokenizers of every kind."""

import pytest
from agents import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_granikv.engine.text import TextPieces, decoded

WORDS = ["a", "b", "the", "tide", ".", ",", "'", "n't", "s", "\n", "\u4f60", "\U0001f600"]


def fast(tokenizer, **options):
    special = {"eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **options)


def metaspace():
    """As sentencepiece tokenizers are: a space that opens a word, and bytes for what is unknown."""
    pieces = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *WORDS, *("\u2581" + word for word in WORDS)]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return fast(tokenizer)


def word_pieces(**options):
    pieces = ["<unk>", "<eos>", *WORDS, *("##" + word for word in WORDS)]
    model = models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return fast(tokenizer, **options)


TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "metaspace": metaspace(),
    "word_pieces": word_pieces(),
    "cleaned_up": word_pieces(clean_up_tokenization_spaces=True),
}


def pieces_of(tokenizer, ids):
    pieces = TextPieces(tokenizer)
    return [*(pieces.put([token_id]) for token_id in ids), pieces.end()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_are_the_text_of_all_ids(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    assert "".join(pieces_of(tokenizer, ids)) == decoded(tokenizer, ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_do_not_depend_on_how_ids_are_grouped(name, data):
    tokenizer = TOKENIZERS[name]
    chunks = data.draw(st.lists(st.lists(st.integers(0, len(tokenizer) - 1)), max_size=12))
    pieces = TextPieces(tokenizer)
    text = "".join(map(pieces.put, chunks)) + pieces.end()
    assert text == decoded(tokenizer, [i for chunk in chunks for i in chunk])


@pytest.mark.parametrize("name", ["bytes", "metaspace"])
def test_a_character_of_several_tokens_comes_whole(name):
    tokenizer, text = TOKENIZERS[name], "a\u00e9\u2192\U0001f600b"
    if name == "bytes":
        ids = tokenizer(text)["input_ids"]
    else:
        ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_plain_text_is_not_kept_waiting():
    tokenizer = TOKENIZERS["bytes"]
    assert pieces_of(tokenizer, tokenizer("tide table")["input_ids"]) == [*"tide table", ""]


def test_words_of_a_cleaned_text_come_with_the_next_one():
    tokenizer = TOKENIZERS["cleaned_up"]
    ids = tokenizer.convert_tokens_to_ids(["the", "tide", ",", "a", "b"])
    assert pieces_of(tokenizer, ids) == ["", "the", "", " tide,", " a", " b"]
