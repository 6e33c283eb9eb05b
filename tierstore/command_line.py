"""What the project's commands have in common: an error is one line on stderr, and the exit code says whose
it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tierstore.errors import TierStoreError, UsageError


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Ends the process with 2 for bad usage and 1 for a run that failed. Anything else raised in the block
    is a bug and keeps its traceback."""
    try:
        yield
    except BrokenPipeError:
        # Whoever read the text has gone (`| head`). Python would complain once more when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        _fail(program, "interrupted", 1)
    except UsageError as error:
        _fail(program, str(error), 2)
    except TierStoreError as error:
        _fail(program, str(error), 1)


def _fail(program: str, message: str, code: int) -> None:
    line = " ".join(message.split())  # a library's message inside ours may have several
    sys.stderr.write(f"{program}: {line}\n")
    raise SystemExit(code)
