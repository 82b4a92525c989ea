"""The report's file: data of user code is shown as text, whatever it contains."""

from __future__ import annotations

import json
import re
from typing import Any

import hydra_tune as ht
from hydra_tune.dashboard.report import write_report

ODD = "<!-- <script> </script> -->\u2028 ]]> <\\!--"


def test_data_cannot_end_or_hide_the_element_that_holds_it() -> None:
    """A browser that meets "<!--" and "<script" in a script reads on past its end: the page would be blank."""

    def objective(trial: Any) -> float:
        trial.set_user_attr("odd", ODD)
        if trial.number:
            raise ValueError(ODD)
        return 1.0

    ht.search(objective, trials=2, study="s", devices="1xcpu", progress=False).close()
    page = write_report("sqlite:///hydra_tune.db", "s")
    (data,) = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', page, flags=re.DOTALL)
    assert "<" not in data
    answers = json.loads(data)
    study = next(path for path in answers if re.fullmatch(r"/api/studies/\d+", path))
    assert answers[f"{study}/trials/0"]["user_attrs"]["odd"] == ODD
    assert ODD in answers[f"{study}/trials/1"]["error"]
