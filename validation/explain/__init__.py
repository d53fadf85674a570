"""Explanation: from a failed verdict to its causes. It reads the verdict and never changes its outcome.

``explain`` follows a table of rules over one value, ``Evidence``: the verdict with as much of the run as is known. The
instruments are ``divergence`` and ``rules.first_wrong`` (the first wrong tensor along the data), ``attribution`` (which
microbatches, how often, a gradient is made of), ``likeness`` (what a tensor is in place of another) and ``replay`` (the
reference with one substitution: the proof of a cause). Begin with ``explain``, then ``evidence``.
"""
