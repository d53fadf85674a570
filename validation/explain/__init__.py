"""Explain a failed verdict: find its causes, and never change its outcome.

``explain`` follows a table of rules over one value, ``Evidence``: the verdict with the known facts about the run. The
instruments are ``divergence`` and ``rules.first_wrong`` (the first wrong tensor along the data), ``attribution``
(gradients as counts of microbatches), ``likeness`` (the identity of a wrong tensor) and ``replay`` (the reference with
one substitution: the proof of a cause). Begin with ``explain``, then ``evidence``.
"""
