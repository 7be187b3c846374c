"""Positions in what the compiled `decode_attention` is given, all int64, and how small its pieces are.

Strides count elements, but those of scratch memory bytes.
"""

ROWS, HEADS, RATIO, KEY_DIM, VALUE_DIM, SLOTS, SLOTS_ROW = range(7)
SPANS, SCALE, KEY_WIDTH, VALUE_WIDTH, SCORES_ROW, SCRATCH, SCRATCH_SIZE = range(7, 14)
# where the parts of a thread's scratch memory begin, behind the queries
AT_KEYS, AT_VALUES, AT_PRODUCTS, AT_PLACES, AT_PIECES, AT_SCORES, AT_SHARES = range(14, 21)
QUERY, QUERY_ROW, QUERY_HEAD, OUT, SINKS = range(21, 26)
KEYS, KEYS_HEAD, KEYS_SLOT, VALUES, VALUES_HEAD, VALUES_SLOT = range(26, 32)
NUM_SEGMENTS, SEGMENTS, NUM_STATES = range(32, 35)
NUM_ARGUMENTS = 35
# of each segment; the slots are 0, 1, 2, ...
SEGMENT_KEYS, SEGMENT_KEYS_HEAD, SEGMENT_KEYS_TOKEN = range(3)
SEGMENT_VALUES, SEGMENT_VALUES_HEAD, SEGMENT_VALUES_TOKEN = range(3, 6)
SEGMENT_SLOTS, SEGMENT_LENGTH, SEGMENT_ROWS = range(6, 9)
NUM_SEGMENT_ARGUMENTS = 9

# the fewest tokens that are worth a thread's while
LEAST_PIECE = 64
