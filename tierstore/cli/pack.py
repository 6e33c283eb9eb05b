"""``tierstore pack``: pages as a file that can be carried to another machine, and checked there."""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tierstore.cli import show
from tierstore.cli.operator import Connect, Keys, Operator, ServerKey
from tierstore.cli.prompts import (
    IdentityDigest,
    Model,
    choose_model,
    connected_store,
    known_identities,
    open_model,
    read_tokens,
)
from tierstore.errors import UsageError
from tierstore.units import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from tierstore import Store
    from tierstore.keys import Identity
    from tierstore.packs import Manifest

HashName = Literal["sha256", "blake3"]
_HOST_BYTES = 256 * MIB  # of a directory opened here

app = typer.Typer(
    help="Carry pages to another machine, in a file that is checked there.", no_args_is_help=True
)

Out = Annotated[Path, typer.Argument(metavar="OUT.tskv", help="The pack; - is stdout", allow_dash=True)]
Pack = Annotated[Path, typer.Argument(metavar="PACK.tskv", help="The pack; - is stdin", allow_dash=True)]
Directory = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="A directory that nobody has open, instead of a daemon"),
]
SignerKey = Annotated[
    Path | None,
    typer.Option("--signer", metavar="FILE", help="Only a pack signed by this .pub key", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="One document for machines")]


