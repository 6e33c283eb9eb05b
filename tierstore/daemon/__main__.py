"""``python -m tierstore.daemon`` is ``tierstore serve``."""

import typer

from tierstore.cli.serve import serve
from tierstore.command_line import one_line_errors

if __name__ == "__main__":
    with one_line_errors("tierstore serve"):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        app.command()(serve)
        app()
