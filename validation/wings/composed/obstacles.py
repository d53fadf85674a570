"""Why it is not known what a stage gives when it is run again."""

from collections.abc import Sequence

from pipeproof.pipeline.sizes import first_few


def by_attributes(stage: int, names: Sequence[str]) -> str:
    """Why it is not known what a stage gives that gives the same only where attributes of these names are put back."""
    again = f"stage {stage} gives the same again only where attributes are put back that changed since"
    return f"{again}: {first_few(names)}; call its module with what it needs of them"


def draws_in_backward(stage: int) -> str:
    """Why it is not known what a stage gives whose backward itself draws random numbers."""
    told = f"what the backward of stage {stage} gives depends on what was drawn meanwhile: it draws random numbers"
    return f"{told}; what runs again in it, as in a checkpoint, must draw what its forward drew"


def draws_elsewhere(who: str, generator: object = None) -> str:
    """Why it is not known what ``who`` gives, who draws from this; None: from a state that somebody else keeps."""
    if generator is None:
        return f"{who} draws from a state of random numbers that is kept elsewhere: pass who keeps it {_WHERE}"
    kind = type(generator)
    maker = kind.__module__.partition(".")[0]
    return f"{who} draws from a {kind.__name__} of {maker} that is not part of it: pass it {_WHERE}"


_WHERE = "in generators= of Composed"
