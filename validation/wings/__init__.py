"""Capabilities that stand on the core and that the core does not know: each lies in a folder of its own."""
