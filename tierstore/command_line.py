"""Parts that the project's commands share. A failed command prints one line on stderr, and its exit code
gives the kind of error."""

from __future__ import annotations

import functools
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from tierstore.errors import TierStoreError, UsageError
from tierstore.extras import install
from tierstore.printable import printable
from tierstore.units import parse_size, written_size

_NO_THREAD = "can't start new thread"  # Python's message
_EXTRAS = {
    "torch": "engine",
    "safetensors": "engine",
    "tokenizers": "engine",
    "httpx": "bench",
    "matplotlib": "bench",
    "starlette": "serve",
    "uvicorn": "serve",
    "jinja2": "serve",
    "cryptography": "packs",
    "blake3": "packs",
    "obstore": "s3",
}  # packages that only some commands need, and the extra that installs each


def make_app() -> typer.Typer:
    """Return an empty program with shell completion, plain help and Python's own tracebacks."""
    return typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def version_option(program: str) -> Any:
    """Return the option ``--version`` of ``program``: a flag that prints the version of the package and
    exits.

    >>> # def command(version: Annotated[bool, version_option("tierstore")] = False) -> None: ...
    """

    def show(wanted: bool) -> None:
        if wanted:
            from importlib import metadata

            typer.echo(f"{program} {metadata.version('tierstore')}")
            raise typer.Exit

    return typer.Option("--version", help="Show the version and exit", callback=show, is_eager=True)


def size_option(help: str) -> Any:
    """Return an option whose value is a size, such as 8GiB."""
    return typer.Option(help=help, metavar="SIZE", parser=parse_size)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command declare its options as dataclasses, so that several commands share one declaration.

    If a parameter of ``command`` has a dataclass as its type, each field of the dataclass becomes an option.
    A field without a typer annotation is no option, and keeps its default.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class Room:
    ...     host_bytes: Annotated[int, size_option("Capacity of the host tier")] = 1 << 30
    >>> @app.command()
    ... @with_options
    ... def serve(room: Room) -> None: ...
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        plain = parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY)
        parameters += _options(groups[name]) if name in groups else [plain]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            options = [field.name for field in fields(group) if field.name in values]
            values[name] = group(**{option: values.pop(option) for option in options})
        command(**values)

    take(run, parameters)
    return run


def option(name: str, kind: Any, declared: Any, default: Any = None) -> inspect.Parameter:
    """Return a function parameter of type ``kind`` that typer reads as the option ``declared``."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )


def take(command: Callable[..., None], options: Sequence[inspect.Parameter]) -> None:
    """Make typer pass these options to a command that is declared with ``**`` parameters."""
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in options}


def _options(group: Any) -> list[inspect.Parameter]:
    """Return the options that the fields of a dataclass declare. A size's default is shown as people write
    it."""
    hints = get_type_hints(group, include_extras=True)
    found = []
    for field in fields(group):
        if get_origin(hints[field.name]) is not Annotated:
            continue
        kind, declared = get_args(hints[field.name])
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        if declared.parser is parse_size and isinstance(default, int):
            declared, shown = copy(declared), written_size(default)
            declared.help, declared.show_default = f"{declared.help} [default: {shown}]", False
        found.append(option(field.name, kind, declared, default))
    return found


@contextmanager
def one_line_errors(program: str, *, extra: str = "") -> Iterator[None]:
    """Exit with code 2 for bad usage and with code 1 for a failed run. Any other exception in the block is a
    bug and keeps its traceback. ``extra`` is the extra with all packages of ``program``; if it is empty, the
    message names the extra of the missing package."""
    _make_writable()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # a flush at Python's exit would not report an error
    except BrokenPipeError:
        _drop_stdout()  # the reader of the pipe has ended (`| head`)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        _fail(program, "interrupted", 1)
    except UsageError as error:
        _fail(program, str(error), 2)
    except TierStoreError as error:
        _fail(program, str(error), 1)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        extra = extra or _EXTRAS[package]
        _fail(program, f"this needs {package}, which the extra [{extra}] installs: {install(extra)}", 1)
    except OSError as error:
        _drop_stdout()
        where = f"{error.filename}: " if error.filename is not None else ""
        _fail(program, f"the system refuses: {where}{error.strerror or error}", 1)
    except MemoryError:
        _fail(program, "the system refuses: there is not enough memory (see ulimit -v, and the container)", 1)
    except RuntimeError as error:
        if str(error) != _NO_THREAD:
            raise
        _fail(program, f"the system refuses: {error} (see ulimit -u, and the container's pids limit)", 1)


def _make_writable() -> None:
    """Make sure that writing output cannot fail. Characters that the locale cannot encode are written
    escaped. A stream that was closed before the start (``>&-``) discards its output."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # for good
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """Redirect stdout to /dev/null; otherwise Python would report another error when it flushes stdout at
    exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(program: str, message: str, code: int) -> None:
    line = " ".join(message.split())  # a library's message may have several lines
    sys.stderr.write(f"{program}: {printable(line)}\n")
    raise SystemExit(code)
