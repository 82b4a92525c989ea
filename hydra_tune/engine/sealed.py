"""Values that pass through the coordinator as bytes, from one worker to another.

They may hold tensors or objects of user code, which the coordinator could unpickle only by importing torch or the
user's file.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sealed:
    """A pickled value; `open` restores it in any worker of the run."""

    content: bytes

    @classmethod
    def of(cls, value: Any) -> Sealed:
        """Pickle a value; raise if it cannot be pickled."""
        return cls(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))

    def open(self) -> Any:
        """Unpickle the value, which a worker of the same run has sealed."""
        return pickle.loads(self.content)
