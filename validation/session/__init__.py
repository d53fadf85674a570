"""A pytest session under torchrun: the ranks collect, run and report as one."""
