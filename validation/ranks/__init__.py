"""Ranks: processes that run jobs, in a pool or under torchrun, and what is told of them."""
