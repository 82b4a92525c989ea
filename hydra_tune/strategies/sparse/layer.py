"""One weight of a pruned network: its survivors, their gradient and step, and the dense weight around them."""

from __future__ import annotations

import torch
from torch import nn

from hydra_tune.graph.program import HALF
from hydra_tune.strategies.shard.optimizers import Options


def gathered(dense: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the survivors' values of a dense tensor."""
    return dense.detach().reshape(-1).index_select(0, index)


def put(dense: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """Write the survivors' values into a dense, contiguous tensor."""
    dense.data.view(-1).index_put_((index,), values)


class PrunedLayer:
    """A weight of which only the surviving entries are trained."""

    def __init__(
        self, name: str, weight: nn.Parameter, index: torch.Tensor, gradient: torch.Tensor,
        optimizer: torch.optim.Optimizer, *, mixed: bool,
    ) -> None:  # fmt: skip
        self.name = name
        self.weight = weight
        self.index = index
        self.gradient = gradient
        """Gradient of the survivors, which is reduced over the replicas."""
        self.optimizer = optimizer
        self.master: nn.Parameter = optimizer.param_groups[0]["params"][0]
        self.wide: torch.Tensor | None = None
        """Gradient in the master's precision, if that differs."""
        self.narrow: torch.Tensor | None = None
        """New weights in the compute precision."""
        self.pending = False
        """True if a gradient has arrived since the last step."""
        with torch.no_grad():
            chosen = gathered(weight, index)
            if mixed:
                self.master.data = chosen = chosen.float()
                self.wide, self.narrow = torch.zeros_like(chosen), chosen.to(HALF)
            weight.data = torch.zeros_like(weight, dtype=HALF if mixed else None, memory_format=torch.contiguous_format)
            self._put(chosen if self.narrow is None else self.narrow)

    def gather(self) -> None:
        """Add the survivors' part of the dense gradient to their gradient, and free the dense one."""
        dense = self.weight.grad
        assert dense is not None
        flat = dense.reshape(-1)
        if self.wide is None and self.pending:
            self.gradient.add_(flat.index_select(0, self.index))
        elif flat.dtype == self.gradient.dtype:
            torch.index_select(flat, 0, self.index, out=self.gradient)
        else:  # the model's forward has changed the weight's dtype
            self.gradient.copy_(flat.index_select(0, self.index))
        if self.wide is not None and self.pending:
            # A 16-bit sum would lose small later terms.
            self.wide.add_(self.gradient)
            self.gradient.copy_(self.wide)
        elif self.wide is not None:
            self.wide.copy_(self.gradient)
        self.pending = True
        self.weight.grad = None

    def norm(self) -> float:
        """Return the norm of the gradient, for clipping."""
        return float(torch.linalg.vector_norm(self.gradient.to(self.master.dtype)))

    def step(self, options: Options, factor: float) -> None:
        """Run the optimizer's step on the survivors, and write their new weights into the dense weight."""
        self.optimizer.param_groups[0].update(options)
        if self.wide is None:
            self.master.data = gathered(self.weight, self.index)
            self.master.grad = self.gradient.to(self.master.dtype)
        else:
            self.wide.copy_(self.gradient)
            self.master.grad = self.wide
        if factor != 1.0:
            self.master.grad.mul_(factor)
        self.optimizer.step()
        self.master.grad = None
        self.write_back()
        self.pending = False

    @torch.no_grad()
    def write_back(self) -> None:
        """Write the survivors' weights into the dense weight; in full precision they are then freed."""
        if self.narrow is not None:
            self.narrow.copy_(self.master)
            self._put(self.narrow)
        else:
            self._put(self.master.detach())
            self.master.data = self.master.data.new_empty(0)

    def values(self) -> torch.Tensor:
        """Return the survivors' weights in full precision."""
        if self.wide is not None:
            return self.master.detach()
        return gathered(self.weight, self.index)

    def dense(self) -> torch.Tensor:
        """Return the whole weight in full precision."""
        found = torch.zeros(self.weight.shape, dtype=self.master.dtype, device=self.weight.device)
        put(found, self.index, self.values())
        return found

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors stored for this layer."""
        kept = [value for value in self.optimizer.state[self.master].values() if isinstance(value, torch.Tensor)]
        return [
            self.weight.data, self.index, self.gradient, self.master.data,
            *(each for each in (self.wide, self.narrow) if each is not None), *(value for value in kept if value.dim()),
        ]  # fmt: skip

    def _put(self, values: torch.Tensor) -> None:
        put(self.weight, self.index, values)
