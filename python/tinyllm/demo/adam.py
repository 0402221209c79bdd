"""Adam (Kingma and Ba, 2014): one step size per parameter, from running means of its gradient."""

from __future__ import annotations

import numpy as np

from tinyllm.demo.model import Floats


class Adam:
    """Moves ``params`` against the gradient; ``mean`` and ``square`` are its memory."""

    def __init__(self, params: Floats, rate: float = 0.005) -> None:
        self.params = params
        self.rate = rate
        self.mean = np.zeros_like(params)
        self.square = np.zeros_like(params)
        self.steps = 0

    def step(self, grad: Floats, keep: float = 0.9, keep_square: float = 0.99) -> None:
        """One update, in place."""
        self.steps += 1
        self.mean += (1 - keep) * (grad - self.mean)
        self.square += (1 - keep_square) * (grad * grad - self.square)
        # Both memories began at zero; dividing by these factors makes up for it.
        mean = self.mean / (1 - keep**self.steps)
        square = self.square / (1 - keep_square**self.steps)
        self.params -= self.rate * mean / (np.sqrt(square) + 1e-8)
