"""A LightningModule's `training_step` and `validation_step`, split at `forward`.

If a step has the usual form (some preparation, one `self(...)`, a loss or logs of its outputs), any strategy can run
the module's forward, in shards or stages, and the rest of the step is the candidate's loss or metrics: the step is run
again with the outputs given instead of a forward. Otherwise the step is run whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from hydra_tune.core.errors import CandidateError

Step = Literal["training_step", "validation_step"]
OBJECTIVE = "train it with HydraTuneCallback in an objective"


class _NoTrainer:
    """Stands in for a Trainer while a step runs, and refuses every access."""

    def __getattr__(self, name: str) -> Any:
        raise CandidateError(f"a step of the LightningModule uses its Trainer ({name!r})", OBJECTIVE)


class _Reached(Exception):
    """Ends a step at its forward."""


@contextmanager
def _forward_is(module: Any, forward: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """While active, `self(...)` calls `forward`, and values logged by the step are collected."""
    logs: dict[str, Any] = {}

    def log(name: str, value: Any, *_args: Any, **_options: Any) -> None:
        logs[name] = value

    module.trainer = _NoTrainer()
    module.forward, module.log = forward, log
    try:
        yield logs
    finally:
        del module.forward, module.log
        module.trainer = None


def run_step(module: Any, step: Step, batch: Any, position: int, forward: Callable[..., Any]) -> tuple[Any, Any]:
    """Run a step with `forward` in place of its forward; return its result and logs."""
    method = getattr(module, step)
    arguments = [batch, position][: len(inspect.signature(method).parameters)]
    with _forward_is(module, forward) as logs:
        return method(*arguments), logs


def loss_of(returned: Any) -> torch.Tensor:
    """Return the loss that a training step returned."""
    loss = returned.get("loss") if isinstance(returned, dict) else returned
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise CandidateError(f"training_step returned a {type(loss).__name__}", "return a loss, or a dict with 'loss'")
    return loss


def number_of(name: str, value: Any) -> float:
    """Return a logged value; refuse metric objects, which cannot be averaged over batches."""
    if isinstance(value, nn.Module):
        raise CandidateError(f"{name!r} is logged as a {type(value).__name__}, not as a number", OBJECTIVE)
    return float(value)


class Before:
    """A step up to its forward: returns the forward's arguments, and keeps the batch for the rest of the step."""

    def __init__(self, module: Any, step: Step) -> None:
        self.module, self.step = module, step

    def __call__(self, batch: Any, position: int) -> tuple[Any, Any]:
        reached: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            reached.append((args, kwargs))
            raise _Reached

        try:
            run_step(self.module, self.step, batch, position, forward)
        except _Reached:
            return self._arguments(*reached[0]), (batch, position)
        raise CandidateError(f"{self.step} did not call forward", OBJECTIVE)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments as a candidate's inputs: one, several, or by name."""
        if not kwargs:
            return args[0] if len(args) == 1 and isinstance(args[0], torch.Tensor) else args
        names = list(inspect.signature(type(self.module).forward).parameters)[1:]
        return {**dict(zip(names, args, strict=False)), **kwargs}


class Rest:
    """A step after its forward, with the forward's outputs given."""

    def __init__(self, module: Any, step: Step) -> None:
        self.module, self.step = module, step

    def run(self, outputs: Any, targets: Any) -> tuple[Any, dict[str, Any]]:
        """Return the step's result and logs."""
        batch, position = targets
        return run_step(self.module, self.step, batch, position, lambda *_args, **_kwargs: outputs)


class RestLoss(Rest):
    """A candidate's loss: the rest of `training_step`."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, "training_step")

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        return loss_of(self.run(outputs, targets)[0])


class RestLog(Rest):
    """A candidate's metric: a value logged by the rest of `validation_step`."""

    def __init__(self, module: Any, name: str) -> None:
        super().__init__(module, "validation_step")
        self.name = name

    def __call__(self, outputs: Any, targets: Any) -> float:
        return number_of(self.name, self.run(outputs, targets)[1][self.name])


class WholeSteps(nn.Module):
    """A LightningModule whose steps cannot be split: in training its forward is `training_step`.

    In evaluation it returns the logs of `validation_step`, and the loss.
    """

    def __init__(self, module: Any, validates: bool) -> None:
        super().__init__()
        self.lightning_module = module
        self.validates = validates

    def forward(self, batch: Any, position: int) -> dict[str, Any]:
        module: Any = self.lightning_module
        forward = type(module).forward.__get__(module)
        made = {"loss": loss_of(run_step(module, "training_step", batch, position, forward)[0])}
        if self.training or not self.validates:
            return made
        return {**run_step(module, "validation_step", batch, position, forward)[1], **made}


def whole_inputs(batch: Any, position: int) -> tuple[Any, None]:
    """Return the whole batch as inputs."""
    return (batch, position), None


def whole_loss(outputs: dict[str, Any], _targets: None) -> torch.Tensor:
    """Return the loss of the whole step."""
    loss: torch.Tensor = outputs["loss"]
    return loss


class WholeLog:
    """A metric that the whole step logged."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, outputs: dict[str, Any], _targets: None) -> float:
        return number_of(self.name, outputs[self.name])
