"""``tierstore prefetch``: load a prompt's pages from disk into the host tier before a request needs them, or
fill the tiers of a new host with pages of an object store."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.cli import show
from tierstore.cli.operator import ConnectOptions
from tierstore.cli.prompts import (
    ModelChoice,
    SomeTokens,
    connected_store,
    known_identities,
    open_model,
    read_tokens,
)
from tierstore.command_line import size_option, with_options
from tierstore.errors import UsageError
from tierstore.units import format_size

if TYPE_CHECKING:
    from tierstore.cluster.warm_up import WarmUp

_MOST_BYTES = 1 << 60


@with_options
def command(
    file: SomeTokens = None,
    *,
    which: ModelChoice,
    wait_s: Annotated[
        float, typer.Option("--wait-s", min=0.0, max=3600.0, metavar="SECONDS", help="Wait at most this long")
    ] = 60.0,
    bucket: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="URL",
            help="Fetch the most used pages of an object store, s3://BUCKET/PREFIX, instead of FILE",
            show_default=False,
        ),
    ] = None,
    top: Annotated[
        int | None, size_option("With --from: fetch at most this many bytes [default: no limit]")
    ] = None,
    secret: Annotated[
        Path | None,
        typer.Option(
            "--cluster-secret",
            metavar="FILE",
            help="With --from: the secret with which the pages were published",
            show_default=False,
        ),
    ] = None,
    disk_key: Annotated[
        str,
        typer.Option(
            "--disk-key",
            metavar="FILE|command:CMD",
            help="With --from: the disk key of the hosts that published the pages, if they have one",
            show_default=False,
        ),
    ] = "",
    keys_url: Annotated[
        str,
        typer.Option(
            "--cluster-keys",
            metavar="URL",
            help="With --disk-key: the bucket with the keys of the pages",
            show_default=False,
        ),
    ] = "",
    where: ConnectOptions,
) -> None:
    """Load a prompt's pages from disk into the host tier.

    The pages stay there until the policy evicts them. Pages that miss the deadline are still loaded in the
    background.

    With --from, fill the tiers of a new host from an object store instead. The most used pages are fetched
    first. The command ends when the tiers are full.
    """
    if (file is None) == (bucket is None):
        raise UsageError("give FILE with a prompt, or --from s3://BUCKET/PREFIX")
    if bucket is not None:
        _warm_up(_MOST_BYTES if top is None else top, bucket, secret, disk_key, keys_url, where)
        return
    if top is not None or secret is not None or disk_key or keys_url:
        raise UsageError(
            "--top, --cluster-secret, --disk-key and --cluster-keys need --from s3://BUCKET/PREFIX"
        )
    assert file is not None, "checked above"
    _prefetch(file, which, wait_s, where)


def _prefetch(file: Path, which: ModelChoice, wait_s: float, where: ConnectOptions) -> None:
    from rich.console import Console

    tokens = read_tokens(file)
    with Console(file=sys.stderr).status("prefetching"):
        with where.operator() as operator:
            groups = which.of(known_identities(operator))
        with (
            open_model(groups, [tokens], lambda each: connected_store(each, where)) as (store, [prompt]),
            store.lookup(prompt) as hit,
        ):
            on_disk = hit.by_tier.get("disk", 0)
            above = hit.prefetch(deadline_s=wait_s).wait()
    show.line(
        f"{hit.tokens:,} of {len(tokens):,} tokens are stored; {above:,} of them are in the host tier now "
        f"({on_disk:,} were on disk only)"
    )


def _warm_up(
    top: int, url: str, secret: Path | None, disk_key: str, keys_url: str, where: ConnectOptions
) -> None:
    from rich.console import Console

    from tierstore.cluster.bundle_store import BundleStore
    from tierstore.cluster.fetching import DaemonStores
    from tierstore.cluster.s3_address import S3Address
    from tierstore.cluster.shared_store import SharedStoreOptions, read_secret
    from tierstore.cluster.supervisor import ClusterOptions
    from tierstore.cluster.warm_up import Warmer
    from tierstore.daemon.settings import default_listen
    from tierstore.tiers.disk.keyring import read_master_key, sharing_key

    # Wrong options are reported before the daemon is connected.
    S3Address.parse(url)
    ClusterOptions(url, secret=secret, sealed=bool(disk_key), keys_url=keys_url)
    key = read_secret(secret)
    sharing = sharing_key(read_master_key(disk_key)) if disk_key else b""
    where.operator().close()  # raises an error if no daemon answers, before the bucket is read
    bundles = BundleStore(SharedStoreOptions(url, keys_url=keys_url, sharing_key=sharing), watch=False)
    stores = DaemonStores(where.connect or default_listen(), where.keys, where.server_key)
    with Console(file=sys.stderr).status("reading the bucket") as status:

        def progress(done: WarmUp) -> None:
            status.update(
                f"{format_size(done.fetched_bytes)} fetched, {done.held_pages:,} pages held already"
            )

        try:
            done = Warmer(bundles, stores, key, progress).run(top)
        finally:
            stores.close()
    show.line(
        f"fetched {done.fetched_pages:,} pages ({format_size(done.fetched_bytes)}); {done.held_pages:,} were "
        f"held already, {done.beyond_pages:,} are beyond the limits, {done.left_out_pages:,} did not arrive"
    )
