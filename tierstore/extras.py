from __future__ import annotations


def install(extra: str) -> str:
    """Return the pip command that installs the optional packages of ``extra``, for messages.

    >>> install("fetch")
    "pip install 'tierstore[fetch]' (in a checkout: pip install -e '.[fetch]')"
    """
    return f"pip install 'tierstore[{extra}]' (in a checkout: pip install -e '.[{extra}]')"
