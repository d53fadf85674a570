"""Comparing whole runs: the first step at which two runs of many steps part, and in it the law and the parameter.

``record_run`` goes around a job's loop. Each rank writes a file of its own, and asks no other: of each step digests of
the microbatches, losses, the norm, the optimizer's options, and of each gradient and weight a digest, a norm and eight
projections. Such sketches of parts add up to that of the whole, so that runs of different layouts can be compared.

``compare_runs`` takes two such runs, of which one is right, and goes from step to step up to the first that does not
agree. Within a step it goes in the order in which things come to be: initial weights, microbatches, losses, gradients
from the last stage back, copies on several ranks, the norm, updated weights. What follows is consequence.

Where bits differ, a third run tells what rounding does. It is of right code with another order of sums, and what it
differs from the first by, so many steps after the two parted, is what rounding may do to the second.

Expected is another run here, so no extension point is asked for it: the wing stands on ``core``'s ledger, to which it
gives sketches and floors of its own, and on how ``records`` names parameters and numbers microbatches. Begin with
``comparison``; ``growth`` measures rounding, ``run`` puts ranks together, ``file`` is what one rank keeps of a run.
"""

from pipeproof.wings.runs.comparison import compare_runs as compare_runs
from pipeproof.wings.runs.recorder import RunRecorder as RunRecorder
from pipeproof.wings.runs.recorder import RunStep as RunStep
from pipeproof.wings.runs.recorder import record_run as record_run
