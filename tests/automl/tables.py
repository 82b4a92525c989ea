"""Small tables that tests fit."""

from __future__ import annotations

import numpy as np
import pandas as pd


def mixed(rows: int = 120, seed: int = 0) -> pd.DataFrame:
    """Numbers, categories, dates, text, gaps and a column of no use; `bought` depends on most of them."""
    random = np.random.default_rng(seed)
    age = random.normal(40, 10, rows)
    city = random.choice(["Rome", "Oslo", "Lima", "Köln"], rows)
    words = random.choice(["cheap", "dear"], rows)
    frame = pd.DataFrame({
        "age": age,
        "city": city,
        "since": pd.to_datetime("2020-01-01") + pd.to_timedelta(random.integers(0, 1000, rows), unit="D"),
        "said": [f"I found number {i} of them rather {word}" for i, word in enumerate(words)],
        "same": 1,
    })  # fmt: skip
    bought = (age > 40) ^ (city == "Rome") | (words == "cheap")
    frame.loc[random.random(rows) < 0.1, "age"] = np.nan
    frame.loc[random.random(rows) < 0.1, "city"] = None
    frame["bought"] = np.where(bought, "yes", "no")
    return frame


def line(rows: int = 80, seed: int = 0) -> pd.DataFrame:
    """A regression that a linear model solves: y = 3a - 2b + 100, with a little noise."""
    random = np.random.default_rng(seed)
    a, b = random.normal(size=(2, rows))
    return pd.DataFrame({"a": a, "b": b, "y": 3 * a - 2 * b + 100 + 0.1 * random.normal(size=rows)})
