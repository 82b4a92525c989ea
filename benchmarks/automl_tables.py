"""Tables of `benchmarks.automl`: real data from installed packages; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pandas as pd


def breast_cancer() -> tuple[pd.DataFrame, str]:
    from sklearn.datasets import load_breast_cancer

    return load_breast_cancer(as_frame=True).frame, "target"


def wine() -> tuple[pd.DataFrame, str]:
    from sklearn.datasets import load_wine

    return load_wine(as_frame=True).frame, "target"


def digits() -> tuple[pd.DataFrame, str]:
    from sklearn.datasets import load_digits

    return load_digits(as_frame=True).frame, "target"


def diabetes() -> tuple[pd.DataFrame, str]:
    from sklearn.datasets import load_diabetes

    return load_diabetes(as_frame=True).frame, "target"


def fair() -> tuple[pd.DataFrame, str]:
    """Extramarital affair yes or no, 6,366 rows (Fair 1978)."""
    from statsmodels.datasets import fair as source

    frame = source.load_pandas().data
    return frame.assign(affairs=(frame["affairs"] > 0).astype(int)), "affairs"


def randhie() -> tuple[pd.DataFrame, str]:
    """Visits to a doctor in the RAND health insurance experiment, 20,190 rows: counts, very skewed."""
    from statsmodels.datasets import randhie as source

    return source.load_pandas().data, "mdvis"


def diamonds() -> tuple[pd.DataFrame, str]:
    """Prices of 8,000 of ggplot2's diamonds, with three ordered categories."""
    from plotnine.data import diamonds as source

    frame = source.sample(8_000, random_state=0).reset_index(drop=True)
    categories = frame.select_dtypes("category").columns
    return frame.astype(dict.fromkeys(categories, str)), "price"


def penguins() -> tuple[pd.DataFrame, str]:
    """Species of penguins, with categories and empty cells."""
    from palmerpenguins import load_penguins

    return load_penguins(), "species"


TABLES: Mapping[str, Callable[[], tuple[pd.DataFrame, str]]] = {
    each.__name__: each for each in (breast_cancer, wine, digits, diabetes, fair, randhie, diamonds, penguins)
}
