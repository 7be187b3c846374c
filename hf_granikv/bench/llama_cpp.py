"""llama.cpp with the same weights, if `llama-cpp-python` is installed.

One step is one `llama_decode` over all rows. The cache is the unified one: a prefix is computed once,
and its cells are shared by all sequences that read it (`llama_memory_seq_cp` copies no bytes there).
"""

import importlib.util
import logging
import weakref
from collections.abc import Sequence
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_granikv.bench.gguf_file import gguf_file, unwritable
from hf_granikv.bench.peers import Peer, PeerAbsent, PeerFactory, values_per_token
from hf_granikv.bench.workload import Workload

_PROMPT_BATCH = 512
# ggml's numbers of types, and what a value takes
_TYPES = {"f32": (0, 4), "f16": (1, 2), "bf16": (30, 2)}


class LlamaCpp(Peer):
    """llama.cpp over the weights of a model of transformers, in the same dtype.

    Args:
        model: A Llama.
        is_flash: Whether its flash attention is on.
        cached: Type of the keys and values it keeps: f16, its default, or bf16; those of a float32
            model are float32.
    """

    name: ClassVar[str] = "llama.cpp"
    is_other_engine = True
    has_own_threads = True
    has_models_time = False

    def __init__(self, model: PreTrainedModel, is_flash: bool, cached: str = "f16") -> None:
        super().__init__(model)
        self.name = _name(is_flash, cached)  # type: ignore[misc]
        self.is_flash = is_flash
        self.cached = "f32" if model.dtype == torch.float32 and cached == "f16" else cached

    def missing(self) -> str:
        if importlib.util.find_spec("llama_cpp") is None:
            return "the package llama-cpp-python is not installed"
        if self.cached == "bf16" and self.model.dtype != torch.bfloat16:
            return f"a cache in bfloat16 is not that of a model in {self.model.dtype}"
        if self.cached == "f32" and self.is_flash:
            return "its flash attention reads a cache in float32 as float16"
        return unwritable(self.model)

    def prepare(self, workload: Workload, num_steps: int) -> None:
        loaded = _loaded(gguf_file(self.model))
        num_rows, suffix_len = workload.suffixes.shape
        self.vocab_size = self.model.config.vocab_size
        self.context = _Context(
            loaded,
            num_cells=sum(ids.shape[1] for ids in workload.prefixes)
            + num_rows * (suffix_len + num_steps),
            num_rows=num_rows,
            is_flash=self.is_flash,
            cached=_TYPES[self.cached][0],
        )
        self.note = f"{loaded.description}; keys and values in {self.cached}"
        for i, ids in enumerate(workload.prefixes):
            if rows := workload.rows_of(i):
                self.context.decode(ids[0].numpy(), np.arange(ids.shape[1]), [rows[0]])
                self.context.share(rows[0], rows[1:])
        starts = np.array([workload.prefixes[read].shape[1] for read in workload.reads])
        self.context.decode(
            workload.suffixes.flatten().numpy(),
            (starts[:, None] + np.arange(suffix_len)).ravel(),
            [row for row in range(num_rows) for _ in range(suffix_len)],
        )
        self.positions = starts + suffix_len

    def step(self, ids: Tensor) -> Tensor:
        self.context.decode(ids[:, 0].numpy(), self.positions, range(len(ids)), is_answered=True)
        self.positions += 1
        return self.context.logits(len(ids), self.vocab_size)

    def warm(self, ids: Tensor) -> None:
        self.context.decode(ids[:, 0].numpy(), self.positions, range(len(ids)), is_answered=True)
        for row, position in enumerate(self.positions.tolist()):
            self.context.forget(row, position)

    def bytes_held(self) -> int:
        # it does not tell the bytes of its buffers, but how many cells are in them
        return self.context.num_cells * values_per_token(self.model) * _TYPES[self.cached][1]


