"""A small language model over bytes: which byte comes next, after the ``context`` bytes before it.

    windows   the bytes before, as numbers               [B, context]
    x         their embeddings, side by side             [B, context · width]
    h         tanh(x @ w1 + b1)                          [B, hidden]
    p         softmax(h @ w2 + b2): a guess per byte     [B, 256]

All parameters are views of one flat vector, and their gradients are views of another, so that
averaging the gradients of all ranks is a single all_reduce of a single array.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]

BYTES = 256


class ByteModel:
    """Parameters (``params``), their gradient (``grad``), and how one follows from the other."""

    def __init__(
        self, rng: np.random.Generator, context: int = 16, width: int = 24, hidden: int = 256
    ) -> None:
        inputs = context * width
        self.context = context
        self._shapes = [(BYTES, width), (inputs, hidden), (hidden,), (hidden, BYTES), (BYTES,)]
        self.params = np.zeros(sum(int(np.prod(shape)) for shape in self._shapes))
        self.grad = np.zeros_like(self.params)
        self.embed, self.w1, self.b1, self.w2, self.b2 = self._views(self.params)
        for weights, fan_in in ((self.embed, 1), (self.w1, inputs), (self.w2, hidden)):
            weights[:] = rng.standard_normal(weights.shape) / np.sqrt(fan_in)

    def _views(self, flat: Floats) -> list[Floats]:
        """The parts of a flat vector, in the shapes of embed, w1, b1, w2, b2."""
        sizes = [int(np.prod(shape)) for shape in self._shapes]
        edges = pairwise(accumulate(sizes, initial=0))
        return [
            flat[start:stop].reshape(shape)
            for (start, stop), shape in zip(edges, self._shapes, strict=True)
        ]

    def _forward(self, windows: Bytes) -> tuple[Floats, Floats, Floats]:
        """Return x, h and the logarithms of p."""
        x = self.embed[windows].reshape(len(windows), len(self.w1))
        h = np.tanh(x @ self.w1 + self.b1)
        logits = h @ self.w2 + self.b2
        logits -= logits.max(axis=1, keepdims=True)  # exp would overflow; p stays the same
        return x, h, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def loss(self, windows: Bytes, targets: Bytes) -> float:
        """The mean of -log p(target), in nats per byte."""
        log_p = self._forward(windows)[2]
        return -float(log_p[np.arange(len(targets)), targets].mean())

    def backward(self, windows: Bytes, targets: Bytes, count: float) -> float:
        """Return the sum of -log p(target) over ``count``, and write its gradient to ``grad``.

        With ``count`` = len(targets) that is the mean.  A rank that has a slice of the batch
        divides by batch / world: then the mean over the ranks is the mean over the batch, however
        uneven the slices are.
        """
        embed, w1, b1, w2, b2 = self._views(self.grad)
        x, h, log_p = self._forward(windows)
        hit = np.arange(len(targets)), targets

        d_logits = np.exp(log_p)
        d_logits[hit] -= 1
        d_logits /= count
        np.matmul(h.T, d_logits, out=w2)
        np.sum(d_logits, axis=0, out=b2)

        d_h = d_logits @ self.w2.T
        d_h *= 1 - h * h
        np.matmul(x.T, d_h, out=w1)
        np.sum(d_h, axis=0, out=b1)

        d_x = (d_h @ self.w1.T).reshape(-1, self.embed.shape[1])
        for column in range(d_x.shape[1]):  # a byte's row sums up all places where it stands
            embed[:, column] = np.bincount(windows.ravel(), d_x[:, column], minlength=BYTES)
        return -float(log_p[hit].sum()) / count
