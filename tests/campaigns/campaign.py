"""The campaign: every fault there is, as trials that can be run one by one.

A *trial* does one thing to one store, in a directory of its own, opens what is left, and returns the
verdict. The tests run all trials of the short scenes; ``tierstore-bench faults`` runs as many as it is told.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.damage import DAMAGES, Damage, damages
from tests.campaigns.disk import CRASHES, Crash, Disk, crashes, write_image
from tests.campaigns.disturbance import (
    DISTURBANCES,
    Moment,
    disturb,
    effects_on,
    moments_of,
    short_scene,
    stall,
)
from tests.campaigns.prompts import Life, Save, inline_life, odd_life
from tests.campaigns.recording import Recording, record
from tests.campaigns.scripts import HARDLY_SMALLER_INDEX, SCENES, SMALLER_INDEX, Scene
from tests.campaigns.verdict import Verdict, judge
from tierstore.testing.faulty_io import Effect
from tierstore.tiers.disk import FileIO
from tierstore.units import MIB

STALL = "stalled disk"
FAULTS = (*CRASHES, *DAMAGES, *DISTURBANCES, STALL)

_STALLED = ("pwritev", "sync", "preadv")
_WRITE_ON_EVERY = 4  # one trial in so many also saves new pages into what is left
_TAIL_BYTES = 1 * MIB  # that a damage may add to a file


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of one fault. ``run`` takes a directory that does not exist yet; ``describe`` says what it does
    to whoever has to find out why it failed."""

    fault: str
    describe: Callable[[], str]
    run: Callable[[Path], Verdict]


def run_trials(trials: Iterable[Trial], directory: Path) -> Iterator[tuple[Trial, Verdict]]:
    """Run trials one after the other under ``directory``, which is as before when they are done."""
    for trial in trials:
        with tempfile.TemporaryDirectory(dir=directory, prefix="faults-", ignore_cleanup_errors=True) as own:
            yield trial, trial.run(Path(own) / "store")


def crash_trials(
    scene: Scene, directory: Path, *, seed: int = 0, over: Callable[[FileIO], FileIO] = lambda io: io
) -> list[Trial]:
    """A trial for every crash that ``scene`` can have. Plays it once, under ``directory``; for ``over`` see
    :func:`~tests.campaigns.recording.record`."""
    recording = _recorded(scene, directory, over)

    def trial(crash: Crash, number: int) -> Trial:
        return Trial(
            crash.fault,
            lambda: f"{scene.name}: {crash.describe(recording.events)}",
            lambda path: _crash(path, recording, crash, write_on=number % _WRITE_ON_EVERY == 0),
        )

    every = crashes(recording.events, seed=seed, tear_step=scene.tear_step)
    trials = [trial(crash, number) for number, crash in enumerate(every)]
    return [_recording_trial(scene, recording), *trials]


def damage_trials(life: Life, directory: Path, *, seed: int = 0) -> list[Trial]:
    """A trial for every damage to every page of a small store."""
    steps = (Save(0, 64), Save(1, 64), Save(2, 48), Save(4, 64), Save(6, 32))
    recording = _recorded(Scene("damaged", [life], steps), directory, lambda io: io)
    image = Disk(recording.events).image()

    def trial(damage: Damage) -> Trial:
        return Trial(damage.fault, lambda: damage.label, lambda path: _damage(path, recording, damage))

    return [trial(damage) for damage in damages(image, [life], recording.marks[-1].held, seed=seed)]


def disturbance_trials(
    life: Life, directory: Path, *, lasting: Sequence[bool] = (False, True)
) -> list[Trial]:
    """A trial for every fault of every system call, once and ``lasting``."""
    scene = short_scene(life)
    with tempfile.TemporaryDirectory(dir=directory, prefix="faults-") as own:
        moments = moments_of(Path(own) / "store", scene)

    def trial(name: str, effect: Effect, moment: Moment, on: bool) -> Trial:
        return Trial(
            name,
            lambda: f"{effect} on {moment}{' and after' if on else ''}",
            lambda path: disturb(path, scene, effect, moment, lasting=on),
        )

    return [
        trial(name, effect, moment, on)
        for moment in moments
        for name, effect in effects_on(moment.kind)
        for on in lasting
    ]


def stall_trials(life: Life) -> list[Trial]:
    """A trial for every kind of call that can hang."""

    def trial(kind: str) -> Trial:
        return Trial(STALL, lambda: f"{kind} hangs", lambda path: stall(path, life, kind))

    return [trial(kind) for kind in _STALLED]


def trials_of(faults: Sequence[str], directory: Path, *, seed: int = 0) -> list[Trial]:
    """The trials of the short scenes, of the given faults."""
    trials: list[Trial] = []
    extents = SCENES[0].lives[0]
    if set(faults) & set(CRASHES):
        for scene in (*SCENES, SMALLER_INDEX, HARDLY_SMALLER_INDEX):
            trials += crash_trials(scene, directory, seed=seed)
    if set(faults) & set(DAMAGES):
        for life in (extents, inline_life(), odd_life()):
            trials += damage_trials(life, directory, seed=seed)
    if set(faults) & set(DISTURBANCES):
        for life in (extents, odd_life()):
            trials += disturbance_trials(life, directory)
    if STALL in faults:
        trials += stall_trials(extents)
    return [trial for trial in trials if trial.fault in faults]


def _recorded(scene: Scene, directory: Path, over: Callable[[FileIO], FileIO]) -> Recording:
    path = Path(tempfile.mkdtemp(dir=directory, prefix="faults-"))
    try:
        return record(path / "store", scene.lives, scene.steps, over=over)
    finally:
        shutil.rmtree(path)


def _recording_trial(scene: Scene, recording: Recording) -> Trial:
    """The scene itself, without a crash: what it served, and whether the directory ever took too much."""
    verdict = Verdict(
        wrong_pages=recording.wrong_pages,
        over_capacity=recording.over_capacity(),
        problems=recording.problems,
    )
    return Trial("crash", lambda: f"{scene.name}: while it is recorded", lambda path: verdict)


def _crash(path: Path, recording: Recording, crash: Crash, *, write_on: bool) -> Verdict:
    at = crash.position
    write_image(crash.image(recording.events), path)
    recording.write_keys(path.parent)
    return judge(
        path,
        recording.lives_at(at),
        recording.prompts,
        recording.must_have(at),
        write_on=write_on,
        capacity_bytes=recording.capacity_at(at),
    )


def _damage(path: Path, recording: Recording, damage: Damage) -> Verdict:
    write_image(damage.image, path)
    recording.write_keys(path.parent)
    capacity = recording.lives[0].disk_bytes + _TAIL_BYTES
    return judge(
        path,
        recording.lives,
        recording.prompts,
        damage.must_have,
        undamaged=False,
        write_on=False,
        capacity_bytes=capacity,
    )
