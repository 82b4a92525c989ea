"""Bad flags, names and files: exit code 2, one line that names the value and the fix, nothing created."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydra_tune.cli.app import run

YAML = "space: mlp\ndata: digits\ntrials: 2\nepochs: 1\ndevices: 2xcpu\n"


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the message of a refused command, after checking that it is one line and that no database was made."""
    assert run(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err
    assert not Path("hydra_tune.db").exists()
    return printed.err


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--trials", "-1"], "trials cannot be -1 (give a whole number of at least 1)"),
        (["--trials", "many"], "'many'"),
        (["--devices", "3xtpu"], "devices cannot be '3xtpu' (give auto, cpu, 2xcpu"),
        (["--device-memory", "10XB"], "device_memory cannot be '10XB' (give a size such as 256MiB"),
        (["--strategy", "hole"], "strategy cannot be 'hole' (did you mean 'whole'?"),
        (["--sampler", "random2"], "did you mean 'random'?"),
        (["--pruner", "media"], "did you mean 'median'?"),
        (["--direction", "up"], "direction cannot be 'up' (give minimize or maximize)"),
        (["--metric", "a", "--metric", "b"], "2 metrics and 1 directions"),
        (["--timeout", "0"], "timeout cannot be 0.0"),
        (["--seed", "-5"], "seed cannot be -5"),
        (["--concurrency", "0"], "concurrency cannot be 0"),
        (["--spill", "no/such/folder"], "spill cannot be 'no/such/folder'"),
        (["--storage", "mysql://x"], "mysql"),
        (["--storage", "sqlite:///no/such/folder/x.db"], "no directory"),
        (["--study", ""], "study cannot be named ''"),
        (["--study", "a\nb"], r"study cannot be named 'a\nb'"),
        (["--study", "a\x1b[31mb"], r"study cannot be named 'a\x1b[31mb'"),
        (["--study", "x" * 10_000], "give 1 to 200 printable characters"),
        (["--data", "digit"], "did you mean 'digits'?"),
        (["--epochs", "0"], "epochs cannot be 0"),
        (["--no-such-flag"], "No such option"),
    ],
)
def test_flags(capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    Path("spec.yaml").write_text(YAML)
    assert said in complaint(capsys, "search", "spec.yaml", *flags)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("trails: 3\nspace: mlp", "unknown key 'trails' (did you mean 'trials'?"),
        ("space: mlp", "the number of trials is missing"),
        ("trials: 3", "the search space is missing"),
        ("trials: 3\nspace: mlq", "did you mean 'mlp'?"),
        ("trials: 3\nspace: 7", "space cannot be 7"),
        ("trials: 3\nspace: mlp\noverrides: [1]", "overrides cannot be [1]"),
        ("trials: 3\nspace: mlp\noverrides: {widht_0: 3}", "did you mean 'width'?"),
        ("trials: 3\nspace: gpt\ndata: digits", "'gpt' does not suit the data 'digits'"),
        ("trials: '3'\nspace: mlp", "trials cannot be '3'"),
        ("- a list", "holds ['a list']"),
        ("trials: [", "is not plain YAML"),
        ("trials: !!python/object/apply:os.system ['touch owned']\nspace: mlp", "is not plain YAML"),
        ("trials: 3\nspace: nothing.py:build", "there is no file 'nothing.py'"),
        ("trials: 3\nspace: mlp\nsampler: grid", "grid"),
    ],
)
def test_yaml_files(capsys: pytest.CaptureFixture[str], content: str, said: str) -> None:
    Path("spec.yaml").write_text(content)
    assert said in complaint(capsys, "search", "spec.yaml")
    assert not Path("owned").exists(), "no code of the file ran"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("missing.yaml", "there is no file 'missing.yaml'"),
        ("nonsense", "'nonsense' is no specification"),
        ("missing.py:build", "there is no file 'missing.py'"),
        ("here.py:", "names no build function"),
        ("here.py:build it", "names no build function"),
        ("../etc/passwd:x", "is no module name"),
    ],
)
def test_specifications(capsys: pytest.CaptureFixture[str], spec: str, said: str) -> None:
    assert said in complaint(capsys, "search", spec, "--trials", "1")


@pytest.mark.smoke
def test_grid_with_a_bare_build_function_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    Path("build.py").write_text("def build(trial): return 1.0\n")
    assert run(["search", "build.py:build", "--trials", "2", "--sampler", "grid", "--devices", "2xcpu", "-q"]) == 2
    said = capsys.readouterr().err
    assert "grid" in said
    assert "declared" in said


@pytest.mark.smoke
@pytest.mark.parametrize("command", ["trials", "show", "best", "export"])
def test_looking_where_nothing_is(capsys: pytest.CaptureFixture[str], command: str) -> None:
    extra = ["--to", "out"] if command == "export" else []
    assert "does not exist (a search creates it" in complaint(capsys, command, "x", *extra)


@pytest.mark.smoke
def test_a_pickle_where_weights_are_expected_is_refused_unread(tmp_path: Path) -> None:
    import os
    import pickle

    from torch import nn

    from hydra_tune.core.errors import InputError
    from hydra_tune.core.weights import load_weights

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path}/owned",)

    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(InputError, match="is not a safetensors file"):
        load_weights(nn.Linear(1, 1), tmp_path / "model.safetensors")
    assert not (tmp_path / "owned").exists()


HOSTILE = ["../../up", "naïve 🦉", "<script>alert(1)</script>", "'; DROP TABLE trials; --", "[red]x[/red]"]


def test_hostile_names_are_stored_and_shown_inert(capsys: pytest.CaptureFixture[str]) -> None:
    Path("build.py").write_text("def build(trial): return trial.suggest_float('x[bold]', 0, 1)\n")
    for name in HOSTILE:
        flags = ["--trials", "1", "--study", name, "--metric", name, "--devices", "1xcpu", "-q"]
        assert run(["search", "build.py:build", *flags]) == 0
    capsys.readouterr()
    assert run(["studies"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in HOSTILE)
    assert run(["show", HOSTILE[4]]) == 0
    assert "x[bold]" in capsys.readouterr().out
    made = {str(path) for path in Path().rglob("*")} - {"build.py", "__pycache__"}
    assert all(path.startswith("hydra_tune") or "__pycache__" in path for path in made), made


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "error: the coordinator is out of memory (with --debug it says where)\n"),
        (OSError(28, "No space"), "error: [Errno 28] No space (with --debug it says where)\n"),
    ],
)  # fmt: skip
def test_a_machine_that_has_no_more_gets_one_line(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("hydra_tune.cli.app.app", fail)
    assert run(["studies"]) == 1
    assert capsys.readouterr().err == line
