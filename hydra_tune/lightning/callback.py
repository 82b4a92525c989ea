"""The callback that connects a Lightning Trainer to its trial: it reports, prunes, checkpoints and resumes.

It does not affect the training itself. Rank 0, the only one to talk to the trial, makes each decision and broadcasts
it, so that all ranks end at the same point.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar

import torch
from optuna.trial import BaseTrial

from hydra_tune.core.errors import InputError, nearest, quoted
from hydra_tune.lightning.bases import as_callback, home_of, loaded
from hydra_tune.lightning.end_reasons import EndReason
from hydra_tune.lightning.measures import Measures
from hydra_tune.lightning.quiet import quieten_logs, quieten_trainer
from hydra_tune.lightning.resuming import TrainerCheckpoints, go_on, restore_generators
from hydra_tune.lightning.spawning import carry_by_value
from hydra_tune.lightning.trial_connection import ConnectionServer, DirectConnection, SocketConnection, TrialConnection

PULSE_SECONDS = 1.0
"""Seconds between two questions whether the search is being stopped; each is also a sign of life."""
STEP_HOOKS = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip
"""Hooks that Lightning calls in every step."""
LEAVING_OUT = ("2.6.",)
"""Versions of Lightning known to skip a hook that is not callable."""


class HydraTuneCallback:
    """Reports a Trainer's metrics to a trial, and ends the training if the trial is pruned or has diverged.

    `monitor` names one logged metric or several; the first is reported to Optuna. They are looked up after each
    validation, or, if logged only then, at the end of each training epoch; a report's step counts these from 0. In a
    search of Hydra Tune the training is also checkpointed, at the beginning of an epoch and at most every
    `checkpoint_seconds`, and resumed if its process is lost. Lightning's progress bars and messages are then off unless
    `quiet=False`.
    """

    plain: ClassVar[type]
    """The class as written, without Lightning's base; only classes made by `as_callback` have it."""

    def __new__(cls, *_args: Any, **_options: Any) -> Any:
        if "plain" in vars(cls):
            return super().__new__(cls)
        return super().__new__(as_callback(cls, _names()))

    def __init__(self, trial: BaseTrial, monitor: str | Sequence[str], *, quiet: bool | None = None) -> None:
        names = (monitor,) if isinstance(monitor, str) else tuple(monitor)
        if not names or not all(isinstance(name, str) and name for name in names):
            raise InputError(f"monitor cannot be {quoted(monitor)}", "give the name of a logged metric, or several")
        if not isinstance(trial, BaseTrial):
            raise InputError(f"trial cannot be {quoted(trial)}", "give the trial that the objective was called with")
        self.monitor = names
        self._port: TrialConnection = DirectConnection(trial)
        self._process = os.getpid()
        self._server: ConnectionServer | None = None
        self._quiet = self._port.remote is not None if quiet is None else quiet
        self._reset()
        if self._quiet:
            quieten_logs()
        if self._port.remote is not None:
            carry_by_value()

    def _begin_fit(self, port: DirectConnection) -> None:
        self._reset()
        self._fit = port.begin_fit()

    def _reset(self) -> None:
        self.history: list[dict[str, float]] = []
        """Metrics of each report of this fit."""
        self._place: str | None = None
        self._waiting = False
        self._looks = False
        """True if the loss of every batch is checked."""
        self._measures = Measures()
        self._checkpoints: TrainerCheckpoints | None = None
        self._generators: list[torch.Tensor] | None = None
        self._pulse = time.perf_counter()

    def check_pruned(self) -> None:
        """Do nothing: present for objectives written for Optuna's callback."""

    # Pickling for the processes of ddp_spawn

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            raise TypeError("a HydraTuneCallback belongs to a running trial and cannot be copied")
        assert isinstance(self._port, DirectConnection)
        if self._server is None or not self._server.serving:
            self._begin_fit(self._port)
            self._server = ConnectionServer(self._port)
        state = {**vars(self), "_server": None, "_process": None, "_port": self._server.linked()}
        return _arrived, (type(self).plain, _names(), state)

    # Hooks of the Trainer

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if self._process not in (None, os.getpid()):
            raise InputError("the callback cannot reach its trial from a forked process", "use strategy='ddp_spawn'")
        if isinstance(self._port, DirectConnection):
            self._begin_fit(self._port)
        if self._quiet:
            quieten_logs()
            quieten_trainer(trainer)
        self._same_parameters(trainer)
        if self._port.checkpoints is not None:
            directory = self._port.checkpoints / f"fit-{self._fit}"
            self._checkpoints = TrainerCheckpoints(directory, self._port.checkpoint_seconds)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore a checkpoint: the last moment before the loops begin, with everything set up."""
        if trainer.ckpt_path is not None:
            self._checkpoints = None  # Lightning will restore the checkpoint of the user's own call
        if self._checkpoints is None:
            return
        state, notes = self._checkpoints.newest()
        for note in notes if trainer.is_global_zero else ():
            self._port.note(note)
        if state is not None:
            self._go_on(trainer, pl_module, self._checkpoints, state)

    def _go_on(self, trainer: Any, pl_module: Any, files: TrainerCheckpoints, state: dict[str, Any]) -> None:
        try:
            go_on(trainer, pl_module, state)
        except (KeyError, RuntimeError, ValueError) as error:
            # A half-restored training is unusable: the next attempt starts again.
            files.remove()
            why = " ".join(str(error).split())
            self._end(trainer, EndReason("unusable", f"its checkpoint cannot be used ({why}); the trial starts again"))
        self._generators = state["generators"]
        if trainer.is_global_zero:
            # The last report may have been lost with the process that was to write it.
            for step, metrics in enumerate(self.history):
                self._port.report(step, metrics)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Reading a loss on an accelerator would wait for it, and differing ranks could not agree there. NaN then shows
        # in the metrics.
        self._looks = trainer.strategy.root_device.type == "cpu" and trainer.world_size == 1
        needed = {"on_train_batch_start", "on_train_batch_end", *(["on_before_backward"] if self._looks else [])}
        self._leave_out(trainer, set(STEP_HOOKS) - needed)

    def _leave_out(self, trainer: Any, hooks: Iterable[str]) -> None:
        """Have Lightning skip hooks that do nothing: calling an empty hook takes it microseconds.

        Hooks overridden by a subclass are kept, and all hooks if the Trainer calls this callback through another one.
        """
        known = str(home_of(trainer).__version__).startswith(LEAVING_OUT)
        if known and any(each is self for each in trainer.callbacks):
            plain = type(self).plain
            for name in hooks:
                if getattr(plain, name, None) is getattr(HydraTuneCallback, name, None):
                    vars(self)[name] = None

    def _call_all_again(self) -> None:
        for name in STEP_HOOKS:
            vars(self).pop(name, None)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._look(trainer, "later", last=True)
        self._prepare_epoch(trainer)
        self._measures.goes_on()

    def _prepare_epoch(self, trainer: Any) -> None:
        """Restore the loaders' generators after a resume, or write a checkpoint if due."""
        if self._generators is not None:
            restore_generators(trainer, self._generators)
            self._generators = None
            return
        if trainer.current_epoch == 0 or self._checkpoints is None:
            return
        due, stop = self._decide(trainer, self._checkpoint_due)
        if due or stop:
            self._checkpoint(trainer)
        if stop:
            self._end(trainer, EndReason("stopped", "the search was stopped"))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._measures.counts_next(pl_module):
            self._measures.start_counting(pl_module)
        else:
            self._leave_out(trainer, ["on_train_batch_start"])

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        if self._looks and loss.numel() == 1 and not math.isfinite(loss.item()):
            message = f"the training loss became {loss.item()} at step {trainer.global_step}"
            self._end(trainer, EndReason("diverged", message))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        self._measures.batch_ends(now)
        if now - self._pulse > PULSE_SECONDS and trainer.is_global_zero:
            self._pulse = now
            self._port.stopping()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._waiting = True
            self._look(trainer, "validation")
        self._measures.goes_on()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._waiting |= not trainer.enable_validation or self._place in ("epoch", "later")
        self._look(trainer, "epoch")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._call_all_again()
        self._look(trainer, "later", last=True)
        if trainer.is_global_zero:
            self._port.describe(self._measures.facts(trainer))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._call_all_again()
        self._measures.stop_counting()
        if self._server is not None and isinstance(self._port, DirectConnection) and self._port.verdict is not None:
            # The processes of ddp_spawn have ended; this one knows only that they failed.
            raise self._port.verdict.error() from None

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = list(state_dict["history"])

    # Reports

    def _look(self, trainer: Any, place: str, *, last: bool = False) -> None:
        """Report if the metrics are present and due; `last` is the last chance to find them.

        A metric logged in training is available at the end of an epoch, or later if the module logs it in a hook of its
        own: the place where all metrics were first found is used from then on.
        """
        if not self._waiting or self._place not in (None, place):
            return
        found = {name: trainer.callback_metrics[name] for name in self.monitor if name in trainer.callback_metrics}
        if len(found) < len(self.monitor) and not last:
            return
        self._waiting, self._place = False, place
        values = {name: float(value) for name, value in found.items()}
        verdict = self._decide(trainer, lambda: self._report(values, trainer))
        self.history.append(values)
        if verdict is not None:
            self._end(trainer, verdict)

    def _report(self, found: dict[str, float], trainer: Any) -> EndReason | None:
        for name in self.monitor:
            if name not in found:
                known = list(trainer.callback_metrics)
                hint = nearest(name, known) if known else "no metric was logged; use self.log in a step"
                return EndReason("missing", f"the metric {name!r} was not logged", hint)
            if not math.isfinite(found[name]):
                return EndReason("diverged", f"{name} became {found[name]} at step {trainer.global_step}")
        step = len(self.history)
        return EndReason("pruned", f"pruned at report {step}") if self._port.report(step, found) else None

    # Decisions

    def _decide(self, trainer: Any, decide: Any) -> Any:
        """Return rank 0's decision on every rank."""
        return trainer.strategy.broadcast(decide() if trainer.is_global_zero else None)

    def _end(self, trainer: Any, verdict: EndReason) -> None:
        """End the training on this rank; called on every rank."""
        if trainer.is_global_zero:
            self._port.describe(self._measures.facts(trainer))
            self._port.ended(verdict)
        raise verdict.error()

    def _checkpoint_due(self) -> tuple[bool, bool]:
        assert self._checkpoints is not None
        return self._checkpoints.due(), self._port.stopping()

    def _checkpoint(self, trainer: Any) -> None:
        assert self._checkpoints is not None
        made = self._checkpoints.save(trainer)
        if trainer.is_global_zero:
            if isinstance(made, str):
                self._port.note(f"not checkpointed: {made}")
            else:
                self._port.checkpointed(*made)

    def _same_parameters(self, trainer: Any) -> None:
        """Raise InputError if a script rerun by DDP got other parameters than rank 0."""
        if trainer.world_size == 1 or isinstance(self._port, SocketConnection):
            return
        ours = self._port.params()
        theirs = trainer.strategy.broadcast(ours)
        if ours != theirs:
            raise InputError(
                f"rank {trainer.global_rank} has other parameters than rank 0: {quoted(ours)} and {quoted(theirs)}",
                "run the trials with hydra_tune.lightning.optimize_ddp, or train with strategy='ddp_spawn'",
            )


def _names() -> tuple[str, ...]:
    return tuple(module.__name__ for module in loaded())


def _arrived(kind: type[HydraTuneCallback], names: tuple[str, ...], state: dict[str, Any]) -> Any:
    """Recreate the callback in a process started by ddp_spawn."""
    callback = object.__new__(as_callback(kind, names))
    vars(callback).update(state)
    return callback
