"""Identification of LoRA adapters by the contents of their files.

SGLang puts an adapter's id at the end of a request's cache key. For an adapter that is given at the server's
start, the id is made from the adapter's name and path, so changed files at the same path would get the pages
of the old files. For an adapter that is loaded later, the id is random, so its pages would not be found after
a restart. So this module replaces the id in the key by a digest of all bytes of the adapter's files.

The digest is computed when SGLang loads the adapter. If the storage is attached to a running server, the
files of loaded adapters may have changed since they were loaded. So the keys of these adapters are valid for
this server process only.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.managers.schedule_batch import Req

from tierstore.errors import UsageError
from tierstore_connectors.common.contents import contents_of

_log = logging.getLogger("sglang.tierstore")


class Adapters:
    """The digests of the adapters that this process has loaded, by SGLang's id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: dict[str, str] = {}
        self._watching = False

    def watch(self, started_with: Iterable[Any], *, server: str) -> None:
        """Put the digests into the keys of requests from now on. Repeated calls are harmless.

        ``started_with`` are SGLang's references to adapters that it has just loaded. ``server`` identifies
        this server, and is part of the keys of adapters with unknown files.
        """
        for each in started_with:
            self._record(str(each.lora_id), str(each.lora_path), server)
        with self._lock:
            if self._watching:
                return
            self._watching = True
        LoRAManager.load_lora_weights = self._loading(LoRAManager.load_lora_weights)
        Req.__init__ = self._naming(Req.__init__, server)

    def _record(self, lora_id: str, path: str, server: str) -> None:
        with self._lock:
            if lora_id in self._digests:
                return
        found = digest_of_adapter(path) or _of_server(server, lora_id)
        with self._lock:
            self._digests[lora_id] = found

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``load`` to record the digest of files that are equal before and after loading."""

        @functools.wraps(load)
        def loading(manager: Any, lora_ref: Any) -> Any:
            before = digest_of_adapter(str(lora_ref.lora_path))
            result = load(manager, lora_ref)
            if before is not None and before == digest_of_adapter(str(lora_ref.lora_path)):
                with self._lock:
                    self._digests[str(lora_ref.lora_id)] = before
            return result

        return loading

    def _naming(self, make: Callable[..., None], server: str) -> Callable[..., None]:
        """Wrap ``make`` to replace the adapter's id at the end of a request's key by its digest."""

        @functools.wraps(make)
        def naming(request: Any, *arguments: Any, **options: Any) -> None:
            make(request, *arguments, **options)
            lora_id = request.lora_id
            if lora_id is not None and request.extra_key.endswith(lora_id):
                with self._lock:
                    found = self._digests.get(lora_id) or _of_server(server, lora_id)
                request.extra_key = request.extra_key.removesuffix(lora_id) + found

        return naming


ADAPTERS = Adapters()
"""The adapters of this process. SGLang's classes are patched once per process."""


def digest_of_adapter(path: str) -> str | None:
    """Return the digest of an adapter's files, in a folder or in a downloaded repository. If a file cannot
    be read, log a warning and return None."""
    folder = Path(path)
    try:
        if not folder.is_dir():
            folder = Path(snapshot_download(path, local_files_only=True))
        return contents_of(folder, log=_log)
    except (OSError, ValueError, UsageError) as error:
        _log.warning("tierstore: pages of the adapter %s are not found after a restart: %s", path, error)
        return None


def _of_server(server: str, lora_id: str) -> str:
    """Return a key part for an adapter with unknown files, which is valid for this server only."""
    return hashlib.sha256(f"{server} {lora_id}".encode()).hexdigest()[:32]
