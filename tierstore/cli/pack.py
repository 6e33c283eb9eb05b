"""``tierstore pack``: export pages to a file, and verify and import the file on another machine."""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tierstore.cli import show
from tierstore.cli.operator import ConnectOptions
from tierstore.cli.prompts import (
    ModelChoice,
    connected_store,
    known_identities,
    open_model,
    read_tokens,
)
from tierstore.command_line import with_options
from tierstore.errors import UsageError
from tierstore.units import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore import Store
    from tierstore.keys import Identity
    from tierstore.packs import Manifest
    from tierstore.spec import KVSpec

HashName = Literal["sha256", "blake3"]
_HOST_BYTES = 256 * MIB  # size of the host tier with which a directory is opened

app = typer.Typer(help="Carry pages to another machine in a verified file.", no_args_is_help=True)

Out = Annotated[
    Path, typer.Argument(metavar="OUT.tskv", help="Pack file to write; - is stdout", allow_dash=True)
]
Pack = Annotated[
    Path, typer.Argument(metavar="PACK.tskv", help="Pack file to read; - is stdin", allow_dash=True)
]
SignerKey = Annotated[
    Path | None,
    typer.Option(
        "--signer", metavar="FILE", help="Accept only a pack signed with this .pub key", show_default=False
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="FILE|command:CMD",
        help="Key of an encrypted pack, as `tierstore disk-key new` makes one: a file, or the output of CMD",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON document")]


@dataclass(frozen=True, kw_only=True)
class StoreOptions(ConnectOptions):
    """The store whose pages are exported or imported: a daemon's store, or a directory."""

    store: Annotated[
        Path | None,
        typer.Option(
            "--store", metavar="DIR", help="Directory of a store that no process uses, instead of a daemon"
        ),
    ] = None

    disk_key: Annotated[
        str, typer.Option("--disk-key", metavar="FILE|command:CMD", help="Key of --store, if it is encrypted")
    ] = ""
    disk_keyring: Annotated[
        Path | None,
        typer.Option("--disk-keyring", metavar="FILE", help="Keyring (default: the FILE.ring of --disk-key)"),
    ] = None

    def __post_init__(self) -> None:
        if self.store is not None and self.connect is not None:
            raise UsageError("give --store or --connect, not both")
        if self.store is None and (self.disk_key or self.disk_keyring is not None):
            raise UsageError("--disk-key and --disk-keyring open the directory of --store: give it, too")

    def known(self) -> list[Identity]:
        """Return the identities that the store may have pages of."""
        if self.store is None:
            with self.operator() as operator:
                return known_identities(operator)
        from tierstore.tiers.disk.listing import list_store

        return [holding.identity for holding in list_store(self.store).holdings]

    @contextmanager
    def opened(self, identity: Identity) -> Iterator[Store]:
        """Open the store for pages of ``identity``, without an HBM pool."""
        from tierstore.spec import KVSpec

        if self.store is None:
            with connected_store(identity, self) as store:
                yield store
            return
        with self._opened(self.store, KVSpec.parse(identity.layout), identity) as store:
            yield store

    def _opened(self, directory: Path, spec: KVSpec, identity: Identity) -> Store:
        """Open a directory that no process uses, without changing its capacity."""
        import tierstore
        from tierstore.tiers.disk.listing import list_store

        capacity = list_store(directory).capacity_bytes if directory.exists() else None
        return tierstore.open(
            directory,
            spec,
            identity=identity,
            host_bytes=max(_HOST_BYTES, 8 * spec.page_bytes),
            disk_bytes=capacity or tierstore.DEFAULT_DISK_BYTES,
            disk_key=self.disk_key,
            disk_keyring=self.disk_keyring,
        )


@app.command()
@with_options
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
    which: ModelChoice,
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
    key: Key = None,
    *,
    where: StoreOptions,
) -> None:
    """Write the stored pages of some prompts to a file.

    The pack has whole chunks with their tokens, identity and checksums. A prefix that several prompts share
    is written once. With --key, only holders of the key can read the pack.
    """
    from tierstore.packs import PageHash, Signer, export_pack

    tokens = [read_tokens(file) for file in prompt_file]
    signer = Signer() if sign is None else Signer.read(sign)
    secret = _read_key(key)
    groups = which.of(where.known())
    with open_model(groups, tokens, where.opened) as (opened, prompts), show.meter("exporting") as meter:
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
                key=secret,
            )
        )
    resumed = f", {made.resumed_pages:,} of them from an earlier run" if made.resumed_pages else ""
    packed = f"{made.held_tokens:,} of {made.asked_tokens:,} tokens are packed"
    behind = len(made.manifests) - 1
    more = f", and {behind} packs of further layer groups after it" if behind else ""
    _say(f"{packed}: {_summary(made.manifest)}{resumed}{more}", to_stderr=path is None)


@app.command()
def verify(pack: Pack, signer: SignerKey = None, key: Key = None, as_json: Json = False) -> None:
    """Check every byte of a pack, and its signature."""
    from tierstore.packs import Trust, open_pack, verify_pack

    trust = Trust() if signer is None else Trust.read(signer)
    secret = _read_key(key)

    async def run() -> Manifest:
        async with open_pack(_input(pack), trust, secret) as reader:
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
@with_options
def import_(
    pack: Pack,
    signer: SignerKey = None,
    new_model: Annotated[
        bool, typer.Option("--new-model", help="Also import pages of a model that the daemon does not know")
    ] = False,
    key: Key = None,
    *,
    where: StoreOptions,
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

    trust = Trust() if signer is None else Trust.read(signer)
    secret = _read_key(key)
    known = [] if where.store is not None and not where.store.exists() else where.known()

    async def run() -> list[Imported]:
        """Import the pack, and the packs of further layer groups that follow it in the same file."""
        done = []
        async with open_pack(_input(pack), trust, secret) as reader:
            manifest = reader.manifest
            if not new_model:
                try:
                    require_identity(manifest, known)
                except PackError as error:
                    raise PackError(f"{error} (--new-model imports it anyway)") from None
            meter.expect(manifest.pages, manifest.pages * manifest.page_bytes)
            part: PackReader | None = reader
            while part is not None:
                with where.opened(part.manifest.identity) as opened:
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


def _read_key(source: str | None) -> bytes | None:
    from tierstore.tiers.disk.keyring import read_master_key

    return None if source is None else read_master_key(source)


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
