"""`hydra-tune resume STUDY`: continue an interrupted study, or add trials to a finished one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from hydra_tune.cli.options import Json, Quiet, Study, Trust, program, with_settings
from hydra_tune.cli.running import run_and_print


@with_settings(
    trials="A new total of trials.", n_trials="Number of further trials to run.", storage=None,
    devices="Other devices than before.", device_memory="Another budget of each device.",
    cluster="Continue on a Ray cluster: auto, or its head as HOST:PORT.", spill="Another directory than before.",
    timeout=None, allow_changes="Continue with another build or space.",
)  # fmt: skip
def resume(study: Study, *, trust: Trust = None, quiet: Quiet = False, as_json: Json = False, **flags: Any) -> int:
    """Continue a study: finished trials stay, interrupted ones resume from their checkpoints."""
    from hydra_tune.cli.fit import fit_and_show
    from hydra_tune.coordinator.settings import default_storage
    from hydra_tune.coordinator.spec import stored_spec

    storage = flags["storage"]
    flags["progress"] = False if quiet else None
    ready = stored_spec(storage or default_storage(), study, flags, trust or ())
    recorded = ready.source.describe() or {}
    if recorded.get("kind") == "fit":
        again = f"{program()} resume {shlex.quote(study)}"
        options = {
            "trials": flags["trials"], "time": flags["timeout"], "storage": storage,
            "devices": flags["devices"] or "auto", "device_memory": flags["device_memory"], "resume": True,
        }  # fmt: skip
        place = Path(recorded["directory"])
        return fit_and_show(None, "", place, options, again=again, quiet=quiet, as_json=as_json)
    return run_and_print(ready, storage=storage, as_json=as_json)
