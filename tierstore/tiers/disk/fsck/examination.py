"""Do the trees of an index agree with one another? Records have checksums, so they are believed; facts, links
and pieces are compared with what the records say. Pure: arrays in, findings and edits out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tierstore.keys import Identity
from tierstore.tiers.disk.ancestry import parent_rows, reachable
from tierstore.tiers.disk.fsck.findings import Category, Finding, Findings, PageName
from tierstore.tiers.disk.fsck.inventory import Inventory
from tierstore.tiers.disk.records import INLINE, PageUse
from tierstore.tiers.disk.trees import PIECE_BYTES

_LARGEST_COUNT = 1 << 62
_MOST_NAMED = 8  # odd keys are shown by their first bytes


class Examination:
    """What an inventory is worth. ``good`` says of each row whether its page may stay."""

    def __init__(self, inventory: Inventory, findings: Findings) -> None:
        self.inventory = inventory
        self.findings = findings
        self.good = np.ones(len(inventory.rows), np.bool_)
        self.stray: list[tuple[bytes, bytes]] = []  # (tree, key) of entries that have to go
        self.unlinked: set[int] = set()  # serials of pages whose link has to be made again
        self.unstated: set[int] = set()  # whose facts have to be
        self.index_damaged = False  # its file holds other bytes than were written
        rows = inventory.rows
        self._parents = parent_rows(rows)
        # A parent's serial is below its children's, so chains end. What says otherwise is no chain.
        self._parents[rows["parent"] >= rows["serial"]] = -1
        self._identities = {identity.digest: identity for identity in inventory.roots.values()}

    def compare(self) -> None:
        """Compare the trees, and find the pages that no lookup can reach."""
        self._odd_entries()
        self._roots_and_counters()
        for serial in self.inventory.damaged:
            self._add(
                Category.DAMAGED, "record", "its record in the index does not match its checksum", serial
            )
        self._compare_facts()
        self._compare_links()
        self._find_stray_pieces()
        self.index_damaged = self.findings.total() > 0

    def condemn(self, rows: npt.NDArray[np.intp], category: Category, what: str, why: str) -> None:
        """These pages cannot stay."""
        self.good[rows] = False
        for serial in self.inventory.rows["serial"][rows].tolist():
            self._add(category, what, why, serial)

    def drop_unreachable(self) -> None:
        """Pages whose parents cannot stay, or are not there, cannot stay either."""
        rows = self.inventory.rows
        roots = self.inventory.roots
        at_root = np.isin(rows["parent"], np.fromiter(roots, np.int64, len(roots)))
        expected = np.full(len(rows), -1, np.int64)  # the number of the identity of what is above
        numbers = {digest: number for number, digest in enumerate(self.inventory.digests)}
        held = self._parents >= 0
        expected[held] = rows["identity"][self._parents[held]]
        for row in np.flatnonzero(at_root & ~held).tolist():
            expected[row] = numbers.get(roots[int(rows["parent"][row])].digest, -1)
        connected = (held | at_root) & (expected == rows["identity"])
        kept = reachable(self._parents, self.good & connected)
        self.condemn(
            np.flatnonzero(self.good & ~kept),
            Category.ORPHANED,
            "page",
            "what comes before it in its prompt is gone, so no lookup reaches it",
        )

    def lost(self) -> list[int]:
        """The serials of the pages that cannot stay, damaged ones first."""
        serials: list[int] = self.inventory.rows["serial"][~self.good].tolist()
        return [*self.inventory.damaged, *serials]

    def use(self, serial: int, created_s: float) -> PageUse:
        """When a page was last used, if what is stored can be believed."""
        row = _find(self.inventory.facts["serial"], np.array([serial], np.uint64))[0]
        if row >= 0 and self._believable(self.inventory.facts[row : row + 1])[0]:
            facts = self.inventory.facts[row]
            return PageUse(int(facts["tick"]), float(facts["used_s"]), int(facts["hits"]))
        return PageUse(0, created_s, 0)

    # -- what the trees say ------------------------------------------------------------------------------

    def _odd_entries(self) -> None:
        for tree, key in self.inventory.odd:
            name = f"{tree.decode()}: {key[:_MOST_NAMED].hex()}…"
            self._stray(tree, key, "entry", "an entry of the index that no version of tierstore writes", name)
        for tree, count in self.inventory.misfiled.items():
            why = f"{count} entries of the index's tree {tree.decode()!r} are not where lookups look for them"
            self._add(Category.DAMAGED, "tree", why, name=tree.decode())

    def _roots_and_counters(self) -> None:
        inventory = self.inventory
        for serial in inventory.bad_roots:
            self.stray.append((b"roots", serial.to_bytes(8, "big")))
            why = "an identity that cannot be read, or that is there twice: nothing under it can be found"
            self._add(Category.DAMAGED, "identity", why, name=f"root {serial}")
        highest = max(int(inventory.rows["serial"].max(initial=0)), *inventory.roots, 0)
        if not highest < inventory.next_serial < _LARGEST_COUNT:
            why = f"the next serial is {inventory.next_serial}, but {highest} is taken"
            self._add(Category.DAMAGED, "counter", why, name="next_serial")
            inventory.next_serial = highest + 1
        if inventory.tick >= _LARGEST_COUNT:
            self._add(Category.DAMAGED, "counter", f"the clock stands at {inventory.tick}", name="tick")
            ticks = inventory.facts["tick"]
            inventory.tick = int(ticks[ticks < _LARGEST_COUNT].max(initial=0))

    def _compare_facts(self) -> None:
        rows, facts = self.inventory.rows, self.inventory.facts
        at = _find(facts["serial"], rows["serial"].astype(np.uint64))
        missing = at < 0
        wrong = np.zeros(len(rows), np.bool_)
        if len(facts):
            held = facts[np.where(missing, 0, at)]
            for name in ("parent", "place", "nbytes"):
                wrong |= held[name].astype(np.int64) != rows[name]
            wrong |= ~self._believable(held)
        for serial in rows["serial"][missing].tolist():
            self._add(Category.DAMAGED, "facts", "its facts are missing from the index", serial)
        for serial in rows["serial"][wrong & ~missing].tolist():
            self._add(Category.DAMAGED, "facts", "its facts in the index contradict its record", serial)
        self.unstated.update(rows["serial"][missing | wrong].tolist())
        known = _find(rows["serial"].astype(np.uint64), facts["serial"]) >= 0
        for serial in facts["serial"][~known].tolist():
            if serial not in self.inventory.damaged:
                key = serial.to_bytes(8, "big")
                self._stray(b"facts", key, "facts", "facts of a page that is not there", f"serial {serial}")

    def _believable(self, facts: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        result: npt.NDArray[np.bool_] = (
            np.isfinite(facts["used_s"])
            & (facts["tick"] <= self.inventory.tick)
            & (facts["hits"] < _LARGEST_COUNT)
        )
        return result

    def _compare_links(self) -> None:
        rows, links = self.inventory.rows, self.inventory.links
        at = _find(rows["serial"].astype(np.uint64), links["serial"])
        right = at >= 0
        if len(rows):
            right &= (_words(links) == _words(rows["link"][np.where(at < 0, 0, at)])).all(axis=1)
        linked = np.zeros(len(rows), np.bool_)
        linked[at[right]] = True
        for serial in rows["serial"][~linked].tolist():
            self._add(Category.DAMAGED, "link", "no lookup finds it: its link in the index is gone", serial)
        self.unlinked.update(rows["serial"][~linked].tolist())
        for number in np.flatnonzero(~right).tolist():
            serial = int(links["serial"][number])
            key = links[number].tobytes()
            if serial in self.unlinked or serial in self.inventory.damaged:
                self.stray.append((b"children", key))  # what is left of that page's own
            else:
                why = "a link that leads to no page, or to another one than it names"
                self._stray(b"children", key, "link", why, f"to {serial}")

    def _find_stray_pieces(self) -> None:
        rows, pieces = self.inventory.rows, self.inventory.pieces
        inline = rows[rows["place"] == INLINE]
        at = _find(inline["serial"].astype(np.uint64), pieces["serial"])
        expected = -(-inline["nbytes"] // PIECE_BYTES)
        stray = at < 0
        if len(inline):
            stray |= pieces["piece"] >= expected[np.where(at < 0, 0, at)]
        by_serial: dict[int, list[bytes]] = {}
        for number in np.flatnonzero(stray).tolist():
            by_serial.setdefault(int(pieces["serial"][number]), []).append(pieces[number].tobytes())
        for serial, keys in by_serial.items():
            if serial in self.inventory.damaged:
                continue
            self.stray += [(b"payload", key) for key in keys]
            why = f"{len(keys)} pieces of a payload that belong to no page"
            self._add(Category.UNACCOUNTED, "pieces", why, name=f"serial {serial}")

    # -- names ---------------------------------------------------------------------------------------------

    def names(self) -> dict[int, PageName]:
        """The pages that the kept findings are about."""
        wanted = {finding.serial for finding in self.findings.kept if finding.serial is not None}
        if not wanted:
            return {}
        return {name.serial: name for name in self._names(wanted)}

    def _names(self, wanted: set[int]) -> Iterator[PageName]:
        rows = self.inventory.rows
        starts = self._starts()
        serials = rows["serial"].astype(np.uint64)
        for serial in sorted(wanted):
            row = int(_find(serials, np.array([serial], np.uint64))[0])
            if row >= 0:
                identity = self._identity(row)
                yield _name(serial, identity, int(starts[row]), int(rows["tokens"][row]))
                continue
            # A damaged record: its facts may still say where it belongs.
            tokens = self.inventory.damaged.get(serial, 0)
            facts = int(_find(self.inventory.facts["serial"], np.array([serial], np.uint64))[0])
            above = self.inventory.facts["parent"][facts : facts + 1].astype(np.uint64)
            parent = int(_find(serials, above)[0]) if facts >= 0 else -1
            if parent >= 0:
                start = int(starts[parent]) + int(rows["tokens"][parent]) if starts[parent] >= 0 else -1
                yield _name(serial, self._identity(parent), start, tokens)
            else:
                root = self.inventory.roots.get(int(above[0])) if facts >= 0 else None
                yield _name(serial, root, 0 if root is not None else -1, tokens)

    def _identity(self, row: int) -> Identity | None:
        return self._identities.get(self.inventory.digests[int(self.inventory.rows["identity"][row])])

    def _starts(self) -> npt.NDArray[np.int64]:
        """At which token of its prompt each row's page begins; -1 where its chain has no beginning."""
        rows = self.inventory.rows
        rooted = np.isin(
            rows["parent"], np.array([*self.inventory.roots, *self.inventory.bad_roots], np.int64)
        )
        whole = reachable(self._parents, rooted | (self._parents >= 0))
        jump = self._parents.copy()
        start = np.where(jump >= 0, rows["tokens"][jump], 0).astype(np.int64) if len(rows) else jump
        while (jumping := np.flatnonzero(jump >= 0)).size:
            start[jumping] += start[jump[jumping]]
            jump[jumping] = jump[jump[jumping]]
        start[~whole] = -1
        return start

    def _add(
        self, category: Category, what: str, why: str, serial: int | None = None, *, name: str = ""
    ) -> None:
        self.findings.add(Finding(category, what, why, serial, name))

    def _stray(self, tree: bytes, key: bytes, what: str, why: str, name: str) -> None:
        self.stray.append((tree, key))
        self._add(Category.UNACCOUNTED, what, why, name=name)


def _find(haystack: npt.NDArray[np.uint64], needles: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """For each needle its position in a sorted array, or -1."""
    if not len(haystack):
        return np.full(len(needles), -1, np.intp)
    haystack = haystack.astype(np.uint64)
    needles = needles.astype(np.uint64)
    at = np.searchsorted(haystack, needles)
    at[at == len(haystack)] = 0
    at[haystack[at] != needles] = -1
    return at


def _words(links: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(links).view(np.uint64).reshape(len(links), -1)


def _name(serial: int, identity: Identity | None, start: int, tokens: int) -> PageName:
    model = identity.model if identity is not None else "an identity that is not in the index"
    tenant = identity.tenant if identity is not None else ""
    known = start >= 0
    return PageName(serial, model, tenant, start if known else None, start + tokens if known else None)
