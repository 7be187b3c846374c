"""Layers on a GPU and on the CPU at once: the tokens of each row alone, and tensors where they belong.

    python tests/on_gpu.py

For a machine with a GPU and accelerate; pytest does not collect it.
"""

from tempfile import TemporaryDirectory

import torch
from accelerate import dispatch_model
from families import SHARED_PATH
from prompts import alone, cached, left_padded, new_tokens, prefilled, suffixes, whole

from hf_granikv import AsymmetricPagedCache


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; run this on a machine that has one.")
    plain = SHARED_PATH["llama"].model(attn_implementation="eager")
    rows = whole(suffixes(3, 7, 5))
    want = alone(plain, rows)
    split = {
        "model.embed_tokens": 0,
        "model.rotary_emb": 0,
        "model.layers.0": 0,
        "model.layers.1": "cpu",
        "model.norm": 0,
        "lm_head": 0,
    }
    model = SHARED_PATH["llama"].model(attn_implementation="granikv")
    model = dispatch_model(model, split, main_device=0)
    inputs = {name: tensor.to(0) for name, tensor in left_padded(rows).items()}
    held = prefilled(model)
    assert new_tokens(model, inputs, **cached(held)) == want
    beams = {"num_beams": 2, "num_return_sequences": 2}
    expected = new_tokens(plain, left_padded(rows), use_cache=False, **beams)
    assert new_tokens(model, inputs, **cached(held), **beams) == expected
    devices = [keys.device.type for keys in held._state.prefixes.only.keys]
    assert devices == ["cuda", "cpu"], devices
    held.check_integrity()
    with TemporaryDirectory() as folder:
        held._state.prefixes.only.save(f"{folder}/prefix")
        loaded = AsymmetricPagedCache(model.config)
        prefix = loaded.load(f"{folder}/prefix", model)
    assert [keys.device for keys in prefix.keys] == [model.device, torch.device("cpu")]
    assert new_tokens(model, inputs, **cached(loaded)) == want
    loaded.check_integrity()
    print("layers on cuda and cpu: tokens equal, greedy, with beams, and from a file")


if __name__ == "__main__":
    main()
