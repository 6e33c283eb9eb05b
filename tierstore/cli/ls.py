"""``tierstore ls``: list stored pages by model and tenant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.cli import show
from tierstore.cli.show import percent
from tierstore.spec import is_hashed, layers_label
from tierstore.units import format_size

if TYPE_CHECKING:
    from tierstore.keys import Identity
    from tierstore.tiers.disk.listing import Holding, Listing

_COLUMNS = (
    "model",
    "tenant",
    "identity",
    "pages",
    "prompts",
    "tokens",
    "bytes",
    "hits",
    "oldest",
    "newest",
    "last used",
)


def command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The store's directory", show_default=False)
    ],
    json: Annotated[bool, typer.Option("--json", help="Write one JSON document")] = False,
) -> None:
    """List the stored pages by model and tenant.

    No process may use DIR: for a daemon, use `tierstore stats`. Nothing is changed. Ages are those of the
    oldest page, the newest page and the last use recorded on disk. Prompts are counted by their last pages,
    if pages are chained. A model with several kinds of layers has one line for each kind. The column "of all"
    says for which share of the model's chunks a kind has pages.
    """
    from tierstore.tiers.disk.listing import list_store

    listing = list_store(directory)
    if json:
        show.write_json(to_json(listing))
    else:
        _print(listing)


def to_json(listing: Listing) -> dict[str, object]:
    """Return the document of ``--json``. Times are seconds since 1970."""
    holdings = listing.holdings
    return {
        "directory": listing.directory,
        "store": listing.store,
        "created_s": listing.created_s,
        "pages": sum(holding.pages for holding in holdings),
        "prompts": sum(holding.prompts for holding in holdings),
        "stored_tokens": sum(holding.tokens for holding in holdings),
        "payload_bytes": sum(holding.bytes for holding in holdings),
        "lost_pages": listing.lost_pages,
        "capacity_bytes": listing.capacity_bytes,
        "allocated_bytes": listing.allocated_bytes,
        "extent_bytes": listing.extent_bytes,
        "index_bytes": listing.index_bytes,
        "identities": [_holding_to_json(holding) for holding in holdings],
    }


def _holding_to_json(holding: Holding) -> dict[str, object]:
    return {
        **asdict(holding.identity),
        "name": holding.name,
        "digest": holding.identity.digest.hex(),
        "layers": layers_label(holding.identity.layout),
        "pages": holding.pages,
        "inline_pages": holding.inline_pages,
        "prompts": holding.prompts,
        "stored_tokens": holding.tokens,
        "payload_bytes": holding.bytes,
        "hits": holding.hits,
        "oldest_s": holding.oldest_s,
        "newest_s": holding.newest_s,
        "last_used_s": holding.last_used_s,
    }


def _print(listing: Listing) -> None:
    models = _by_model(listing.holdings)
    if any(len(group) > 1 for group in models):
        columns = (*_COLUMNS[:3], "layers", "of all", *_COLUMNS[3:])
        rows = []
        for group in models:
            for holding in group:
                row = _row(holding)
                rows.append(
                    (*row[:3], layers_label(holding.identity.layout), _share(holding, group), *row[3:])
                )
        show.table(columns, rows, left=4)
        show.line("")
    elif listing.holdings:
        show.table(_COLUMNS, [_row(holding) for holding in listing.holdings], left=3)
        show.line("")
    pages = sum(holding.pages for holding in listing.holdings)
    nbytes = sum(holding.bytes for holding in listing.holdings)
    lost = f", {listing.lost_pages:,} unreachable pages" if listing.lost_pages else ""
    cap = "" if listing.capacity_bytes is None else f" of {format_size(listing.capacity_bytes)}"
    show.line(
        f"{listing.directory}: {pages:,} pages, {format_size(nbytes)}{lost}; "
        f"{format_size(listing.allocated_bytes)}{cap} on disk "
        f"(extents {format_size(listing.extent_bytes)}, index {format_size(listing.index_bytes)})"
    )


def _by_model(holdings: Sequence[Holding]) -> list[list[Holding]]:
    """Group the holdings by model: those of one model differ only in their layers. In each group, the largest
    holding is first."""
    models: dict[Identity, list[Holding]] = {}
    for holding in holdings:
        models.setdefault(replace(holding.identity, layout=""), []).append(holding)
    return [sorted(group, key=lambda holding: -holding.pages) for group in models.values()]


def _share(holding: Holding, group: Sequence[Holding]) -> str:
    """Return for how many of the model's stored chunks a layer group with named pages has a page, in
    percent."""
    return percent(holding.pages, group[0].pages) if is_hashed(holding.identity.layout) else "–"


def _row(holding: Holding) -> tuple[str, ...]:
    identity = holding.identity
    parts = [holding.name] if holding.name else [identity.model, identity.revision]
    return (
        " / ".join(filter(None, (*parts, identity.adapter))),
        identity.tenant or "–",
        identity.digest.hex()[:8],
        f"{holding.pages:,}",
        "–" if is_hashed(identity.layout) else f"{holding.prompts:,}",  # named pages form no chains
        f"{holding.tokens:,}",
        format_size(holding.bytes),
        f"{holding.hits:,}",
        show.age(holding.oldest_s),
        show.age(holding.newest_s),
        show.age(holding.last_used_s),
    )
