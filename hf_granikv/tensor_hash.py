"""SHA-256 of what tensors hold, the same in every process and on every device."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

# what lies on another device is brought to the CPU in pieces of so many bytes
_PIECE_BYTES = 64 * 2**20


def tensor_hashes(tensors: Sequence[Tensor]) -> list[str]:
    """Hashes the elements of each tensor, in logical order: strides and devices do not matter.

    Contiguous tensors on the CPU are not copied. Threads share the tensors; hashing holds no lock.

    Args:
        tensors: Strided tensors with memory of their own, of any shape and dtype.

    Returns:
        One hex digest for each.
    """
    # the largest first, or the last thread would begin it when the others have finished
    largest_first = sorted(range(len(tensors)), key=lambda i: -tensors[i].nbytes)
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        hashes = threads.map(lambda i: _hash(tensors[i]), largest_first)
        by_index = dict(zip(largest_first, hashes, strict=True))
    return [by_index[i] for i in range(len(tensors))]


def _hash(tensor: Tensor) -> str:
    sha256 = hashlib.sha256()
    for piece in pieces(tensor):
        sha256.update(piece.numpy().data)
    return sha256.hexdigest()


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of a tensor in logical order, as one or more `[num_bytes]` uint8 CPU tensors."""
    # subclasses of Parameter (bitsandbytes') would come along through every view
    plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    elements = plain.contiguous().reshape(-1).view(torch.uint8)
    # on the CPU a piece is a view
    yield from (piece.cpu() for piece in elements.split(_PIECE_BYTES))
