"""The model families by name, and the build function that turns one or several of them into a search.

A family is a module of this package with `space(data) -> Space` and `model(params, data) -> nn.Module`. The
table below says what each is for, so that it can be listed without importing torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

from hydra_tune.core.errors import SpecError, nearest, quoted
from hydra_tune.search_spaces.space import Space, Suggests

if TYPE_CHECKING:
    from torch import nn

    from hydra_tune.search_spaces.dataset import Data, Kind, Task
    from hydra_tune.training.candidate import Candidate


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model: its description, the tasks and inputs it suits, and its training."""

    name: str
    description: str
    tasks: tuple[Task, ...]
    kinds: tuple[Kind, ...]
    clip_grad_norm: float | None = None

    def suits(self, data: Data) -> bool:
        return data.task in self.tasks and data.kind in self.kinds

    def space(self, data: Data) -> Space:
        """Return the family's search space on this data."""
        return cast(Space, self._module.space(data))

    def model(self, params: Mapping[str, Any], data: Data) -> nn.Module:
        """Return the model for one assignment of the space."""
        return cast("nn.Module", self._module.model(params, data))

    @property
    def _module(self) -> Any:
        return importlib.import_module(f"hydra_tune.search_spaces.{self.name}")


FAMILIES: Mapping[str, Family] = {
    each.name: each
    for each in (
        Family(
            name="mlp",
            description="dense layers of chosen widths",
            tasks=("classification", "regression"),
            kinds=("features", "sequence", "image"),
        ),
        Family(
            name="resnet",
            description="residual convolutions with batch normalisation",
            tasks=("classification", "regression"),
            kinds=("image",),
        ),
        Family(
            name="transformer",
            description="attention over features, image rows or steps",
            tasks=("classification", "regression"),
            kinds=("features", "sequence", "image"),
            clip_grad_norm=1.0,
        ),
        Family(
            name="gpt",
            description="causal language model with tied embeddings",
            tasks=("language",),
            kinds=("tokens",),
            clip_grad_norm=1.0,
        ),
        Family(
            name="lstm",
            description="recurrent network over image rows, steps or text",
            tasks=("classification", "regression", "language"),
            kinds=("sequence", "image", "tokens"),
            clip_grad_norm=1.0,
        ),
        Family(
            name="linear",
            description="weighted sum of a table's columns, the baseline",
            tasks=("classification", "regression"),
            kinds=("table",),
        ),
        Family(
            name="tabular_mlp",
            description="dense layers on a table's embedded columns, members of an ensemble sharing them",
            tasks=("classification", "regression"),
            kinds=("table",),
        ),
        Family(
            name="tabular_resnet",
            description="residual dense blocks on a table's embedded columns",
            tasks=("classification", "regression"),
            kinds=("table",),
        ),
        Family(
            name="ft_transformer",
            description="attention among a table's columns",
            tasks=("classification", "regression"),
            kinds=("table",),
            clip_grad_norm=1.0,
        ),
    )
}


def family(name: str) -> Family:
    """Return the family of that name; raise a SpecError if there is none."""
    if name not in FAMILIES:
        raise SpecError(f"there is no model family {quoted(name)}", nearest(str(name), FAMILIES))
    return FAMILIES[name]


def default_objective(task: str) -> tuple[str, Literal["minimize", "maximize"]]:
    """Return the default metric and direction of a task."""
    objectives: dict[str, tuple[str, Literal["minimize", "maximize"]]] = {
        "classification": ("accuracy", "maximize"),
        "regression": ("r2", "maximize"),
        "language": ("loss", "minimize"),
    }
    if task not in objectives:
        raise SpecError(f"there is no task {quoted(task)}", nearest(str(task), objectives))
    return objectives[task]


class FamilyBuild:
    """A build function for `ht.search`: candidates of one or several families on one data set.

    `data` is anything that `data.load` takes, `overrides` anything that `Space.narrowed` takes. With several families
    the trial first chooses `family`, which is then the prefix of its parameters' names. Mistakes in the arguments show
    here rather than in the first trial.

    Only the arguments are pickled: another process loads the data itself, once.
    """

    def __init__(
        self,
        families: str | Sequence[str] = ("mlp",),
        data: str | Mapping[str, Any] | Data = "digits",
        overrides: Mapping[str, Any] | None = None,
        epochs: int = 5,
    ) -> None:
        self.families = (families,) if isinstance(families, str) else tuple(families)
        self.data = data
        self.overrides = {} if overrides is None else overrides
        self.epochs = epochs
        if not self.families or len(set(self.families)) < len(self.families):
            raise SpecError(f"families cannot be {quoted(self.families)}", "name one or more, each once")
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise SpecError(f"epochs cannot be {quoted(epochs)}", "give a whole number of at least 1")
        for name in self.families:
            _check_suits(family(name), self._loaded)
        self.space = self._declared_space().narrowed(self.overrides)

    def __call__(self, trial: Suggests) -> Candidate:
        """Return the candidate for a trial's parameters."""
        from hydra_tune.search_spaces import objectives, training
        from hydra_tune.training.candidate import Candidate

        chosen, params = self._chosen(self.space.suggest(trial))
        data = self._loaded
        return Candidate(
            model=chosen.model(params, data),
            loss=objectives.loss(data),
            optimizer=training.optimizer(params),
            train=data.train,
            valid=data.valid,
            batch_size=params["batch_size"],
            epochs=self.epochs,
            metrics=objectives.metrics(data),
            clip_grad_norm=chosen.clip_grad_norm,
        )

    @property
    def task(self) -> Task:
        """Task of the data; `default_objective` gives its metric."""
        return self._loaded.task

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that every candidate reports."""
        from hydra_tune.search_spaces import objectives

        return ("loss", "train_loss", *objectives.metrics(self._loaded))

    @cached_property
    def _loaded(self) -> Data:
        from hydra_tune.search_spaces.data import load

        return load(self.data)

    def _declared_space(self) -> Space:
        spaces = {name: family(name).space(self._loaded) for name in self.families}
        return spaces[self.families[0]] if len(spaces) == 1 else Space.choice("family", spaces)

    def _chosen(self, params: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
        """Return the family of an assignment, and its parameters without the prefix."""
        if len(self.families) == 1:
            return family(self.families[0]), params
        name = params["family"]
        prefix = f"{name}."
        return family(name), {key.removeprefix(prefix): params[key] for key in params if key.startswith(prefix)}

    def __reduce__(self) -> tuple[Any, ...]:
        return FamilyBuild, (self.families, self.data, self.overrides, self.epochs)

    def __repr__(self) -> str:
        arguments = f"data={self.data!r}, overrides={self.overrides!r}, epochs={self.epochs!r}"
        return f"FamilyBuild({self.families!r}, {arguments})"


def _check_suits(chosen: Family, data: Data) -> None:
    if not chosen.suits(data):
        suitable = [name for name, each in FAMILIES.items() if each.suits(data)]
        raise SpecError(
            f"the family {chosen.name!r} does not suit the data {data.name!r} ({data.task}, {data.kind})",
            f"suitable: {', '.join(suitable)}" if suitable else "no built-in family does",
        )
