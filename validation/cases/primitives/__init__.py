"""Kinds of parallelism around and inside a stage, each right: applied to a small decoder, alone and stacked."""
