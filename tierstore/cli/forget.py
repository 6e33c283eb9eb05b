"""``tierstore forget``: erase a tenant, a model or a session from a daemon."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tierstore.cli import show
from tierstore.cli.operator import ConnectOptions
from tierstore.command_line import with_options
from tierstore.types import Forgettable

if TYPE_CHECKING:
    from tierstore.packs.signing import Signer
    from tierstore.types import ForgetReceipt

_PATIENCE_S = 60.0


@with_options
def command(
    tenant: Annotated[
        str | None,
        typer.Option(
            "--tenant",
            metavar="NAME",
            help="Forget this tenant: the name of a client's key, or the tenant of an identity",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Forget this model, of --tenant or of all tenants",
            show_default=False,
        ),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            "--session",
            metavar="NAME",
            help="Forget the pages that only this session (of --tenant) has used; "
            "with --session-keys, the pages that it was the first to save",
            show_default=False,
        ),
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(
            "--sign",
            metavar="FILE",
            help="Print a receipt, signed with this .pem key of `tierstore pack keygen`",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write the receipt as one JSON document")] = False,
    *,
    where: ConnectOptions,
) -> None:
    """Erase a tenant, a model or a session, in memory and on disk.

    When this returns, no lookup finds the pages. With --disk-key, the keys of a tenant or model (with
    --session-keys, of a session) are gone, and neither the disk nor a copy of the directory can be read.
    Without --disk-key, the pages are overwritten in the background. Connected engines drop the pages from
    their HBM. docs/encryption.md says what a forget cannot erase."""
    from tierstore.packs.signing import Signer
    from tierstore.wire import messages

    what = Forgettable(tenant, model, session)
    signer = Signer.read(sign) if sign is not None else Signer()
    with where.operator() as operator:
        forget = messages.Forget(0, what.tenant, what.model, what.session)
        receipt = operator.ask(forget, messages.Forgotten, wait_s=_PATIENCE_S).receipt
        elsewhere = operator.cluster
    if json or sign is not None:
        show.write_json(to_json(receipt, signer))
    else:
        show.line(_summary(receipt))
    if elsewhere and receipt.shared_keys is None:
        note = "pages on other hosts or in a bucket are not forgotten, and a lookup may fetch them again"
        typer.echo(f"tierstore forget: {note}", err=True)


def to_json(receipt: ForgetReceipt, signer: Signer) -> dict[str, object]:
    """Return the document of ``--json``. ``signature`` is an Ed25519 signature of the SHA-256 of
    ``receipt`` as JSON with sorted keys and without spaces; empty if the signer has no key."""
    document = asdict(receipt)
    digest = receipt_digest(document)
    signature = signer.sign(digest).hex() if signer.key is not None else ""
    return {"receipt": document, "signer": signer.public.hex() if signature else "", "signature": signature}


def receipt_digest(document: dict[str, object]) -> bytes:
    """Return the SHA-256 of a receipt, which is signed."""
    from hashlib import sha256

    return sha256(msgspec.json.encode(dict(sorted(document.items())))).digest()


def _summary(receipt: ForgetReceipt) -> str:
    parts = {"tenant": receipt.tenant, "model": receipt.model, "session": receipt.session}
    what = ", ".join(f"{name} {value!r}" for name, value in parts.items() if value is not None)
    keys = _counted(receipt.keys, "key", "keys")
    disk = f"{keys} dropped" if receipt.encrypted else "the disk is not encrypted"
    if receipt.shared_keys is not None:
        disk += f", {_counted(receipt.shared_keys, 'key', 'keys')} in the shared store"
    return (
        f"forgot {what} in {receipt.took_s:.2f} s: {_counted(receipt.identities, 'identity', 'identities')}, "
        f"{_counted(receipt.host_pages, 'page', 'pages')} in host memory, {disk}"
    )


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
