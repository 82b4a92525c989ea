"""The local phase of one subnet: some optimizer steps on batches of its own, from the trial's state to a result.

A trial in rounds has one state (`start`): the whole model's tensors and optimizer state, by name, the schedule, a
random state for each subnet, and the position in the data. A phase takes a subnet's part of it, trains and returns the
part; it depends on nothing else, so a lost phase can be repeated on any device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hydra_tune.core.random_state import RandomState
from hydra_tune.core.seeds import seed_everything, trial_seed
from hydra_tune.strategies.shard.optimizers import OptimizerParts, options_of
from hydra_tune.strategies.subnets.deal import Dealt, deal, take
from hydra_tune.strategies.subnets.shrink import subnet
from hydra_tune.strategies.subnets.structure import Structure
from hydra_tune.strategies.subnets.work import share_of
from hydra_tune.training.batches import Batches
from hydra_tune.training.candidate import Candidate, Dataset, Pinned
from hydra_tune.training.loop import Training
from hydra_tune.training.prepared import Origin

State = dict[str, Any]


@dataclass(frozen=True)
class RoundsKit:
    """The data that workers need to train a candidate in rounds; its model has no contents."""

    candidate: Candidate
    train: Dataset
    valid: Dataset | None
    seed: int
    structure: Structure
    subnets: int
    local_steps: int
    travels: bool
    """True if the optimizer's state moves with the weights; otherwise every phase starts without."""
    parts: OptimizerParts
    origin: Origin | None = None
    """The build that made the candidate, if one did."""

    @property
    def pinned(self) -> bool:
        """True if each subnet has a data set of its own, which only its worker may read."""
        return isinstance(self.train, Pinned)

    def dealt(self, turn: int, index: int) -> Dealt:
        return deal(self.structure, self.subnets, self.seed, turn)[index]


class EveryNth:
    """Every `of`-th batch of an epoch, from `index` on."""

    def __init__(self, batches: Batches, index: int, of: int) -> None:
        self.all = batches
        self.index = index
        self.of = of

    def __len__(self) -> int:
        return share_of(len(self.all), self.index, self.of)

    def rows_at(self, position: int) -> int:
        return self.all.rows_at(self.index + position * self.of)

    def fetch(self, epoch: int, position: int) -> tuple[Any, Any]:
        return self.all.fetch(epoch, self.index + position * self.of)


class Phase(Training):
    """One subnet in training."""

    def __init__(
        self, kit: RoundsKit, state: Mapping[str, Any], turn: int, index: int, device: torch.device,
        data: Dataset | None = None,
    ) -> None:  # fmt: skip
        """`data` is the subnet's own partition, if data is pinned."""
        self.kit = kit
        self.dealt = kit.dealt(turn, index)
        model = subnet(kit.candidate.model, kit.structure, self.dealt, state["tensors"])
        super().__init__(replace(kit.candidate, model=model), data if kit.pinned else kit.train, None, kit.seed, device)
        if not kit.pinned:
            self.batches = EveryNth(self.batches, index, kit.subnets)  # type: ignore[assignment]
        self.communicated = sum(_size(tensor) for tensor in self.named_tensors().values())
        """Bytes of the trial's state loaded and returned."""
        self._take_up(state, index)

    def _take_up(self, state: Mapping[str, Any], index: int) -> None:
        position = state["position"]
        self.epoch, self.batch, self.steps = position["epoch"], position["batch"], position["steps"]
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        for group in self.optimizer.param_groups:
            group.update(state["groups"][self._group_of(group)])
            for parameter in group["params"]:
                kept = state["optimizer"].get(self._names[id(parameter)]) if self.kit.travels else None
                if kept:
                    self.optimizer.state[parameter] = self._taken(parameter, kept, group)
        self._tensors.add(
            value for kept in self.optimizer.state.values() for value in kept.values() if torch.is_tensor(value)
        )
        self._random = RandomState.from_state(state["random"][index])

    def _taken(self, parameter: nn.Parameter, kept: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a subnet's part of the optimizer state of a parameter."""
        found: dict[str, Any] = {}
        name = self._names[id(parameter)]
        for key, value in kept.items():
            if torch.is_tensor(value) and value.dim():
                part = take(self.kit.structure, self.dealt, name, value)
                assert part is not None
                found[key] = part.to(self.device)
                self.communicated += _size(part)
            elif torch.is_tensor(value):
                found[key] = value.to(
                    self.device if group.get("capturable") or group.get("fused") else "cpu", copy=True
                )
            else:
                found[key] = value
        return found

    @property
    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.model.named_parameters()}

    def _group_of(self, group: Mapping[str, Any]) -> int:
        """Return the param group of the whole model's optimizer that contains this group of the subnet's."""
        return self.kit.parts.group_of[self._names[id(group["params"][0])]]

    def result(self) -> State:
        """Return the subnet's result, to be merged into the trial's state."""
        names = self._names
        tensors = {name: tensor.detach() for name, tensor in self.named_tensors().items()}
        kept = {names[id(p)]: dict(own) for p, own in self.optimizer.state.items()} if self.kit.travels else {}
        self.communicated += sum(_size(tensor) for tensor in tensors.values())
        self.communicated += sum(
            _size(v) for own in kept.values() for v in own.values() if torch.is_tensor(v) and v.dim()
        )
        options = options_of(self.optimizer)
        return {
            "tensors": tensors,
            "optimizer": kept,
            "groups": {self._group_of(g): own for g, own in zip(self.optimizer.param_groups, options, strict=True)},
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "random": self._random.state(),
            "steps": self.steps,
            "loss_sum": self.loss_sum,
            "loss_rows": self.loss_rows,
        }


def start(training: Training, parts: OptimizerParts, subnets: int) -> State:
    """Return the state in rounds of a trial at the position of `training`."""
    saved = training.state()
    optimizer = {parts.order[index]: kept for index, kept in saved["optimizer"]["state"].items()}
    return {
        "tensors": saved["tensors"],
        "optimizer": optimizer,
        "groups": list(options_of(training.optimizer)),
        "scheduler": saved["scheduler"],
        "random": [saved["random"], *(_stream(training, index) for index in range(1, subnets))],
        "position": {"turn": 0, **saved["position"]},
        "history": saved["history"],
        "kept": saved["kept"],
        "account": [],
        "current": {},
    }


def _stream(training: Training, index: int) -> dict[str, Any]:
    """Return another random state of the same trial."""
    before = RandomState.capture()
    seed_everything(trial_seed(training.batches.seed, index))
    found = RandomState.capture(training.device).state()
    before.restore()
    return found


def as_training(
    state: State, parts: OptimizerParts, data: tuple[int, int, int], current: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a checkpoint from a state in rounds: the input of `Training.restore`, plus state specific to rounds.

    `current` has the counts of the current epoch.
    """
    groups = [
        {**options, "params": [i for i, name in enumerate(parts.order) if parts.group_of[name] == group]}
        for group, options in enumerate(state["groups"])
    ]
    kept = {parts.order.index(name): own for name, own in state["optimizer"].items()}
    position = {key: value for key, value in state["position"].items() if key != "turn"}
    return {
        "tensors": state["tensors"],
        "gradients": {},
        "optimizer": {"state": kept, "param_groups": groups},
        "scheduler": state["scheduler"],
        "random": state["random"][0],
        "position": position,
        "history": state["history"],
        "kept": state["kept"],
        "data": data,
        "extra": {},
        "rounds": {
            "turn": state["position"]["turn"],
            "random": state["random"],
            "account": state["account"],
            "current": current,
        },
    }


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
