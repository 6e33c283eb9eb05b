"""KV packs: pages as a file that can be carried to another machine, and checked there.

A pack has the pages of some prompts, their tokens, the identity they were computed under, checksums and,
where somebody signs it, an Ed25519 signature. It warms a fleet with a system prompt, goes along with a bug
report, or moves a cache to another host.

**What a pack promises.** A page that comes out of it is the page that went in, for those tokens and that
identity, or it does not come out. XXH3 finds accidents, as everywhere in tierstore; it stops nobody who means
it, so each page has a BLAKE3 or a SHA-256 (``hashing.py``), and one chain of SHA-256 goes over head, index
and all tables of checksums.
Its links are signed, not only its end: a reader believes each block (16 MiB of pages) when it has come, and
needs neither the whole pack nor memory for it. That is what makes packs streamable and resumable.

**What it does not promise.** A signature says who packed it, not that a model computed it. Without a key of
yours to compare with (:class:`Trust`), a signature only says that the pack is whole.

**Whose pages.** The identity in a pack is the one its maker used, with the tenant as the maker names it. A
daemon nests it under the tenant of whoever imports over ``tcp://``, so a pack never reaches into another
tenant's pages. A pack of another model than the store's is refused before a page is read.

**Whole chunks, chains.** Of a prompt, a pack has the leading whole chunks that were held. An incomplete last
chunk is left out (what lies behind its tokens in a page may be another prompt's). Opaque pages travel with
the keys that their engine gave them.

**Layer groups.** Of a model of several, each has a pack with an identity of its own; they lie one behind the
other in one file, by one signer, and the first says which follow. Pages of windows and states are named
there, as in the store.

::

    export   Store.lookup ─▶ load_to ─▶ a buffer ─▶ BLAKE3, XXH3 ─▶ seal ─▶ aiofiles
    import   aiofiles ─▶ a buffer ─▶ seal, BLAKE3, XXH3 compared ─▶ Store.save (reserve, copy, commit)

``format.py`` says what the bytes are, ``docs/packs.md`` says it for others. Rejected: safetensors or a tar
file (an index of names and no seals), a signature at the end only (nothing could be believed before all of it
had come), compression (a matter of the codecs of tiers; packs carry raw bytes).
"""

from tierstore.packs.format import Manifest, PackError
from tierstore.packs.hashing import PageHash
from tierstore.packs.importing import Imported, import_pack, import_part, require_identity
from tierstore.packs.reading import Block, PackReader, open_pack, verify_pack
from tierstore.packs.signing import Signer, Trust
from tierstore.packs.writing import Exported, export_pack

__all__ = [
    "Block",
    "Exported",
    "Imported",
    "Manifest",
    "PackError",
    "PackReader",
    "PageHash",
    "Signer",
    "Trust",
    "export_pack",
    "import_pack",
    "import_part",
    "open_pack",
    "require_identity",
    "verify_pack",
]
