"""The sampler `auto`: chooses one of Optuna's samplers by the number of objectives, the trials so far and the space."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

MANY = 250
"""Finished trials from which a method that needs many trials takes over from TPE."""


class AutoSampler(BaseSampler):
    """Multivariate TPE first; then CMA-ES if all parameters are numbers, or NSGA-II and III with several objectives."""

    def __init__(self, seed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._tpe = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
            self._nsga = {
                False: optuna.samplers.NSGAIISampler(seed=seed), True: optuna.samplers.NSGAIIISampler(seed=seed)
            }  # fmt: skip
            self._cmaes: BaseSampler | None = None
            if importlib.util.find_spec("cmaes") is not None:
                self._cmaes = optuna.samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
        self._chosen: dict[int, BaseSampler] = {}
        """The sampler of each running trial."""

    def choose(self, study: optuna.Study) -> BaseSampler:
        """Return the sampler for a new trial."""
        ended = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        if len(ended) < MANY:
            return self._tpe
        if len(study.directions) > 1:
            return self._nsga[len(study.directions) > 3]
        numbers = not any(isinstance(each, CategoricalDistribution) for each in ended[-1].distributions.values())
        return self._cmaes if self._cmaes is not None and numbers and len(ended[-1].params) > 1 else self._tpe

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._chosen[trial.number] = self.choose(study)
        self._chosen[trial.number].before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._of(trial).sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._of(trial).after_trial(study, trial, state, values)
        self._chosen.pop(trial.number, None)

    def reseed_rng(self) -> None:
        for each in (self._tpe, *self._nsga.values(), *([self._cmaes] if self._cmaes is not None else [])):
            each.reseed_rng()

    def _of(self, trial: FrozenTrial) -> BaseSampler:
        return self._chosen.get(trial.number, self._tpe)
