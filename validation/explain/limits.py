"""Thresholds for naming causes: how near, how many, how likely. No outcome depends on them."""

ALIKE = 1e-3  # relative: values no farther apart are the same, however measured; a part so small may be none
CLOSE = 1e-5  # relative: two ways to add up the same numbers in fp32 differ by less
LEFT = 1e-2  # of a tensor, or of a change: an explanation may leave so much in coarse types
DECIDED = 0.05  # a coefficient known no better than this is undecided, and a part this small would not be missed
LITTLE = 0.1  # of a tensor: an explanation leaves less, and a rule for all elements fails in less
TELLING = 0.25  # of a tensor: with more rounding in it, it resembles any other
HALF = 0.5  # of a tensor, or of a stage's parameters: with less in common they have nothing to do with each other
CLEARLY = 4.0  # times the other value, or chance, or rounding: no doubt is left
CHANCE = 1e-9  # how likely an explanation may be to fit by chance
ROUNDED = 2.0**-7  # relative: more than rounding to bf16 changes
ROUNDINGS = 16  # that may add up where a value is worked out from others

FEW = 8  # things to examine one by one, or equal by chance
MANY = 32  # elements, or tensors, enough to speak for all
MOST = 256  # things to examine, or to try, at once out of very many
