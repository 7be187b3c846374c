"""Which tokens a row reads, in the compiled `decode_attention`: its own ones, then those of segments."""

from numba import carray, njit

from hf_granikv.kernels._numba_types import OPTIONS, int64_at
from hf_granikv.kernels.decode_attention import _arguments as field


@njit(**OPTIONS)
def own_tokens(args, row, head, size):  # type: ignore[no-untyped-def]
    """Keys, values and slots of a row's own tokens; `size` is that of an element in bytes."""
    table = carray(
        int64_at(args[field.SLOTS] + 8 * row * args[field.SLOTS_ROW]), (args[field.SLOTS_ROW],)
    )
    span = carray(int64_at(args[field.SPANS] + 16 * row), (2,))
    keys = args[field.KEYS] + size * head * args[field.KEYS_HEAD]
    values = args[field.VALUES] + size * head * args[field.VALUES_HEAD]
    strides = size * args[field.KEYS_SLOT], size * args[field.VALUES_SLOT]
    return (keys, strides[0]), (values, strides[1]), table[span[0] : span[1]]


@njit(**OPTIONS)
def _of_segment(args, number, row):  # type: ignore[no-untyped-def]
    """The numbers of a segment, and how many tokens the row reads of it."""
    at = args[field.SEGMENTS] + 8 * field.NUM_SEGMENT_ARGUMENTS * number
    segment = carray(int64_at(at), (field.NUM_SEGMENT_ARGUMENTS,))
    rows, length = segment[field.SEGMENT_ROWS], segment[field.SEGMENT_LENGTH]
    if rows != 0 and carray(int64_at(rows), (args[field.ROWS],))[row] < 0:
        length = 0
    return segment, length


@njit(**OPTIONS)
def segment_tokens(args, number, row, head, size):  # type: ignore[no-untyped-def]
    """Keys, values and slots of a segment's tokens: none where the row does not read it."""
    segment, length = _of_segment(args, number, row)
    slots = carray(int64_at(segment[field.SEGMENT_SLOTS]), (length,))
    keys = segment[field.SEGMENT_KEYS] + size * head * segment[field.SEGMENT_KEYS_HEAD]
    values = segment[field.SEGMENT_VALUES] + size * head * segment[field.SEGMENT_VALUES_HEAD]
    strides = size * segment[field.SEGMENT_KEYS_TOKEN], size * segment[field.SEGMENT_VALUES_TOKEN]
    return (keys, strides[0]), (values, strides[1]), slots


@njit(**OPTIONS)
def num_tokens(args, row):  # type: ignore[no-untyped-def]
    """How many tokens a row reads."""
    span = carray(int64_at(args[field.SPANS] + 16 * row), (2,))
    total = span[1] - span[0]
    for number in range(args[field.NUM_SEGMENTS]):
        total += _of_segment(args, number, row)[1]
    return total


@njit(**OPTIONS)
def some(slots, first, last):  # type: ignore[no-untyped-def]
    """Those of some slots that are from the `first` token up to the `last`; these may be beyond."""
    return slots[max(first, 0) : min(max(last, 0), len(slots))]
