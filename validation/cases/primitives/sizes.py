"""Sizes of the small decoder that primitives are applied to; apart, for a command line needs them before torch."""

WIDTH, HEADS, SEQUENCE, VOCABULARY = 16, 4, 16, 32
EXPERTS, CHOSEN, CAPACITY = 4, 2, 1.25  # a token visits CHOSEN; an expert takes CAPACITY times its even share
BATCH = 3  # sequences of a microbatch
