"""A small decoder of layers in a row, dense or with experts, and its loss and data: what primitives are applied to."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipeproof.wings.primitives.collectives import local
from pipeproof.wings.primitives.stacks import BATCH, CAPACITY, CHOSEN, EXPERTS, HEADS, SEQUENCE, VOCABULARY, WIDTH

BALANCE = 0.01  # how much the auxiliary loss counts

Microbatch: TypeAlias = tuple[Tensor, Tensor]


class Layers(nn.Sequential):
    """Layers that each take all outputs of the previous one, one tensor or several. ``call`` calls one."""

    def __init__(self, *layers: Any) -> None:
        super().__init__(*layers)
        self.call: Callable[..., Any] = operator.call

    def forward(self, *given: Tensor) -> Any:
        """Return the last layer's output."""
        for layer in self:
            if getattr(layer, "dropout", 0):
                torch.manual_seed(bits(given[0]))  # equal on all ranks, in any order of microbatches
            found = self.call(layer, *given)
            given = found if isinstance(found, tuple) else (found,)
        return given if len(given) > 1 else given[0]


def bits(x: Tensor) -> int:
    """Hash all bits of ``x`` into a number."""
    return int(x.detach().view(torch.int32).sum())


class Embedding(nn.Module):
    """Of tokens and their positions, (batch, sequence) to (batch, sequence, width); ``at``: other positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.at: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the sum of both."""
        at = torch.arange(tokens.shape[1], device=tokens.device) if self.at is None else self.at
        return self.tokens(tokens) + self.positions(at)  # type: ignore[no-any-return]


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Causal attention; ``attend`` gets queries, keys and values, each (batch, heads, sequence, head width)."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attend: Attend = causal

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, sequence, width) to the same; the weights determine the number of heads."""
        inputs = self.queries, self.keys, self.values
        queries, keys, values = (each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in inputs)
        return self.output(self.attend(queries, keys, values).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def causal(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend from every token to itself and earlier ones."""
    places = torch.arange(keys.shape[2], device=keys.device)
    return attend(queries, keys, values, places <= places[:, None])


def attend(queries: Tensor, keys: Tensor, values: Tensor, observed: Tensor) -> Tensor:
    """Attend within the mask ``observed``, (queries, keys)."""
    scores = queries @ keys.transpose(2, 3) / queries.shape[3] ** 0.5
    return scores.masked_fill(~observed, float("-inf")).softmax(-1) @ values  # type: ignore[no-any-return]  # in torch


class Feedforward(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The width stays."""
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then a feedforward layer; ``dropout``: rate on each output, from 0 to 1."""

    def __init__(self, dropout: float = 0) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm, self.feedforward = nn.LayerNorm(WIDTH), Feedforward()

    def forward(self, x: Tensor) -> Tensor:
        """Add each layer's output to its input."""
        x = x + self._drop(self.attention(self.attention_norm(x)))
        return x + self._drop(self.feedforward(self.norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.dropout, self.training) if self.dropout else x


class Spare(Block):
    """A block with a layer that all microbatches bypass."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class Optional(Spare):
    """A spare block that some microbatches bypass, depending on their bits."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, or the block's output."""
        return super().forward(x) if bits(x) % 2 else x


Visit = Callable[[Tensor, Tensor], Tensor]


class Mixture(nn.Module):
    """Experts chosen by a router, and one shared by all tokens. ``visit`` brings tokens to experts, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Feedforward() for _ in range(EXPERTS))
        self.shared = Feedforward()
        self.visit: Visit = self._here

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted expert outputs for every token; and the auxiliary loss, a number."""
        tokens = x.reshape(-1, WIDTH)
        chances = self.router(tokens).softmax(-1)
        weights, chosen = chances.topk(CHOSEN)
        kept = fits_capacity(chosen.flatten()).nonzero()[:, 0]
        made = self.visit(tokens[kept // CHOSEN], chosen.flatten()[kept])
        found = tokens.new_zeros(len(tokens) * CHOSEN, WIDTH).index_put((kept,), made)
        mixed = (found.view(-1, CHOSEN, WIDTH) * weights[:, :, None]).sum(1)
        return self.shared(x) + mixed.view_as(x), balance(chances, chosen)

    def _here(self, tokens: Tensor, expert: Tensor) -> Tensor:
        found = torch.zeros_like(tokens)
        for number, own in enumerate(self.experts):
            places = (expert == number).nonzero()[:, 0]
            found = found.index_put((places,), own(tokens[places]))
        return found


def fits_capacity(expert: Tensor) -> Tensor:
    """Mark visits within an expert's capacity: the first ones."""
    visits = nn.functional.one_hot(expert, EXPERTS)
    before = (visits.cumsum(0) * visits).sum(1)
    return before <= CAPACITY * len(expert) / EXPERTS


def balance(chances: Tensor, chosen: Tensor) -> Tensor:
    """Compute the auxiliary loss of Switch Transformers (Fedus and others, 2021), equation 4: least for equal use."""
    used = nn.functional.one_hot(chosen, EXPERTS).sum(1).double().mean(0) / CHOSEN
    return EXPERTS * (used.to(chances.dtype) * chances.mean(0)).sum()


class ExpertBlock(nn.Module):
    """Attention, then experts; passes the auxiliary loss on."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm, self.mixture = nn.LayerNorm(WIDTH), Mixture()

    def forward(self, x: Tensor, auxiliary: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add each layer's output to its input, and the auxiliary losses too."""
        x = x + self.attention(self.attention_norm(x))
        made, own = self.mixture(self.norm(x))
        return x + made, own if auxiliary is None else auxiliary + own


class Head(nn.Module):
    """Next-token logits; passes an auxiliary loss on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, auxiliary: Tensor | None = None) -> Any:
        """Return (batch, sequence, vocabulary), and the auxiliary loss if present."""
        logits = self.output(self.norm(x))
        return logits if auxiliary is None else (logits, auxiliary)


BLOCKS = {"experts": ExpertBlock, "spare": Spare, "optional": Optional}


def decoder(layers: int = 4, *, blocks: str = "", dropout: float = 0, seed: int = 0) -> Layers:
    """An embedding, blocks, and a head: so many layers in all. ``blocks``: a name of ``BLOCKS``; none has plain ones.

    ``dropout`` is of plain blocks.
    """
    torch.manual_seed(seed)
    block = BLOCKS[blocks] if blocks else partial(Block, dropout)
    return Layers(Embedding(), *(block() for _ in range(layers - 2)), Head())


def loss_fn(output: Any, target: Tensor) -> Tensor:
    """Cross entropy over all tokens, and the auxiliary loss."""
    logits, auxiliary = output if isinstance(output, tuple) else (output, None)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    # Of logits in shards it is a DTensor, which no plain tensor takes a gradient from.
    return loss if auxiliary is None else local(loss) + BALANCE * auxiliary


def microbatches(count: int, seed: int = 0) -> list[Microbatch]:
    """Return tokens and next tokens."""
    draw = torch.Generator().manual_seed(seed)
    text = (torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=draw) for _ in range(count))
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in text]
