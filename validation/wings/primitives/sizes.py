"""Sizes of the small decoder under the primitives; separate, because the command line needs them before torch."""

WIDTH, HEADS, SEQUENCE, VOCABULARY = 16, 4, 16, 32
EXPERTS, CHOSEN, CAPACITY = 4, 2, 1.25  # a token visits CHOSEN; an expert takes CAPACITY times its even share
EACH = 2  # ranks along an axis of which nothing is said, or that stands for a larger one
BATCH = 3  # sequences of a microbatch
