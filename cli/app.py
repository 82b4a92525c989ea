"""`hydra-tune`: assembles the commands and prints errors.

Exit codes: 0 done, 1 no trial completed, 2 the input is wrong, 130 interrupted.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Annotated

import typer

from hydra_tune.cli.best import best
from hydra_tune.cli.dashboard import dashboard
from hydra_tune.cli.doctor import doctor
from hydra_tune.cli.export import export
from hydra_tune.cli.fit import fit
from hydra_tune.cli.leaderboard import leaderboard
from hydra_tune.cli.migrate import migrate
from hydra_tune.cli.plan import plan
from hydra_tune.cli.predict import predict
from hydra_tune.cli.report import report
from hydra_tune.cli.resume import resume
from hydra_tune.cli.search import search
from hydra_tune.cli.show import show
from hydra_tune.cli.simulate import simulate
from hydra_tune.cli.spaces import spaces
from hydra_tune.cli.studies import studies
from hydra_tune.cli.trials import trials

app = typer.Typer(
    name="hydra-tune",
    help="Search hyperparameters over many models at once on a small pool of devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    search, plan, resume, studies, trials, show, best, export, fit, predict, leaderboard, dashboard, report, spaces,
    simulate, doctor, migrate,
):  # fmt: skip
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        from hydra_tune.core.version import VERSION

        typer.echo(f"hydra-tune {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")] = False,
) -> None:
    """Search hyperparameters over many models at once on a small pool of devices."""


def main() -> None:
    """Run a command and end with its exit code."""
    os.umask(os.umask(0o022) | 0o002)  # no file of ours is for everybody to change
    if "HYDRA_TUNE_CRASH_POINT" in os.environ:  # a test of crashes
        from hydra_tune.engine import crash_points

        crash_points.install("coordinator")
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    code = run([argument for argument in arguments if argument != "--debug"], debug=debug)
    sys.exit(code)


def run(arguments: list[str], *, debug: bool = False) -> int:
    """Run a command; errors become one line on stderr and an exit code."""
    from hydra_tune.core.errors import HydraTuneError, InputError, MachineError

    try:
        result = app(arguments, prog_name="hydra-tune", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except typer.TyperException as error:
        _complain(_usage(error, arguments))
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        # The reader of our output is gone, as with `| head`. What is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except HydraTuneError as error:
        if debug:
            raise
        _complain(str(error))
        return 2 if isinstance(error, InputError) else 1
    except (OSError, MemoryError) as error:
        if debug:
            raise
        _complain(str(MachineError.of(error, "with --debug it says where")))
        return 1


def _usage(error: typer.TyperException, arguments: list[str]) -> str:
    """Return the message for a usage error with the offending word, which Typer leaves out."""
    says = getattr(error, "format_message", error.__str__)().rstrip(".")
    flags = getattr(getattr(error, "param", None), "opts", [])
    given = [value for flag, value in itertools.pairwise(arguments) if flag in flags]
    return f"{says}, not {given[-1]!r}" if given else says


def _complain(message: str) -> None:
    if not message:  # a command without arguments has printed its help
        return
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
