"""The model, loss and numbers of a pack's members as one function of stacked tensors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap

from hydra_tune.core.trees import call_model
from hydra_tune.strategies.pack.member_functions import MemberFunctions
from hydra_tune.strategies.pack.numbers import loss_of, set_numbers
from hydra_tune.strategies.pack.refusal import CannotPack
from hydra_tune.strategies.pack.stack import Stack
from hydra_tune.strategies.pack.streams import Streams
from hydra_tune.training.candidate import Candidate


class BatchedModel:
    """Computes outputs and losses of all members at once."""

    def __init__(self, candidates: Sequence[Candidate], stack: Stack, streams: Streams) -> None:
        models = [candidate.model for candidate in candidates]
        self._template = _without_tensors(models[0])
        set_numbers(self._template, models)
        self._loss = loss_of([candidate.loss for candidate in candidates])
        self._stack = stack
        self._streams = streams
        self._index = torch.arange(len(candidates), device=streams.device)

    def train(self) -> None:
        self._template.train()

    def eval(self) -> None:
        self._template.eval()

    def losses(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Return the training loss of each member."""
        functions = MemberFunctions(self._streams)

        def one(parameters: Any, buffers: Any, inputs: Any, targets: Any, index: torch.Tensor) -> torch.Tensor:
            functions.index = index
            loss = self._loss(self._call(parameters, buffers, inputs), targets)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise CannotPack("its loss is not a tensor of one number")
            return loss.reshape(())

        with functions.in_place():
            losses: torch.Tensor = vmap(one)(self._stack.parameters, self._stack.buffers, inputs, targets, self._index)
        return losses

    def outputs(self, inputs: Any, streams: Streams, *, shared: bool) -> Any:
        """Return the outputs for a batch that all members share, or for a batch of each."""
        functions = MemberFunctions(streams)

        def one(parameters: Any, buffers: Any, inputs: Any, index: torch.Tensor) -> Any:
            functions.index = index
            return self._call(parameters, buffers, inputs)

        with functions.in_place():
            along = (0, 0, None if shared else 0, 0)
            return vmap(one, in_dims=along)(self._stack.parameters, self._stack.buffers, inputs, self._index)

    def _call(self, parameters: Any, buffers: Any, inputs: Any) -> Any:
        return call_model(_Bound(self._template, (parameters, buffers)), inputs)


class _Bound:
    """A model called with given tensors."""

    def __init__(self, template: nn.Module, tensors: Any) -> None:
        self._template, self._tensors = template, tensors

    def __call__(self, *args: Any, **named: Any) -> Any:
        return functional_call(self._template, self._tensors, args, named)


def _without_tensors(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters and buffers take no memory."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        empty = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied
