"""Mutating: faults are planted in the step that a user's own test is about, and the test should fail each time.

What the test lets pass, it does not test. It is run on ranks as it is, twice; then once more for each fault, as long as
that is on a rank on which it changes nothing. A fault is

- let pass: it changed something, and the test passed;
- caught: the test failed, or hung;
- not planted: the step calls nothing that it is in, or it changed nothing;
- not judged: the test ended before anything was changed, or it skipped. And of sums over ranks all are not judged
  where ranks give the same to each sum: one that is left out would not show.

A fault stands in place of a function of torch's or in a hook of torch's, for the time of one test: no line of the
user's is changed, and any runtime's step can have it. ``under_test`` says where the step runs, so that the test's own
reference is right.

It stands on ``World``, which runs the test as a job on N ranks: the test is the judge, or, of a ``PlantedStep``, the
verdict. Begin with ``mutants``, the table of all faults; ``mutation`` runs them, and ``sums`` knows what goes into a
sum over ranks.
"""

from pipeproof.wings.mutate.mutants import MUTANTS as MUTANTS
from pipeproof.wings.mutate.mutation import LetPass as LetPass
from pipeproof.wings.mutate.mutation import Mutated as Mutated
from pipeproof.wings.mutate.mutation import PlantedStep as PlantedStep
from pipeproof.wings.mutate.mutation import choose as choose
from pipeproof.wings.mutate.mutation import mutate as mutate
from pipeproof.wings.mutate.mutation import mutate_step as mutate_step
from pipeproof.wings.mutate.mutation import under_test as under_test
