"""The composed check: a step is checked link by link, and each rank needs only its own stages.

The same laws, with another expectation. Let stage ``s`` compute ``y = f_s(x, w)``, and let a step run microbatches
``m`` through stages ``0 .. S-1``. On each rank the check runs its own stages again, on the inputs ``x`` that they had
and from the output gradients ``dy`` that came back to them, and holds

- what a stage gave against ``f_s(x, w)``, and what it handed back against ``dy . df_s/dx``;
- what a stage received, in both directions, against what its neighbour sent;
- the loss, and what flows back from it, against ``loss_fn`` on what the last stage gave;
- each gradient against the sum over its microbatches of ``dy . df_s/dw``, over stages that share a weight and over
  replicas, divided as the contract says.

By induction over stages, every input then equals the input on one device: stage 0 had the data, and stage ``s + 1`` had
the output of stage ``s``, which is ``f_s`` of its input. By induction back from the loss, the same holds for every
output gradient, and so for every gradient. A stage's own code lies outside the induction: it makes both sides of its
links.

It stands on the extension point ``expectations``. Begin with ``link``, what a rerun of a stage gives, and ``chain``,
which has all links.
"""

from pipeproof.wings.composed.case import check_composed as check_composed
from pipeproof.wings.composed.case import validate_composed as validate_composed
from pipeproof.wings.composed.step import StageByStage as StageByStage
