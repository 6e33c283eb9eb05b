"""Commands whose options are the fields of dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from tierstore.command_line import make_app, size_option, with_options
from tierstore.errors import UsageError
from tierstore.units import GIB, KIB


@dataclass(frozen=True, kw_only=True)
class Room:
    model: Annotated[str, typer.Option(help="A model")]
    host_bytes: Annotated[int, size_option("Host memory")] = GIB
    hbm_bytes: Annotated[int | None, size_option("Device memory")] = None
    inside: int = 7


@dataclass(frozen=True, kw_only=True)
class Names:
    names: Annotated[list[str] | None, typer.Option("--name", help="May be repeated")] = None

    def __post_init__(self) -> None:
        if self.names == [""]:
            raise UsageError("a name must not be empty")


@pytest.fixture
def run() -> tuple[CliRunner, typer.Typer, list[object]]:
    app, seen = make_app(), []

    @app.command()
    @with_options
    def command(file: Annotated[str, typer.Argument()], room: Room, names: Names, json: bool = False) -> None:
        """Do something."""
        seen.append((file, room, names, json))

    return CliRunner(), app, seen


def test_each_field_is_an_option(run: tuple[CliRunner, typer.Typer, list[object]]) -> None:
    runner, app, seen = run
    assert runner.invoke(app, ["f", "--model", "tiny"]).exit_code == 0
    arguments = ["f", "--model=m", "--host-bytes=4KiB", "--hbm-bytes=2GiB", "--name=a", "--name=b", "--json"]
    assert runner.invoke(app, arguments).exit_code == 0
    assert seen == [
        ("f", Room(model="tiny"), Names(), False),
        ("f", Room(model="m", host_bytes=4 * KIB, hbm_bytes=2 * GIB), Names(names=["a", "b"]), True),
    ]
    assert runner.invoke(app, ["f"]).exit_code == 2  # --model is required
    assert runner.invoke(app, ["f", "--model=m", "--inside=8"]).exit_code == 2


def test_help_shows_sizes_as_people_write_them(run: tuple[CliRunner, typer.Typer, list[object]]) -> None:
    runner, app, _ = run
    told = runner.invoke(app, ["--help"]).stdout
    assert "--host-bytes SIZE" in told
    assert "Host memory [default: 1GiB]" in told
    assert "Do something." in told


def test_mistakes_are_those_of_the_dataclass(run: tuple[CliRunner, typer.Typer, list[object]]) -> None:
    runner, app, seen = run
    for arguments, message in ((["--name="], "must not be empty"), (["--host-bytes=lots"], "not a size")):
        found = runner.invoke(app, ["f", "--model=m", *arguments])
        assert isinstance(found.exception, UsageError)
        assert message in str(found.exception)
    assert seen == []
