"""Positions in what the compiled kernels are given, all int64; strides and sizes count bytes."""

HEADS, RATIO, Q_LEN, QUERIES, KEY_DIM, VALUE_DIM, PIECES, LENGTH = range(8)
# which rows of the batch they are; 0 for all
ROWS = 8
QUERY, QUERY_ROW, QUERY_HEAD, QUERY_TOKEN = range(9, 13)
KEYS, KEYS_HEAD, KEYS_TOKEN, VALUES, VALUES_HEAD, VALUES_TOKEN = range(13, 19)
OUT, LSE, SCALE, SCRATCH, SCRATCH_SIZE = range(19, 24)
# from here on each kernel has its own: where the parts of a thread's scratch memory begin, and more
NUM_COMMON = 24
