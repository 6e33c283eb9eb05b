"""``tierstore pack``: export pages to a file, and verify and import it on another machine."""

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
_HOST_BYTES = 256 * MIB  # host tier of a directory that is opened here

app = typer.Typer(help="Carry pages to another machine in a verified file.", no_args_is_help=True)

Out = Annotated[
    Path, typer.Argument(metavar="OUT.tskv", help="Pack file to write; - is stdout", allow_dash=True)
]
Pack = Annotated[
    Path, typer.Argument(metavar="PACK.tskv", help="Pack file to read; - is stdin", allow_dash=True)
]
Directory = Annotated[
    Path | None,
    typer.Option(
        "--store", metavar="DIR", help="Directory of a store that no process uses, instead of a daemon"
    ),
]
SignerKey = Annotated[
    Path | None,
    typer.Option(
        "--signer", metavar="FILE", help="Accept only a pack signed with this .pub key", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON document")]


@app.command()
def export(
    out: Out,
    prompt_file: Annotated[
        list[Path],
        typer.Option(
            "--prompt-file",
            metavar="FILE",
            help="File with token ids, as for `tierstore pin`; may be repeated",
        ),
    ],
    model: Model = None,
    identity: IdentityDigest = None,
    sign: Annotated[
        Path | None,
        typer.Option("--sign", metavar="FILE", help="Sign the pack with this .pem key", show_default=False),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted export")] = False,
    hash: Annotated[
        HashName | None,
        typer.Option(
            "--hash",
            help="Hash of pages. blake3 is faster, but readers need the extra [packs]. sha256 needs none. "
            "[default: blake3 where it is installed]",
            show_default=False,
        ),
    ] = None,
    store: Directory = None,
    connect: Connect = None,
    keys: Keys = None,
    server_key: ServerKey = None,
) -> None:
    """Write the stored pages of some prompts to a file.

    The pack has whole chunks with their tokens, identity and checksums. A beginning that prompts share is
    written once.
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
    more = f", and {behind} packs of further layer groups after it" if behind else ""
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
        bool, typer.Option("--new-model", help="Also import pages of a model that the daemon does not know")
    ] = False,
    store: Directory = None,
    connect: Connect = None,
    keys: Keys = None,
    server_key: ServerKey = None,
) -> None:
    """Check a pack's pages and save them in a daemon.

    If the daemon already has pages of some model, it takes only packs of known models, unless --new-model is
    given. Run the command again to continue after an interruption.
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
        """Import the pack and those of further layer groups behind it."""
        done = []
        async with open_pack(_input(pack), trust) as reader:
            manifest = reader.manifest
            if not new_model:
                try:
                    require_identity(manifest, known)
                except PackError as error:
                    raise PackError(f"{error} (--new-model imports it anyway)") from None
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
        held = f", {each.held_pages:,} of them already were" if each.held_pages else ""
        show.line(f"all pages are in the store{held}: {_summary(each.manifest)}")


@app.command()
def keygen(
    name: Annotated[str, typer.Argument(help="Name of the key's owner", show_default=False)],
    directory: Annotated[Path, typer.Option("--dir", help="Directory for NAME.pem and NAME.pub")] = Path(),
) -> None:
    """Make a key pair to sign packs with.

    NAME.pem signs (pack export --sign). Importers need NAME.pub (pack import --signer).
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
    """Return the identities that a store may have pages of."""
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
    """Open a store for pages of ``identity``, without a page pool."""
    from tierstore.spec import KVSpec

    if directory is None:
        with connected_store(identity, url, keys, server_key) as store:
            yield store
        return
    with _opened(directory, KVSpec.parse(identity.layout), identity) as store:
        yield store


def _opened(directory: Path, spec: Any, identity: Identity) -> Store:
    """Open a directory that no process uses, with its present capacity."""
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


# -- output -----------------------------------------------------------------------------------------------


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
