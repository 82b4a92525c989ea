"""scikit-learn sets KMP_* variables when it is imported; done here, no single test is blamed for it."""

import sklearn.datasets  # noqa: F401
