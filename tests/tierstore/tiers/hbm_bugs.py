"""Mistakes in the order of copies, each planted alone into the pool's text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.engine.device import SCHEDULES
from tierstore.tiers import device_pool, device_region, mapped
from tierstore.tiers.device import DeviceError
from tierstore.tiers.device_pool import DevicePool
from tierstore.tiers.device_region import DeviceRegion

_MODULES = (mapped, device_region, device_pool)  # each uses what the ones before it define
_TOLD = ("MappedMemory", "DeviceRegion", "Filling")


@dataclass(frozen=True)
class Planted:
    """The classes with a mistake in them."""

    pool: type[DevicePool]
    region: type[DeviceRegion]


SOUND = Planted(DevicePool, DeviceRegion)


@dataclass(frozen=True)
class Bug:
    """``old`` is in the modules' text once, and is replaced by ``new``."""

    name: str
    old: str
    new: str

    def plant(self) -> Planted:
        return _planted(self)


def caught(bug: Bug, scenes: Iterable[Callable[[Any], None]], bench: Callable[..., Any]) -> bool:
    """Whether one of the scenes fails with the mistake, under a schedule. ``bench(seed, planted=…)`` is what
    they are played on."""
    planted = bug.plant()
    for scene in scenes:
        for seed in SCHEDULES:
            try:
                scene(bench(seed, planted=planted))
            except (AssertionError, DeviceError):
                return True
    return False


@cache
def _planted(bug: Bug) -> Planted:
    texts = [inspect.getsource(module) for module in _MODULES]
    found = sum(text.count(bug.old) for text in texts)
    assert found == 1, f"{bug.name}: its text is there {found} times"
    told: dict[str, Any] = {}
    for module, text in zip(_MODULES, texts, strict=True):
        # What is imported comes from the sound module, and is replaced before anything is called.
        names: dict[str, Any] = {"__name__": module.__name__}
        exec(compile(text.replace(bug.old, bug.new), module.__file__, "exec"), names)
        names |= told
        told |= {name: names[name] for name in _TOLD if name in names}
    return Planted(names["DevicePool"], names["DeviceRegion"])


_AFTER = "        device.wait(stream, after if after is not None else self.computed())  # rule 1\n"
_DOWN_AFTER_LOAD = "            device.wait(stream, filling.last)  # rule 4"
_READ_DONE = "        device.synchronize(device.record(stream))  # rule 2"
_COPY_DOWN = (
    "        self._copy(stream, [address for _, address in pairs], self._addresses(pages), "
    "SourceOrder.STREAM)\n"
)
_LAYER_EVENT = """\
            self._copy(up, to + start, of + start, SourceOrder.ANY, layer.stop - layer.start)
            yield self.runtime.record(up)"""
_LAYER_EARLY = """            event = self.runtime.record(up)
            self._copy(up, to + start, of + start, SourceOrder.ANY, layer.stop - layer.start)
            yield event"""

BUGS = (
    Bug("save does not wait for what computes", _AFTER, ""),
    Bug("save is called done when its copy is queued", _READ_DONE, "        device.record(stream)"),
    Bug(
        "save's end is recorded before its copy",
        _COPY_DOWN + _READ_DONE,
        "        event = device.record(stream)\n" + _COPY_DOWN + "        device.synchronize(event)",
    ),
    Bug("save may read ahead of its stream", "self._addresses(pages), SourceOrder.STREAM)",
        "self._addresses(pages), SourceOrder.ANY)"),
    Bug("save does not wait for a load of the page", _DOWN_AFTER_LOAD, "            pass"),
    Bug("copy within the pool does not wait for what computes",
        "        self.runtime.wait(self._across, computed)  # rule 1\n", ""),
    Bug("copy within the pool does not wait for a load of its source",
        "            self.runtime.wait(self._across, filling.last)  # rule 4", "            pass"),
    Bug("copy within the pool may read ahead of its stream",
        "self._addresses(sources), SourceOrder.STREAM)", "self._addresses(sources), SourceOrder.ANY)"),
    Bug("layers are not waited for",
        "                self._device.wait(self._compute, filling.event(place))", "                pass"),
    Bug("a layer's event is the one before it",
        "return self._events[min(layer, len(self._events) - 1)]", "return self._events[max(layer - 1, 0)]"),
    Bug("a layer's event is recorded before its copy", _LAYER_EVENT, _LAYER_EARLY),
    Bug("layers go up in another order than their events say", "for layer in self._layers:",
        "for layer in self._layers[1:] + self._layers[:1]:"),
    Bug("a load waits for its first layer only", "        self._device.synchronize(self.last)",
        "        self._device.synchronize(self._events[0])"),
    Bug("a page that is given back is not marked",
        "            self._region.leave(self._large_of(pages), under_way)  # rules 5 and 6",
        "            pass"),
    Bug("a load does not wait for the page's former owner",
        "            self.runtime.wait(stream, event)  # rule 5", "            pass"),
    Bug("a copy into a page does not wait for another one",
        "            self.runtime.wait(stream, filling.last)\n", "            pass\n"),
    Bug("a page is given out while a copy into it is under way",
        "            self.runtime.wait(self.compute, filling.last)  # rule 6", "            pass"),
    Bug("loads are forgotten when they begin",
        "            self._filling.update((page, filling) for page in pages)\n", "            pass\n"),
    Bug("a load waits for nobody",
        "self._await_former(upload.stream, pages)", "pass"),
    Bug("streams go with the pool while its pages are computed with",
        "        weakref.finalize(array, _keep, self).atexit = False\n", ""),
    Bug("streams are never given back", "        device.release(stream)\n", "        pass\n"),
    Bug("a stream is forgotten", "for stream in streams:", "for stream in streams[1:]:"),
)  # fmt: skip
