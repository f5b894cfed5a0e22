"""Networks in which gradients explode, and the growth of a gradient during the backward pass.

There are recurrent networks on the characters of Python's documentation, and deep convolutional
networks on digits. All compute a chain of states h_0, h_1, .... The gradient at a state is the
gradient at the next state times the transposed Jacobian of the step between them. `sizes` measures
it at each state, and `growth` predicts it from the weights.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.checks import one_of, positive, positive_int
from labcore.data import digits, python_text

__all__ = [
    "ACTIVATIONS",
    "NETWORKS",
    "CharacterLSTM",
    "CharacterRNN",
    "DeepConv",
    "Growth",
    "accuracy",
    "draw",
    "growth",
    "loss",
    "make",
    "sizes",
]

VOCABULARY = 128  # ASCII; any other character counts as the last one
TRAIN_BYTES, HELD_OUT_BYTES = 100_000, 20_000
SIDE = 8  # pixels of a digit
# Fraction of a 3 x 3 convolution's taps that see a pixel of a zero-padded 8 x 8 image.
SEEN = ((3 * SIDE - 2) / (3 * SIDE)) ** 2

# Name -> function, and its derivative as a function of the function's value.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "relu": (torch.relu, lambda value: (value > 0).to(value)),
    "tanh": (torch.tanh, lambda value: 1 - value.square()),
}


class CharacterRNN(nn.Module):
    """h_t = f(W h_{t-1} + U x_t + b), with the next character predicted from h_t.

    activation: a key of ACTIVATIONS. gain: W is drawn from N(0, gain² · 2 / width). With a ReLU, a
    gain of 1 keeps the size of gradients on average. orthogonal: W is gain times a random
    orthogonal matrix instead. seed: seed of all weights.
    """

    def __init__(
        self,
        *,
        width: int = 64,
        activation: str = "relu",
        gain: float = 1.0,
        orthogonal: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.activation = one_of("activation", activation, ACTIVATIONS)
        self.embedding = nn.Embedding(VOCABULARY, positive_int("width", width) // 2)
        self.inputs = nn.Linear(width // 2, width)
        self.recurrent = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, VOCABULARY)
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(self.embedding.weight, generator=generator)
        for layer in (self.inputs, self.head):
            std = layer.in_features**-0.5
            nn.init.normal_(layer.weight, std=std, generator=generator)
            nn.init.zeros_(layer.bias)
        std = positive("gain", gain) * (2 / width) ** 0.5
        if orthogonal:
            nn.init.orthogonal_(self.recurrent.weight, gain, generator=generator)
        else:
            nn.init.normal_(self.recurrent.weight, std=std, generator=generator)

    def states(self, ids: Tensor) -> list[Tensor]:
        """Return the states [B, width] after each of the T characters of `ids` [B, T] (int64)."""
        function, _ = ACTIVATIONS[self.activation]
        inputs = self.inputs(self.embedding(ids))
        state = inputs.new_zeros(inputs.shape[0], inputs.shape[2])
        chain = []
        for step in range(ids.shape[1]):
            state = function(inputs[:, step] + self.recurrent(state))
            chain.append(state)
        return chain

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, T, VOCABULARY] for the character after each character."""
        return self.head(torch.stack(self.states(ids), dim=1))

    def read(self, state: Tensor) -> Tensor:
        """Return the logits [B, VOCABULARY] of a state."""
        return self.head(state)

    def gains(self, chain: list[Tensor]) -> list[float]:
        """Predict the factor of the gradient's RMS from each state to the one before."""
        scale = self.recurrent.weight.detach().square().sum() / self.recurrent.in_features
        _, slope = ACTIVATIONS[self.activation]
        return [(scale * slope(state).square().mean()).sqrt().item() for state in chain[1:]]


