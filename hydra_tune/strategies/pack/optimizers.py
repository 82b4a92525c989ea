"""The optimizers that have a batched form: SGD, Adam, AdamW and RMSprop, with hyperparameters for each member.

The parameters of a group lie in one matrix, a row for each member, so that an update is a few operations however many
tensors a model has. Updates follow torch's formulas, and their state is that of torch's optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from hydra_tune.strategies.pack.refusal import CannotPack

Group: TypeAlias = Mapping[str, Any]
"""A parameter group of a torch optimizer."""
State: TypeAlias = Mapping[str, torch.Tensor]
Columns: TypeAlias = Sequence[torch.Tensor]
"""Coefficients of an update, each a column with a number for each member."""
Options: TypeAlias = Mapping[str, bool]


@dataclass(frozen=True)
class Form:
    """The batched form of one kind of optimizer."""

    update: Callable[[torch.Tensor, torch.Tensor, State, Columns, Options], None]
    """Updates parameters by gradients, in place."""
    coefficients: Callable[[Group, int], tuple[float, ...]]
    """The numbers of one member's update, by its hyperparameters and its number of steps, this one included."""
    numbers: tuple[str, ...]
    """Hyperparameters that may differ from member to member."""
    options: Callable[[Group], dict[str, bool]]
    """Hyperparameters that shape the update, and are equal for all members."""
    state: Callable[[Options], tuple[str, ...]]
    """Names of the state tensors, in torch's order."""
    counts_steps: bool = True
    """True if torch's state has a number of steps."""


def _sgd_numbers(group: Group, step: int) -> tuple[float, ...]:
    # The first gradient becomes the buffer as it is, without dampening.
    first = step == 1
    momentum, taken = group["momentum"], 1 - group["dampening"]
    return -group["lr"], group["weight_decay"], momentum, 0.0 if first else momentum, 1.0 if first else taken


def _sgd(p: torch.Tensor, g: torch.Tensor, state: State, columns: Columns, options: Options) -> None:
    rate, decay, momentum, held, taken = columns
    g = g.addcmul(p, decay)
    if options["momentum"]:
        buffer = state["momentum_buffer"].mul_(held).addcmul_(g, taken)
        g = g.addcmul(buffer, momentum) if options["nesterov"] else buffer
    p.addcmul_(g, rate)


def _adam_numbers(group: Group, step: int, decoupled: bool = False) -> tuple[float, ...]:
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    kept = 1 - group["lr"] * decay if group.get("decoupled_weight_decay", decoupled) else decay
    size = -group["lr"] / (1 - beta1**step)
    return size, kept, 1 - beta1, beta2, 1 - beta2, (1 - beta2**step) ** -0.5, group["eps"]


def _adam(p: torch.Tensor, g: torch.Tensor, state: State, columns: Columns, options: Options) -> None:
    size, decay, taken1, kept2, taken2, corrected, eps = columns
    if options["decoupled"]:
        p.mul_(decay)
    else:
        g = g.addcmul(p, decay)
    mean = state["exp_avg"].lerp_(g, taken1.expand_as(g))
    square = state["exp_avg_sq"].mul_(kept2).addcmul_(g * taken2, g)
    if options["amsgrad"]:
        square = torch.maximum(state["max_exp_avg_sq"], square, out=state["max_exp_avg_sq"])
    p.addcdiv_(mean * size, square.sqrt().mul_(corrected).add_(eps))


def _rmsprop_numbers(group: Group, step: int) -> tuple[float, ...]:
    alpha = group["alpha"]
    return -group["lr"], group["weight_decay"], alpha, 1 - alpha, group["eps"], group["momentum"]


def _rmsprop(p: torch.Tensor, g: torch.Tensor, state: State, columns: Columns, options: Options) -> None:
    rate, decay, kept, taken, eps, momentum = columns
    g = g.addcmul(p, decay)
    square = state["square_avg"].mul_(kept).addcmul_(g * taken, g)
    if options["centered"]:
        mean = state["grad_avg"].lerp_(g, taken.expand_as(g))
        square = square.addcmul(mean, mean, value=-1)
    step = g / square.sqrt().add_(eps)
    if options["momentum"]:
        step = state["momentum_buffer"].mul_(momentum).add_(step)
    p.addcmul_(step, rate)


