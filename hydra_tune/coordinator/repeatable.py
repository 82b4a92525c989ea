"""Makes a sampler's random numbers depend on the trial, not on the calls before it.

Optuna's samplers draw from one stream, in the order of their calls, so a killed and resumed search would draw other
numbers than an unbroken one. Here the generators are seeded for each proposal, from the study's seed, the trial's
number and the parameter's name. No state of a sampler has to be stored: with the same finished trials it proposes the
same parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.samplers._lazy_random_state import LazyRandomState
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

RELATIVE = ""
"""Stands for the parameter's name in the seed of parameters that are proposed together."""


class RepeatableSampler(BaseSampler):
    """A sampler whose proposals depend on the seed, the trial and the finished trials alone."""

    def __init__(self, sampler: BaseSampler, seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self._generators = list(_generators(sampler))

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        self._seed(trial, RELATIVE)
        return self.sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        self._seed(trial, param_name)
        return self.sampler.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._seed(trial, RELATIVE)
        self.sampler.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        self._seed(trial, RELATIVE)
        self.sampler.after_trial(study, trial, state, values)

    def _seed(self, trial: FrozenTrial, name: str) -> None:
        for index, generator in enumerate(self._generators):
            text = f"{self.seed}/{trial.number}/{index}/{name}".encode(errors="surrogatepass")
            generator.rng.seed(int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little"))


def _generators(sampler: BaseSampler) -> Iterator[LazyRandomState]:
    """Yield the generators of a sampler, and of the samplers that it uses itself."""
    for value in vars(sampler).values():
        if isinstance(value, LazyRandomState):
            yield value
        elif isinstance(value, BaseSampler):
            yield from _generators(value)
