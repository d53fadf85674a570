"""How near, how many, how likely: the thresholds by which causes are named. No outcome hangs on them."""

ALIKE = 1e-3  # relative: what is no farther apart is one, however it was found; a part so small may be none
CLOSE = 1e-5  # relative: two ways to add up the same numbers in fp32 differ by less
LEFT = 1e-2  # of a tensor, or of what a change makes: an explanation may leave so much where types are coarse
DECIDED = 0.05  # a coefficient known no better than this is undecided, and a part this small would not be missed
LITTLE = 0.1  # of a tensor: what explains it leaves less, and what holds everywhere fails in less
TELLING = 0.25  # of a tensor: where rounding may have made more of it, it is like any other
HALF = 0.5  # of a tensor, or of a stage's parameters: with less in common they have nothing to do with each other
CLEARLY = 4.0  # times the other, or what chance or rounding give: no doubt is left
CHANCE = 1e-9  # how likely an explanation may be to fit by chance
ROUNDED = 2.0**-7  # relative: more than rounding to bf16 changes
ROUNDINGS = 16  # that may add up where a value is worked out from others

SHORT = 3  # elements: fewer are like others, or multiples of them, by chance
FEW = 8  # things that are looked at one by one, or are equal by chance
MANY = 32  # elements, or tensors, that show what holds for all
MOST = 256  # things of very many that are looked at, or tried, at once
