"""Positions in what the compiled `decode_attention` is given, all int64, and how small its pieces are.

Strides count elements, but those of scratch memory bytes.
"""

ROWS, HEADS, RATIO, KEY_DIM, VALUE_DIM, SLOTS, SLOTS_ROW = range(7)
SPANS, SCALE, KEY_WIDTH, VALUE_WIDTH, SCORES_ROW, SCRATCH, SCRATCH_SIZE = range(7, 14)
# where the parts of a thread's scratch memory begin, behind the queries
AT_KEYS, AT_VALUES, AT_PRODUCTS, AT_PLACES, AT_PIECES, AT_SCORES, AT_SHARES = range(14, 21)
QUERY, QUERY_ROW, QUERY_HEAD, OUT = range(21, 25)
# what rows bring, where it is to be stored, and in which slots
NEW_KEYS, NEW_KEYS_ROW, NEW_KEYS_HEAD = range(25, 28)
NEW_VALUES, NEW_VALUES_ROW, NEW_VALUES_HEAD = range(28, 31)
NEW_SLOTS, SINKS = range(31, 33)
KEYS, KEYS_HEAD, KEYS_SLOT, VALUES, VALUES_HEAD, VALUES_SLOT = range(33, 39)
NUM_SEGMENTS, SEGMENTS, NUM_STATES = range(39, 42)
NUM_ARGUMENTS = 42
# of each segment; the slots are 0, 1, 2, ...
SEGMENT_KEYS, SEGMENT_KEYS_HEAD, SEGMENT_KEYS_TOKEN = range(3)
SEGMENT_VALUES, SEGMENT_VALUES_HEAD, SEGMENT_VALUES_TOKEN = range(3, 6)
SEGMENT_SLOTS, SEGMENT_LENGTH, SEGMENT_ROWS = range(6, 9)
NUM_SEGMENT_ARGUMENTS = 9

# the fewest tokens that are worth a thread's while
LEAST_PIECE = 64
