"""KV packs: pages in a file that can be carried to another machine and verified there.

A pack has the pages of some prompts, their tokens, the identity under which they were computed, checksums and
an optional Ed25519 signature.

**What a pack guarantees.** A page that comes out of a pack is the page that went in, for the same tokens and
the same identity. Otherwise it is rejected. XXH3 finds accidental damage, as everywhere in tierstore, but
does not stop an attacker. Therefore each page also has a BLAKE3 or SHA-256 hash (``hashing.py``), and a chain
of SHA-256 covers head, index and all tables of checksums. Each hash of the chain is signed, not only the last
one. A reader can therefore verify each block (16 MiB of pages) when it arrives, and needs memory for a few
blocks only.

**What it does not guarantee.** A signature says who made the pack, not that a model computed its pages.
Without a key to compare with (:class:`Trust`), a signature only proves that the pack is complete.

**Tenants and models.** A pack has the identity that its maker used, with the maker's name for the tenant. A
daemon nests it under the tenant of the client that imports over ``tcp://``, so a pack never touches another
tenant's pages. If a pack's model differs from the store's, it is rejected before a page is read.

**Whole chunks and chains.** A pack has the leading whole chunks of a prompt that were held. An incomplete
last chunk is left out, because the rest of its page may belong to another prompt. Opaque pages are packed
with the keys of their engine.

**Layer groups.** Each layer group of a model has its own pack, with its own identity. The packs of a model
follow one another in one file, by one signer, and the first lists those that follow. Pages of windows and
states are named, as in the store.

::

    export   Store.lookup ─▶ load_to ─▶ a buffer ─▶ BLAKE3, XXH3 ─▶ seal ─▶ aiofiles
    import   aiofiles ─▶ a buffer ─▶ seal, BLAKE3, XXH3 compared ─▶ Store.save (reserve, copy, commit)

``format.py`` defines the bytes, also for other implementations.

Rejected alternatives:

* safetensors and tar files have an index of names, but no seals;
* with a single signature at the end, no page could be verified before the whole pack has arrived;
* packs have raw bytes; the codecs of tiers compress.
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
