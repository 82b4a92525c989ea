"""Samplers and pruners by name.

Three samplers are our own: `random`, `grid` and `qmc`. With them the parameters of trial n depend only on the seed and
n, for any number of workers and any order of requests; Optuna's draw from one stream in the order of the calls, so that
a second worker changes every trial. The others learn from finished trials, and are Optuna's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import secrets
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler

from hydra_tune.coordinator.auto_sampler import AutoSampler
from hydra_tune.coordinator.parts import construct, split
from hydra_tune.coordinator.pruning import SharePruner
from hydra_tune.core.errors import SpecError
from hydra_tune.search_spaces.distributions import value_at
from hydra_tune.search_spaces.space import Assignment, Space

DEFAULT_SAMPLER = "tpe"
BY_NUMBER = ("random", "grid", "qmc")
"""Samplers whose proposals depend on the seed and the trial's number only."""
DEFAULT_PRUNER = "none"


class RandomSampler(BaseSampler):
    """Draws each parameter from (seed, trial number, parameter name) alone."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        return {}

    def sample_independent(
        self,
        study: Any,
        trial: optuna.trial.FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        return value_at(param_distribution, self._fraction(trial.number, param_name))

    def _fraction(self, number: int, name: str) -> float:
        """Return a pseudo-random number in [0, 1). A hash, since seeding a generator costs ten times as much."""
        digest = hashlib.blake2b(f"{self.seed}/{number}/{name}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class DeclaredSampler(RandomSampler):
    """Gives trial n the n-th of a fixed sequence of assignments of a declared space.

    A parameter outside the declared space, such as a strategy that the search chooses, is drawn at random.
    """

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(seed)
        self.space = space
        self._last: tuple[int, Assignment] = (-1, {})

    def assignment(self, number: int) -> Assignment:
        """Return the parameters of trial `number`."""
        raise NotImplementedError

    def sample_independent(
        self,
        study: Any,
        trial: optuna.trial.FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        number, params = self._last
        if number != trial.number:
            params = self.assignment(trial.number)
            self._last = (trial.number, params)
        if param_name in params:
            return params[param_name]
        return super().sample_independent(study, trial, param_name, param_distribution)


class GridSampler(DeclaredSampler):
    """Every assignment of the space once, shuffled by the seed; `limit` is their number.

    The search stops at the limit; trials beyond it would start over.
    """

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed)
        self._grid = space.grid()
        self._order = np.random.default_rng(seed).permutation(len(self._grid))
        self.limit = len(self._grid)

    def assignment(self, number: int) -> Assignment:
        return self._grid[int(self._order[number % self.limit])]


class QmcSampler(DeclaredSampler):
    """The points of a scrambled Sobol sequence, which fill the space more evenly than random ones."""

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed)
        self._points = self._sobol(256)

    def assignment(self, number: int) -> Assignment:
        if number >= len(self._points):
            # Drawn anew, at least twice as long: a longer sequence begins with the shorter one, and replacing the array
            # in one step is safe for concurrent threads.
            self._points = self._sobol(2 ** number.bit_length())
        return self.space.at(self._points[number].tolist())

    def _sobol(self, length: int) -> np.ndarray:
        from scipy.stats import qmc

        engine = qmc.Sobol(d=max(1, len(self.space.params)), scramble=True, rng=self.seed)
        return np.asarray(engine.random(length))[:, : len(self.space.params)]


def make_sampler(
    sampler: str | Mapping[str, Any] | BaseSampler | None, *, seed: int | None = None, space: Space | None = None
) -> BaseSampler:
    """Return the named sampler, seeded; None is the default, and an Optuna sampler is returned unchanged.

    `space` is the declared space of the build function, if it has one: `grid` needs it, and `qmc` is exact with it.
    """
    if isinstance(sampler, BaseSampler):
        return sampler
    name, options = split("sampler", DEFAULT_SAMPLER if sampler is None else sampler)
    seed = secrets.randbelow(2**31) if seed is None else seed
    if isinstance(name, str) and name in SAMPLERS and not options:
        with warnings.catch_warnings():
            # Optuna calls some of these experimental; the user has chosen one by name.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return SAMPLERS[name](seed, space)
    made: BaseSampler = construct("sampler", SAMPLER_CLASSES.get(str(name), name), options, SAMPLERS, seed)
    return made


def make_pruner(pruner: str | Mapping[str, Any] | BasePruner | None) -> BasePruner:
    """Return the named pruner; None is the default, and an Optuna pruner is returned unchanged."""
    if isinstance(pruner, BasePruner):
        return pruner
    name, options = split("pruner", DEFAULT_PRUNER if pruner is None else pruner)
    if isinstance(name, str) and name in PRUNERS and not options:
        return PRUNERS[name]()
    made: BasePruner = construct("pruner", PRUNER_CLASSES.get(str(name), name), options, PRUNERS)
    return made


def draws_by_number(sampler: object) -> bool:
    """True for a sampler whose parameters depend on the study's seed and the trial's number only."""
    return sampler in ("random", "grid", "qmc")


def trial_limit(sampler: BaseSampler) -> int | None:
    """Return the number of different trials that a sampler offers; None if unlimited."""
    return sampler.limit if isinstance(sampler, GridSampler) else None


def _tpe(seed: int, space: Space | None) -> BaseSampler:
    return optuna.samplers.TPESampler(seed=seed)


def _random(seed: int, space: Space | None) -> BaseSampler:
    return RandomSampler(seed)


def _cmaes(seed: int, space: Space | None) -> BaseSampler:
    _require("cmaes", "cmaes")
    # CMA-ES does not cover categorical choices; a user who chose it needs no warning.
    return optuna.samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)


def _gp(seed: int, space: Space | None) -> BaseSampler:
    _require("gp", "scipy")
    _require("gp", "torch")
    return optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)


def _qmc(seed: int, space: Space | None) -> BaseSampler:
    if space is not None:
        return QmcSampler(space, seed)
    return optuna.samplers.QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False)


def _grid(seed: int, space: Space | None) -> BaseSampler:
    if space is None:
        raise SpecError(
            "the sampler 'grid' needs a declared space, and a build function only shows its space by running",
            "use a built-in family, give the function an attribute `space`, give the values of each parameter "
            "({name: grid, search_space: {x: [1, 2]}}), or use 'random' or 'qmc'",
        )
    return GridSampler(space, seed)


def _nsgaii(seed: int, space: Space | None) -> BaseSampler:
    return optuna.samplers.NSGAIISampler(seed=seed)


def _require(sampler: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise SpecError(f"the sampler {sampler!r} needs the package {package}", f"pip install {package}")


SAMPLERS: dict[str, Callable[[int, Space | None], BaseSampler]] = {
    "tpe": _tpe,
    "random": _random,
    "cmaes": _cmaes,
    "gp": _gp,
    "qmc": _qmc,
    "grid": _grid,
    "nsgaii": _nsgaii,
    "auto": lambda seed, space: AutoSampler(seed),
}

SAMPLER_CLASSES = {
    "tpe": "TPESampler", "random": "RandomSampler", "cmaes": "CmaEsSampler", "gp": "GPSampler", "qmc": "QMCSampler",
    "grid": "GridSampler", "nsgaii": "NSGAIISampler",
}  # fmt: skip
"""Optuna's class of each name, which takes the options."""

PRUNERS: dict[str, Callable[[], BasePruner]] = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    "asha": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
    "percentile": lambda: optuna.pruners.PercentilePruner(25.0),
    "share": SharePruner,
}

PRUNER_CLASSES = {
    "median": "MedianPruner", "asha": "SuccessiveHalvingPruner", "hyperband": "HyperbandPruner",
    "percentile": "PercentilePruner",
}  # fmt: skip
"""Optuna's class of each name, which takes the options."""