class _Loaded:
    """A model of llama.cpp, freed with the last context that uses it."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        # it writes about every model otherwise, and takes its warnings for errors
        logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)
        llama_cpp.llama_backend_init()
        self.pointer: Any = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self.pointer:
            raise PeerAbsent("llama.cpp does not load the converted weights")
        weakref.finalize(self, llama_cpp.llama_model_free, self.pointer)
        features = llama_cpp.llama_print_system_info().decode().strip(" |")
        self.description = f"llama-cpp-python {metadata.version('llama-cpp-python')}, {features}"


@lru_cache(maxsize=1)
def _loaded(path: Path) -> _Loaded:
    return _Loaded(path)


class _Context:
    """Sequences of llama.cpp, one for each row, over one pool of cells."""

    def __init__(
        self, loaded: _Loaded, *, num_cells: int, num_rows: int, is_flash: bool, cached: int
    ) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        params: Any = llama_cpp.llama_context_default_params()
        names = {name for name, *_ in params._fields_}
        if not {"flash_attn_type", "kv_unified"} <= names:
            raise PeerAbsent("this llama-cpp-python has no unified cache; install 0.3.17 or newer")
        params.n_ctx, params.n_seq_max = num_cells, num_rows
        params.n_batch = params.n_ubatch = max(_PROMPT_BATCH, num_rows)
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        params.flash_attn_type, params.kv_unified = int(is_flash), True
        params.type_k = params.type_v = cached
        params.no_perf = True
        if "n_outputs_max" in names:
            # by default there would be room for the logits of every token of a batch
            params.n_outputs_max = num_rows
        self._pointer: Any = llama_cpp.llama_init_from_model(loaded.pointer, params)
        if not self._pointer:
            raise PeerAbsent(f"llama.cpp makes no context of {num_rows} rows, {num_cells} cells")
        self._loaded, self._batch_len = loaded, params.n_batch
        self._batch: Any = llama_cpp.llama_batch_init(self._batch_len, 0, 1)
        weakref.finalize(self, _free, llama_cpp, self._pointer, self._batch, loaded)
        shape = (self._batch_len,)
        self._tokens = np.ctypeslib.as_array(self._batch.token, shape)
        self._positions = np.ctypeslib.as_array(self._batch.pos, shape)
        self._answered = np.ctypeslib.as_array(self._batch.logits, shape)
        np.ctypeslib.as_array(self._batch.n_seq_id, shape)[:] = 1
        # what the sequences of the tokens in the batch are
        self._rows: list[int] = [-1] * self._batch_len

    @property
    def num_cells(self) -> int:
        """Tokens it has room for."""
        count: int = self._lib.llama_n_ctx(self._pointer)
        return count

    def share(self, row: int, others: Sequence[int]) -> None:
        """Lets other rows start with all that one holds."""
        memory = self._lib.llama_get_memory(self._pointer)
        for other in others:
            self._lib.llama_memory_seq_cp(memory, row, other, -1, -1)

    def forget(self, row: int, position: int) -> None:
        """Removes the tokens of a row from a position on."""
        memory = self._lib.llama_get_memory(self._pointer)
        self._lib.llama_memory_seq_rm(memory, row, position, -1)

    def decode(
        self,
        tokens: "np.ndarray[Any, Any]",
        positions: "np.ndarray[Any, Any]",
        rows: Sequence[int],
        *,
        is_answered: bool = False,
    ) -> None:
        """Computes tokens.

        Args:
            tokens: [num_tokens].
            positions: [num_tokens].
            rows: Of each token; one if it is the same for all.
            is_answered: Whether there are logits for each token.

        Raises:
            RuntimeError: It fails.
        """
        rows = [rows[0]] * len(tokens) if len(rows) == 1 else rows
        for start in range(0, len(tokens), self._batch_len):
            chunk = slice(start, min(start + self._batch_len, len(tokens)))
            count = chunk.stop - start
            self._tokens[:count], self._positions[:count] = tokens[chunk], positions[chunk]
            self._answered[:count] = is_answered
            for i, row in enumerate(rows[chunk]):
                if self._rows[i] != row:
                    self._rows[i] = self._batch.seq_id[i][0] = row
            self._batch.n_tokens = count
            if status := self._lib.llama_decode(self._pointer, self._batch):
                raise RuntimeError(f"llama_decode of {count} tokens failed with status {status}")

    def logits(self, num_rows: int, vocab_size: int) -> Tensor:
        """Those of the last decode that was answered `[num_rows, vocab_size]`, until the next."""
        pointer = self._lib.llama_get_logits(self._pointer)
        return torch.from_numpy(np.ctypeslib.as_array(pointer, (num_rows, vocab_size)))


def _free(lib: Any, context: Any, batch: Any, loaded: _Loaded) -> None:
    lib.llama_batch_free(batch)
    lib.llama_free(context)


def _name(is_flash: bool, cached: str) -> str:
    parts = [
        LlamaCpp.name,
        *(["flash"] if is_flash else []),
        *([cached] if cached != "f16" else []),
    ]
    return "-".join(parts)


LLAMA_CPP: dict[str, PeerFactory] = {
    _name(is_flash, cached): partial(LlamaCpp, is_flash=is_flash, cached=cached)
    for cached in ("f16", "bf16")
    for is_flash in (False, True)
}
