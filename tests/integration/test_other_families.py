"""What families outside of the conformance matrix get: every row as alone, or a refusal by name.

The kind was reported for GPT-2, GPT-Neo and others, where a cache was continued by more than one
token (huggingface/transformers #24741, #11096), and for models whose layers a cache does not know
and which then silently did without (vllm-project/vllm #51198).
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from families import COMMON
from prompts import alone, cached, left_padded, new_tokens, prefilled, suffixes, whole
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models import musicgen, musicgen_melody
from unshared import some_unshared

from hf_granikv import AsymmetricPagedCache

NUM_NEW = 4
RAGGED, EVEN = whole(suffixes(3, 0)), whole(suffixes(3, 3))

# what makes a model tiny, by all the names that families have for it
SIZES: dict[str, Any] = {
    **dict.fromkeys(("n_embd", "d_model", "embedding_size"), 32),
    **dict.fromkeys(("n_layer", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("n_head", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("n_positions", "n_ctx"), 256),
    **dict.fromkeys(("ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dff"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 8),
    **dict.fromkeys(("rotary_dim", "sliding_window", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **{"index_head_dim": 8, "index_n_heads": 2, "is_decoder": True},
}

EXACT = (
    *("Afmoe", "Apertus", "Arcee", "BioGpt", "BitNet", "Cohere2Moe", "CodeGen", "CTRL", "Cwm"),
    *("Dots1", "Ernie4_5_Moe", "Exaone4", "FlexOlmo", "Glm", "Glm4Moe", "GPTBigCode", "GPTJ"),
    *("GraniteMoe", "GraniteMoeShared", "HunYuanDenseV1", "HunYuanMoEV1", "InternLM3", "MiniMaxM2"),
    *("Ministral", "ModernBertDecoder", "NanoChat", "Olmo", "Olmo3", "Olmoe", "Qwen2Moe"),
    *("SeedOss", "VaultGemma", "XGLM", "Bert", "Roberta", "GPTNeoXJapanese"),
)
# these have no attention but their own
WITHOUT_INTERFACE = ("XGLM", "GPTNeoXJapanese")
# keys and values as latents; as many heads of them as of queries
LATENT = ("DeepseekV2", "Glm4MoeLite", "MiniCPM3", "Youtu")
COUNT_PADS = ("Bart", "MBart", "Pegasus", "Marian", "Blenderbot")
REFUSED = {
    "DeepseekV4": "heavily_compressed_attention",
    "DeepseekV32": "(indexed|sparse)_attention",
    "GlmMoeDsa": "(indexed|sparse)_attention",
    "MiniMax": "linear_attention",
    "Mamba": "linear_attention",
}
KEEP_THEIR_OWN = ("OpenAIGPT", "Rwkv")


def config_of(name: str, **options: Any) -> transformers.PreTrainedConfig:
    config_type = getattr(transformers, f"{name}Config", None)
    if config_type is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    declared = {
        *inspect.signature(config_type.__init__).parameters,
        *getattr(config_type, "__dataclass_fields__", {}),
        *config_type.attribute_map,
    }
    kwargs = {**COMMON, **{k: v for k, v in SIZES.items() if k in declared}, **options}
    for alias, target in config_type.attribute_map.items():
        if target in kwargs:
            kwargs.pop(alias, None)
    return config_type(**kwargs)


def built(name: str, attention: str, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = config_of(name, **options)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()


def assert_exact(name: str, rows: list[list[int]], **options: Any) -> None:
    stock = built(name, "eager", **options)
    try:
        model = built(name, "granikv", **options)
    except (KeyError, ValueError):
        # no attention interface, or not in this version
        model = stock
    held = prefilled(model)
    got = new_tokens(model, left_padded(rows), num_new=NUM_NEW, **cached(held))
    assert got == alone(stock, rows, num_new=NUM_NEW)
    held.check_integrity()


@pytest.mark.parametrize("name", some_unshared(EXACT, WITHOUT_INTERFACE))
def test_rows_get_the_tokens_they_have_alone(name: str) -> None:
    assert_exact(name, RAGGED)


@pytest.mark.parametrize("name", LATENT)
def test_rows_over_latents_get_the_tokens_they_have_alone(name: str) -> None:
    assert_exact(name, RAGGED, num_key_value_heads=4)


@pytest.mark.parametrize("name", COUNT_PADS)
def test_a_decoder_that_counts_pads_is_exact_without_or_refused(name: str) -> None:
    assert_exact(name, EVEN)
    model = built(name, "granikv")
    with pytest.raises(ValueError, match="counts pads as positions"):
        new_tokens(model, left_padded(RAGGED), **cached(prefilled(model)))


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_are_not_served_are_named_when_the_cache_is_built(name: str) -> None:
    options = {"num_key_value_heads": 4} if name in ("DeepseekV32", "GlmMoeDsa") else {}
    with pytest.raises(ValueError, match=rf"is of kind .*{REFUSED[name]}"):
        AsymmetricPagedCache(config_of(name, **options))


# the model loops over its layers, and its forward keeps their caches by itself
@pytest.mark.parametrize("mode", ["per_loop", "last_loop"])
def test_a_model_that_reaches_into_layers_of_a_cache_is_refused(mode: str) -> None:
    loops = {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 0}
    config = config_of("Dory", **loops, recurrent_kv_cache_mode=mode)
    with pytest.raises(ValueError, match="dory loops over its layers"):
        AsymmetricPagedCache(config)


OWN_WAYS: dict[str, tuple[Callable[[], transformers.PreTrainedConfig], str]] = {
    # assertions and shapes, in the first forward over a prefix or that computes one
    "prophetnet": (
        lambda: transformers.ProphetNetConfig(is_encoder_decoder=False, is_decoder=True),
        "one token at a time",
    ),
    "musicgen_decoder": (musicgen.MusicgenDecoderConfig, "several codebooks"),
    "musicgen_melody_decoder": (musicgen_melody.MusicgenMelodyDecoderConfig, "several codebooks"),
    "csm": (transformers.CsmConfig, "several codebooks"),
    "kyutai_speech_to_text": (transformers.KyutaiSpeechToTextConfig, "several codebooks"),
    "idefics": (transformers.IdeficsConfig, "no forward pass without an image"),
    # other tokens, silently
    "kosmos_2_text_model": (transformers.Kosmos2Config, "positions on from its pad id"),
    "kosmos_2_5_text_model": (transformers.Kosmos2_5Config, "positions on from its pad id"),
}


@pytest.mark.parametrize("name", OWN_WAYS)
def test_a_model_that_would_fail_over_a_prefix_is_refused_when_the_cache_is_built(
    name: str,
) -> None:
    config, why = OWN_WAYS[name]
    with pytest.raises(ValueError, match=rf"{name} .*{why}.*; generate without this cache"):
        AsymmetricPagedCache(config())


@pytest.mark.nothing_shared
def test_a_model_that_sees_more_than_its_caches_keep_is_exact_or_refused() -> None:
    """Moshi has a `sliding_window` that its masks know nothing of."""
    options = {"ffn_dim": 64, "sliding_window": 40}
    assert_exact("Moshi", RAGGED, **options)
    model = built("Moshi", "sdpa", **options)
    with pytest.raises(ValueError, match="other keys in two forwards than in one past 40"):
        new_tokens(model, left_padded(whole(suffixes(21))), **cached(prefilled(model)))
    with pytest.raises(ValueError, match="past 19"):
        prefilled(built("Moshi", "sdpa", **{**options, "sliding_window": 19}))


def test_an_encoder_decoder_is_refused_when_the_cache_is_built() -> None:
    with pytest.raises(ValueError, match="encoder-decoder models are not served"):
        AsymmetricPagedCache(transformers.T5Config())


@pytest.mark.parametrize("name", KEEP_THEIR_OWN)
def test_a_model_that_keeps_a_cache_of_its_own_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"has no cache, or a cache of its own kind"):
        AsymmetricPagedCache(config_of(name))


# the last two have no number of layers
@pytest.mark.parametrize(
    "name",
    ["ViT", "CLIP", "CLIPText", "Reformer", "XLNet", "XLM", "Perceiver", "Encodec"],
)
def test_what_generates_no_text_with_a_cache_is_refused_when_the_cache_is_built(name: str) -> None:
    with pytest.raises(ValueError, match=r"has no cache, or a cache of its own kind"):
        AsymmetricPagedCache(getattr(transformers, f"{name}Config")())


@pytest.mark.parametrize("name", ["Bert", "Roberta", "Electra"])
def test_an_encoder_is_refused_until_it_is_told_to_be_a_decoder(name: str) -> None:
    """It built a cache, and tokens of a prefix would have seen what comes behind them."""
    config_type = getattr(transformers, f"{name}Config")
    with pytest.raises(ValueError, match="sees tokens that come later while is_decoder=False"):
        AsymmetricPagedCache(config_type())
    AsymmetricPagedCache(config_type(is_decoder=True))
    # a flag of the same name that means nothing there
    AsymmetricPagedCache(transformers.GPTNeoXConfig())


@pytest.mark.parametrize("options", [{"use_cache": False}, {}], ids=["no_cache", "stock_cache"])
def test_a_model_whose_layers_do_not_say_that_they_are_causal_stays_so(
    options: dict[str, Any],
) -> None:
    """Without a mask SDPA asks the layer: an attention registered by name then sees what comes
    behind, silently. Cf. huggingface/transformers #46132."""
    want = alone(built("BigBirdPegasus", "eager"), EVEN, num_new=NUM_NEW)
    model = built("BigBirdPegasus", "granikv")
    assert new_tokens(model, left_padded(EVEN), num_new=NUM_NEW, **options) == want
    assert new_tokens(model, left_padded(EVEN), num_new=NUM_NEW, **cached(prefilled(model))) == want