class CharacterLSTM(nn.Module):
    """An LSTM in place of the plain recurrence, drawn as torch draws it.

    A state holds h and c. seed: seed of all weights.
    """

    def __init__(self, *, width: int = 64, seed: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, positive_int("width", width) // 2)
        self.cell = nn.LSTMCell(width // 2, width)
        self.head = nn.Linear(width, VOCABULARY)
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(self.embedding.weight, generator=generator)
        for weight in (*self.cell.parameters(), *self.head.parameters()):
            nn.init.uniform_(weight, -(width**-0.5), width**-0.5, generator=generator)

    def states(self, ids: Tensor) -> list[Tensor]:
        """Return the states [B, 2 width] after each of the T characters of `ids` [B, T] (int64)."""
        inputs = self.embedding(ids)
        state = inputs.new_zeros(len(ids), 2 * self.cell.hidden_size)
        chain = []
        for step in range(ids.shape[1]):
            state = torch.cat(self.cell(inputs[:, step], state.chunk(2, -1)), -1)
            chain.append(state)
        return chain

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, T, VOCABULARY] for the character after each character."""
        return self.read(torch.stack(self.states(ids), dim=1))

    def read(self, state: Tensor) -> Tensor:
        """Return the logits [..., VOCABULARY] of states [..., 2 width]."""
        return self.head(state.chunk(2, -1)[0])


class DeepConv(nn.Module):
    """A chain of `depth` 3 x 3 convolutions with ReLU, followed by one linear layer.

    gain: weights are drawn from N(0, gain² · 2 / fan-in), which is He initialization for a gain of
    1. There are no biases. norm: batch normalization after each convolution. residual: from the
    second layer on, a layer's output is added to its input. seed: seed of all weights.
    """

    def __init__(
        self,
        *,
        depth: int = 12,
        channels: int = 8,
        gain: float = 1.0,
        norm: bool = False,
        residual: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        positive_int("depth", depth)
        widths = [1, *[positive_int("channels", channels)] * depth]
        layers = [
            nn.Conv2d(one, other, 3, padding=1, bias=False)
            for one, other in itertools.pairwise(widths)
        ]
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(channels) if norm else nn.Identity() for _ in layers
        )
        self.residual = residual
        self.head = nn.Linear(channels * SIDE**2, 10, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for layer in layers:
            std = positive("gain", gain) * (2 / layer.weight[0].numel()) ** 0.5
            nn.init.normal_(layer.weight, std=std, generator=generator)
        nn.init.normal_(self.head.weight, std=self.head.in_features**-0.5, generator=generator)

    def states(self, images: Tensor) -> list[Tensor]:
        """Return the states [B, channels, 8, 8] after each layer for `images` [B, 64] in 0..1."""
        state = images.unflatten(1, (1, SIDE, SIDE))
        chain = []
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            out = norm(layer(state))
            state = torch.relu(out + state if self.residual and number else out)
            chain.append(state)
        return chain

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, 10]."""
        return self.read(self.states(images)[-1])

    def read(self, state: Tensor) -> Tensor:
        """Return the logits [B, 10] of a state."""
        return self.head(state.flatten(1))

    def gains(self, chain: list[Tensor]) -> list[float]:
        """Predict the factor of the gradient's RMS from each state to the one before.

        The prediction knows neither normalization nor residuals.
        """
        weights = [weight.detach() for weight in self.layers.parameters()][1:]
        return [
            (SEEN * weight.square().sum() / len(weight) * (state > 0).float().mean()).sqrt().item()
            for weight, state in zip(weights, chain[1:], strict=True)
        ]


Network = CharacterRNN | CharacterLSTM | DeepConv
NETWORKS: dict[str, Callable[..., Network]] = {
    "RNN": CharacterRNN,
    "LSTM": CharacterLSTM,
    "conv": DeepConv,
}


@functools.cache
def _characters(part: str) -> Tensor:
    text = python_text(part, max_bytes=TRAIN_BYTES if part == "train" else HELD_OUT_BYTES).text
    codes = text.encode("ascii", errors="replace")
    return torch.tensor(list(codes), dtype=torch.int64).clamp(max=VOCABULARY - 1)


def make(network: str, **settings: object) -> Network:
    """Create a network by its name in NETWORKS. settings: arguments of its class."""
    build = NETWORKS[one_of("network", network, NETWORKS)]
    with torch.random.fork_rng(devices=()):  # layers draw weights that are then replaced
        return build(**settings)


def draw(
    network: str, batch: int, *, length: int = 32, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw a batch of training inputs and targets for `network`.

    For "RNN" and "LSTM": ids [batch, length] and the character after each. For "conv": pixels
    [batch, 64] and classes [batch].
    """
    positive_int("batch", batch)
    if one_of("network", network, NETWORKS) != "conv":
        text = _characters("train")
        starts = torch.randint(
            len(text) - positive_int("length", length), (batch,), generator=generator
        )
        ids = text[starts[:, None] + torch.arange(length + 1)]
        return ids[:, :-1], ids[:, 1:]
    data = digits()
    rows = torch.randint(len(data.train_y), (batch,), generator=generator)
    return data.train_x[rows], data.train_y[rows]


def loss(model: Network, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, over characters or images."""
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@torch.no_grad()
def accuracy(model: Network) -> float:
    """Return the accuracy on held-out characters or digits.

    A model with NaN weights predicts the same class for everything.
    """
    if isinstance(model, DeepConv):
        data = digits()
        inputs, targets = data.test_x, data.test_y
    else:
        text = _characters("held_out")
        rows = text[: len(text) // 65 * 65].view(-1, 65)
        inputs, targets = rows[:, :-1], rows[:, 1:]
    return (model(inputs).argmax(-1) == targets).double().mean().item()


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """The size of a gradient along a chain of states.

    rms: the root mean square of the loss's gradient at each state, starting with the first state.
    gains: the predicted factor of each step back, one fewer than states.
    """

    rms: tuple[float, ...]
    gains: tuple[float, ...]

    @property
    def predicted(self) -> tuple[float, ...]:
        """The predicted rms at each state: the last rms, multiplied back by the gains."""
        path = [self.rms[-1]]
        for gain in reversed(self.gains):
            path.append(path[-1] * gain)
        return tuple(reversed(path))


def sizes(model: Network, inputs: Tensor, targets: Tensor) -> tuple[float, ...]:
    """Return the RMS of the last prediction's gradient at every state, first state first."""
    chain = model.states(inputs)
    wanted = targets if isinstance(model, DeepConv) else targets[:, -1]
    gradients = torch.autograd.grad(F.cross_entropy(model.read(chain[-1]), wanted), chain)
    return tuple(gradient.double().square().mean().sqrt().item() for gradient in gradients)


def growth(model: CharacterRNN | DeepConv, inputs: Tensor, targets: Tensor) -> Growth:
    """Measure the gradient at every state as `sizes` does, and predict it.

    The prediction uses the size of each weight matrix and the slope of the activations, and assumes
    random directions. A step back multiplies the mean square of the gradient by
    ||W||² / fan-out · mean f'² (for convolutions, times the fraction of taps that see a pixel), as
    in mean field theory (arXiv 1611.01232).
    """
    with torch.no_grad():
        gains = model.gains(model.states(inputs))
    return Growth(rms=sizes(model, inputs, targets), gains=tuple(gains))
