"""Source of a search over built-in families, in the coordinator's form: names and settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hydra_tune.training.source import Build


@dataclass(frozen=True)
class FamilySource:
    """Built-in model families on a data set, with narrowed ranges."""

    families: tuple[str, ...]
    data: Any
    overrides: dict[str, Any]
    epochs: int

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> FamilySource | None:
        match record:
            case {"families": list(families), "data": data, "overrides": dict(overrides), "epochs": int(epochs)}:
                return cls(tuple(families), data, overrides, epochs)
        return None

    def load(self) -> Build:
        from hydra_tune.search_spaces.families import FamilyBuild  # imports torch, which the coordinator must not

        return FamilyBuild(families=self.families, data=self.data, overrides=self.overrides, epochs=self.epochs)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "family", "families": list(self.families), "data": self.data,
            "overrides": self.overrides, "epochs": self.epochs,
        }  # fmt: skip

    def folder(self) -> str | None:
        return None

    def text(self) -> str | None:
        return json.dumps(self.describe(), indent=1, sort_keys=True)

    def uses_torch(self) -> bool:
        return True