def _sgd_options(group: Group) -> dict[str, bool]:
    return {"momentum": group["momentum"] != 0, "nesterov": group["nesterov"], "maximize": group["maximize"]}


def _adam_options(group: Group, decoupled: bool = False) -> dict[str, bool]:
    decoupled = group.get("decoupled_weight_decay", decoupled)
    return {"decoupled": decoupled, "amsgrad": group["amsgrad"], "maximize": group["maximize"]}


def _rmsprop_options(group: Group) -> dict[str, bool]:
    return {"momentum": group["momentum"] > 0, "centered": group["centered"], "maximize": group["maximize"]}


def _rmsprop_state(options: Options) -> tuple[str, ...]:
    momentum = ("momentum_buffer",) if options["momentum"] else ()
    return ("square_avg", *momentum, *(("grad_avg",) if options["centered"] else ()))


def _adam_state(options: Options) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if options["amsgrad"] else ()))


_ADAM = ("lr", "betas", "eps", "weight_decay")
FORMS: dict[type[torch.optim.Optimizer], Form] = {
    torch.optim.SGD: Form(
        _sgd, _sgd_numbers, ("lr", "momentum", "dampening", "weight_decay"), _sgd_options,
        lambda options: ("momentum_buffer",) if options["momentum"] else (), counts_steps=False,
    ),
    torch.optim.Adam: Form(_adam, _adam_numbers, _ADAM, _adam_options, _adam_state),
    torch.optim.AdamW: Form(
        _adam, lambda group, step: _adam_numbers(group, step, True), _ADAM,
        lambda group: _adam_options(group, True), _adam_state,
    ),
    torch.optim.RMSprop: Form(
        _rmsprop, _rmsprop_numbers, ("lr", "alpha", "eps", "weight_decay", "momentum"), _rmsprop_options,
        _rmsprop_state,
    ),
}  # fmt: skip
"""Optimizers with a batched form."""
HOOKS = (
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A model's optimizer, apart from the numbers that may differ from member to member."""

    form: Form
    name: str
    groups: tuple[tuple[int, ...], ...]
    """Positions of each group's trainable parameters among the model's parameters."""
    options: tuple[tuple[tuple[str, bool], ...], ...]
    """Options of each group."""

    @property
    def signature(self) -> tuple[Any, ...]:
        return self.name, self.groups, self.options


def kind_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> Kind:
    """Return the kind of a model's optimizer. Raises CannotPack if it has no batched form."""
    form = FORMS.get(type(optimizer))
    if form is None:
        names = ", ".join(kind.__name__ for kind in FORMS)
        raise CannotPack(f"optimizer {type(optimizer).__name__} has no batched form (those that have: {names})")
    if any(getattr(optimizer, hooks, None) for hooks in HOOKS):
        raise CannotPack("its optimizer has hooks")
    position = {parameter: index for index, parameter in enumerate(model.parameters())}
    groups, options = [], []
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        _check_group(group, form, trained)
        if any(parameter not in position for parameter in trained):
            raise CannotPack("its optimizer has parameters that the model has not")
        groups.append(tuple(position[parameter] for parameter in trained))
        options.append(tuple(sorted(form.options(group).items())))
    found = {index for group in groups for index in group}
    if any(p.requires_grad and index not in found for p, index in position.items()):
        raise CannotPack("its optimizer leaves out parameters that have gradients")
    return Kind(form, type(optimizer).__name__, tuple(groups), tuple(options))


def _check_group(group: Group, form: Form, trained: Sequence[nn.Parameter]) -> None:
    if group.get("capturable") or group.get("differentiable"):
        raise CannotPack("its optimizer is capturable or differentiable")
    numbers = [group[name] for name in form.numbers]
    flat = [each for number in numbers for each in (number if isinstance(number, tuple | list) else (number,))]
    if not all(isinstance(number, float | int) for number in flat):
        raise CannotPack("its optimizer has a hyperparameter that is a tensor")
    if len({parameter.dtype for parameter in trained}) > 1 or any(not p.is_floating_point() for p in trained):
        raise CannotPack("a group of its optimizer has parameters of several types")