@app.command()
def export(
    out: Out,
    prompt_file: Annotated[
        list[Path],
        typer.Option(
            "--prompt-file", metavar="FILE", help="Token ids, as of `tierstore pin`; several may be given"
        ),
    ],
    model: Model = None,
    identity: IdentityDigest = None,
    sign: Annotated[
        Path | None,
        typer.Option("--sign", metavar="FILE", help="Sign with this .pem key", show_default=False),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what an earlier run left")] = False,
    hash: Annotated[
        HashName | None,
        typer.Option(
            "--hash",
            help="Of pages: blake3 is faster, and read where [packs] is installed; sha256 everywhere. "
            "[default: blake3 where it is installed]",
            show_default=False,
        ),
    ] = None,
    store: Directory = None,
    connect: Connect = None,
    keys: Keys = None,
    server_key: ServerKey = None,
) -> None:
    """Write the pages that are held of some prompts to a file.

    Whole chunks of them, with tokens, identity and checksums; a beginning that prompts have in common is
    there once.
    """
    from tierstore.packs import PageHash, Signer, export_pack

    _check_one(store, connect)
    tokens = [read_tokens(file) for file in prompt_file]
    signer = Signer() if sign is None else Signer.read(sign)
    groups = choose_model(_known(store, connect, keys, server_key), model, identity)

    def opener(identity: Identity) -> AbstractContextManager[Store]:
        return _store(identity, store, connect, keys, server_key)

    with open_model(groups, tokens, opener) as (opened, prompts), show.meter("exporting") as meter:
        path = None if str(out) == "-" else out
        made = asyncio.run(
            export_pack(
                opened,
                prompts,
                path,
                signer=signer,
                resume=resume,
                progress=meter.advance,
                hash=None if hash is None else PageHash[hash.upper()],
            )
        )
    resumed = f", {made.resumed_pages:,} of them from an earlier run" if made.resumed_pages else ""
    packed = f"{made.held_tokens:,} of {made.asked_tokens:,} tokens are packed"
    behind = len(made.manifests) - 1
    more = f", and {behind} packs of further layer groups behind it" if behind else ""
    _say(f"{packed}: {_summary(made.manifest)}{resumed}{more}", to_stderr=path is None)


@app.command()
def verify(pack: Pack, signer: SignerKey = None, as_json: Json = False) -> None:
    """Check every byte of a pack, and its signature."""
    from tierstore.packs import Trust, open_pack, verify_pack

    trust = Trust() if signer is None else Trust.read(signer)

    async def run() -> Manifest:
        async with open_pack(_input(pack), trust) as reader:
            meter.expect(reader.manifest.pages, reader.manifest.pages * reader.manifest.page_bytes)
            await verify_pack(reader, meter.advance)
            return reader.manifest

    with show.meter("verifying") as meter:
        manifest = asyncio.run(run())
    if as_json:
        show.write_json(_to_json(manifest))
        return
    show.line(f"good: {_summary(manifest)}")


@app.command("import")
def import_(
    pack: Pack,
    signer: SignerKey = None,
    new_model: Annotated[
        bool, typer.Option("--new-model", help="Also pages of a model that the daemon does not know yet")
    ] = False,
    store: Directory = None,
    connect: Connect = None,
    keys: Keys = None,
    server_key: ServerKey = None,
) -> None:
    """Take a pack's pages into a daemon, after checking them.

    A daemon that knows models takes packs of those only. Run it again to go on with what was cut off.
    """
    from tierstore.packs import (
        Imported,
        PackError,
        PackReader,
        Trust,
        import_part,
        open_pack,
        require_identity,
    )

    _check_one(store, connect)
    trust = Trust() if signer is None else Trust.read(signer)
    known = [] if store is not None and not store.exists() else _known(store, connect, keys, server_key)

    async def run() -> list[Imported]:
        """The pack, and those of further layer groups behind it."""
        done = []
        async with open_pack(_input(pack), trust) as reader:
            manifest = reader.manifest
            if not new_model:
                try:
                    require_identity(manifest, known)
                except PackError as error:
                    raise PackError(f"{error} (--new-model takes it all the same)") from None
            meter.expect(manifest.pages, manifest.pages * manifest.page_bytes)
            part: PackReader | None = reader
            while part is not None:
                with _store(part.manifest.identity, store, connect, keys, server_key) as opened:
                    done.append(await import_part(opened, part, progress=meter.advance))
                part = await part.following()
        return done

    with show.meter("importing") as meter:
        imported = asyncio.run(run())
    for each in imported:
        held = f", {each.held_pages:,} of them were" if each.held_pages else ""
        show.line(f"all pages are in the store{held}: {_summary(each.manifest)}")


@app.command()
def keygen(
    name: Annotated[str, typer.Argument(help="Whose key", show_default=False)],
    directory: Annotated[Path, typer.Option("--dir", help="Where to put NAME.pem and NAME.pub")] = Path(),
) -> None:
    """Make a key pair to sign packs with.

    NAME.pem signs (pack export --sign), NAME.pub is for those who import (pack import --signer).
    """
    from tierstore.packs import signing

    for file in signing.generate(directory, name):
        show.line(str(file))


# -- the store on the other side --------------------------------------------------------------------------


def _check_one(directory: Path | None, url: str | None) -> None:
    if directory is not None and url is not None:
        raise UsageError("give --store or --connect, not both")


def _known(
    directory: Path | None, url: str | None, keys: Path | None, server_key: Path | None
) -> list[Identity]:
    """Identities that a store may have pages of."""
    if directory is None:
        with Operator(url, keys, server_key) as operator:
            return known_identities(operator)
    from tierstore.tiers.disk.listing import list_store

    return [holding.identity for holding in list_store(directory).holdings]


@contextmanager
def _store(
    identity: Identity,
    directory: Path | None,
    url: str | None,
    keys: Path | None,
    server_key: Path | None,
) -> Iterator[Store]:
    """A store for pages of ``identity``, without a page pool."""
    from tierstore.spec import KVSpec

    if directory is None:
        with connected_store(identity, url, keys, server_key) as store:
            yield store
        return
    with _opened(directory, KVSpec.parse(identity.layout), identity) as store:
        yield store


def _opened(directory: Path, spec: Any, identity: Identity) -> Store:
    """A directory that nobody has open, with the capacity it has."""
    import tierstore
    from tierstore.tiers.disk.listing import list_store

    capacity = list_store(directory).capacity_bytes if directory.exists() else None
    return tierstore.open(
        directory,
        spec,
        identity=identity,
        host_bytes=max(_HOST_BYTES, 8 * spec.page_bytes),
        disk_bytes=capacity or tierstore.DEFAULT_DISK_BYTES,
    )


def _input(pack: Path) -> Path | None:
    return None if str(pack) == "-" else pack


# -- what is said -----------------------------------------------------------------------------------------


def _summary(manifest: Manifest) -> str:
    from tierstore.packs.format import UNSIGNED
    from tierstore.packs.signing import name

    identity = manifest.identity
    signed = f"signed by {name(manifest.signer)}" if manifest.signer != UNSIGNED else "not signed"
    parts = [identity.model, *filter(None, (identity.revision, identity.adapter, identity.tenant))]
    return (
        f"{manifest.tokens:,} tokens of {len(manifest.prompts):,} prompts, {manifest.pages:,} pages, "
        f"{format_size(manifest.pages * manifest.page_bytes)} of model {' / '.join(parts)}, {signed}"
    )


def _to_json(manifest: Manifest) -> dict[str, object]:
    from dataclasses import asdict

    from tierstore.packs.format import UNSIGNED

    return {
        "identity": asdict(manifest.identity),
        "prompts": len(manifest.prompts),
        "tokens": manifest.tokens,
        "pages": manifest.pages,
        "page_bytes": manifest.page_bytes,
        "pack_bytes": manifest.nbytes,
        "hash": manifest.hash.name.lower(),
        "signer": manifest.signer.hex() if manifest.signer != UNSIGNED else None,
    }


def _say(words: str, *, to_stderr: bool) -> None:
    if to_stderr:
        from tierstore.printable import printable

        sys.stderr.write(printable(words) + "\n")
    else:
        show.line(words)
