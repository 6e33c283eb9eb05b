"""KV blocks in a device's memory: the right bytes whenever the device does what it was asked for."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest

from tests.connectors.vllm.conftest import BLOCK, Request, step
from tests.connectors.vllm.test_halves import OTHER, TABLE, TOKENS, equal_blocks, load
from tests.engine.device import ONE_OF_EACH, SCHEDULES, FakeDevice, missing
from tests.engine.kernels.executor import SCHEDULES as KERNEL_SCHEDULES
from tests.engine.kernels.executor import ExecutionError, guarded
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore.testing.clock import wait_until
from tierstore.tiers.device import DeviceError
from tierstore.tiers.pinned import Reach
from tierstore_connectors.common.shared_pages import PagePart, PartSource
from tierstore_connectors.vllm.layout import TensorShape, page_layout
from tierstore_engine.errors import KernelError
from tierstore_engine.kernels.catalog import ARCHITECTURES, Instance
from tierstore_engine.kernels.nvrtc import Nvrtc
from tierstore_engine.kernels.toolkit import find_toolkit

torch = pytest.importorskip("torch")
cuda = pytest.importorskip("tierstore_connectors.vllm.cuda")
pieces = pytest.importorskip("tierstore_connectors.vllm.pieces")
from tierstore_connectors.vllm.sharing import engine_blocks, host_blocks  # noqa: E402  # needs torch

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no device to test with: {missing()}")


class DeviceMemory:
    """KV memory on a device; what computes there is put on a stream of its own."""

    def __init__(self, device):
        self.device = device
        self.stream = device.stream()
        self.reach = Reach(device)
        self.addresses = []
        self.launch = None

    def array(self, shape):
        nbytes = int(np.prod(shape)) * 4
        self.addresses.append(self.device.allocate(nbytes))
        array = self.device.view(self.addresses[-1], (nbytes,)).view(np.float32).reshape(shape)
        array[:] = 0
        return array

    def blocks(self, layout, array):
        return cuda.make_blocks(
            layout,
            [torch.from_numpy(array)],
            self.reach,
            computing=lambda: self.stream,
            on_stream=self.device.launch,
            launch=self.launch,
        )

    def compute(self, work):
        self.device.launch(self.stream, work)

    def finish(self):
        self.device.finish(self.stream)


@pytest.fixture(params=["straight", "collected", "by kernel"])
def way(request, monkeypatch):
    """The ways to copy, whatever the size of the pieces."""
    monkeypatch.setattr(cuda, "LEAST_PIECE", 0 if request.param == "straight" else 1 << 30)
    return request.param


def launcher(seed, folder=pieces.SOURCE.parent):
    """The kernel on a processor."""
    return ExecutorLauncher(seed, folder=folder).load(
        Instance(pieces.SOURCE.name, pieces.KERNEL, pieces.THREADS)
    )


@pytest.fixture
def on_device(engine, way):
    """``on_device(seed)``: engines with their memory on a device of that schedule, and the truth told to its
    driver."""
    engines, devices = [], []

    def make(seed=1, device=None, *, ready=True, **options):
        devices.append(device or FakeDevice(seed))
        memory = DeviceMemory(devices[-1])
        memory.launch = launcher(seed % 4) if way == "by kernel" else None
        engines.append(engine(on=memory, **options))
        if ready:
            for store in engines[-1].worker._stores._stores.values():
                store.wait_ready()
        return engines[-1]

    yield make
    for each in engines:
        each.close()
        each.on.finish()
    for device in devices:
        wait_until(lambda device=device: device.registered == 0)
        assert device.strays == 0


@pytest.mark.parametrize("seed", ONE_OF_EACH)
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "CPU_ATTN(vec)"])
def test_shared_pages_are_those_of_a_processor(seed, backend):
    """Two block tables, blocks in pieces, and a page with two of the four heads."""
    layers, heads, dim, chunk, blocks = 3, 4, 8, 32, 12  # each of two pieces of 8 tokens
    device = FakeDevice(seed)
    memory = DeviceMemory(device)
    arrays = [memory.array((2 * blocks, heads, 8, 2 * dim)) for _ in range(layers)]
    random = np.random.default_rng(seed)
    for array in arrays:
        array[:] = random.standard_normal(array.shape)
    tensors = {layer: torch.from_numpy(array) for layer, array in enumerate(arrays)}
    part = PagePart(1, 2, (0, 1, 2))
    whole = KVSpec.uniform(layers=layers, kv_heads=4, head_dim=dim, dtype="float32", chunk_tokens=chunk)
    layout = part.identity(Identity.of(whole, model="m")).layout
    source = PartSource(part, range(2), range(2, 4))
    read = engine_blocks(
        tensors,
        dict.fromkeys(tensors, backend),
        num_blocks=blocks,
        heads=heads,
        head_dim=dim,
        tables=[[0, 2], [1]],
    )
    on_device = cuda.make_shared_blocks(
        layout,
        read,
        source,
        tensors,
        memory.reach,
        computing=lambda: memory.stream,
        on_stream=device.launch,
    )
    on_host = host_blocks(layout, read, source, tensors)
    here, there = (np.zeros(KVSpec.parse(layout).page_bytes, np.uint8) for _ in range(2))
    chunk_blocks = [3, 1, 8, 5]  # of the first table, then of the second
    on_host.gather([(chunk_blocks, here.ctypes.data)])
    on_device.computed()
    on_device.gather([(chunk_blocks, there.ctypes.data)])
    assert here.any()
    assert np.array_equal(here, there)
    page = random.standard_normal(len(here) // 4).astype(np.float32)
    before = [array.copy() for array in arrays]
    on_device.scatter([([6, 0, 2, 7], page.ctypes.data)])
    written = [array.copy() for array in arrays]
    for array, earlier in zip(arrays, before, strict=True):
        array[:] = earlier
    on_host.scatter([([6, 0, 2, 7], page.ctypes.data)])
    assert all(np.array_equal(a, b) for a, b in zip(written, arrays, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(written, before, strict=True))
    memory.finish()


@pytest.mark.parametrize("seed", ONE_OF_EACH)
def test_a_step_is_saved_after_it_was_computed_and_loaded_after_the_one_before(on_device, seed):
    first = on_device(seed)
    second = on_device(device=first.on.device)
    first.save(Request("warm", list(range(200, 270))), TABLE, 70, value=20.0)
    first.save(Request("a", TOKENS), TABLE, 70)
    second.fill(OTHER, -50.0)  # a step of the blocks' last owner, which nobody waits for
    results = load(second, Request("b", TOKENS), OTHER)
    assert (results.finished, results.failed, results.blocks) == ({"b"}, set(), set())
    first.on.finish()
    second.on.finish()
    assert equal_blocks(first, second, zip(TABLE[0][:8], OTHER[0][:8], strict=True))
    assert second.memory[0][OTHER[0][0], 0, 0, 0] == 1.0
    assert second.memory[0][OTHER[0][8], 0, 0, 0] == -42.0  # the tail is vLLM's to compute


@pytest.mark.parametrize("seed", SCHEDULES[:6])
def test_a_step_that_writes_to_blocks_waits_for_the_saves_that_read_them(on_device, seed):
    first = on_device(seed)
    second = on_device(device=first.on.device)
    request = Request("a", TOKENS)
    first.matched(request)
    first.scheduler.allocated(request, TABLE, 0)
    computed = step(new=[("a", 0, TABLE)], scheduled={"a": 70}, tables={"a": TABLE})
    first.run(computed, between=lambda: first.fill(TABLE, 1.0))
    first.run(step(cached=[("z", 0, ([5, 6],))]), between=lambda: first.fill(TABLE, 99.0))
    first.settle()
    if found := second.matched(Request("b", TOKENS)):
        second.scheduler.allocated(Request("b", TOKENS), OTHER, found)
        second.until_loaded()
        second.on.finish()
        assert (second.memory[0][OTHER[0][: found // BLOCK]] < 50).all()


@pytest.mark.parametrize("seed", SCHEDULES[:6])
def test_blocks_that_vllm_has_itself_and_those_outside_of_windows_are_left_alone(on_device, seed):
    options = {"windowed": (False, True)}
    first = on_device(seed, **options)
    second = on_device(device=first.on.device, **options)
    table = (TABLE[0], [30, 31, 32, 33, 34, 35, 36, 37, 38])
    first.save(Request("a", TOKENS), table, 70)
    second.fill((OTHER[0][:3], []), -1.0)
    second.on.finish()
    before = second.memory[0].copy()
    outside = ([*OTHER[0]], [0, 0, 0, 0, 0, 45, 46, 47, 48])
    load(second, Request("b", TOKENS), outside, local=24)  # in the middle of a chunk
    for each in (first, second):
        each.on.finish()
    untouched = [block for block in range(len(before)) if block not in OTHER[0][3:8]]
    assert (second.memory[0][untouched] == before[untouched]).all()
    assert equal_blocks(first, second, zip(TABLE[0][3:8], OTHER[0][3:8], strict=True))
    assert equal_blocks(first, second, [(35, 45), (36, 46), (37, 47)], group=1)
    assert not second.memory[1][:45].any()


def test_pages_go_over_by_the_copy_engines_once_the_arena_is_pinned(on_device, way):
    first = on_device()
    second = on_device(device=first.on.device)
    first.save(Request("a", TOKENS), TABLE, 70)
    load(second, Request("b", TOKENS), OTHER)
    device = first.on.device
    assert (device.registered, device.registrations) == (1, 1)  # one process, one mapping
    assert (device.batches, device.copies) == ((8, 0) if way == "straight" else (0, 8))


@pytest.mark.parametrize("seed", SCHEDULES[:4])
def test_an_arena_that_the_driver_does_not_take_is_slower_and_the_same(on_device, seed):
    device = FakeDevice(seed)
    device.refuse_registrations()
    first, second = (on_device(device=device) for _ in range(2))
    first.save(Request("a", TOKENS), TABLE, 70)
    load(second, Request("b", TOKENS), OTHER)
    first.on.finish()
    assert equal_blocks(first, second, zip(TABLE[0][:8], OTHER[0][:8], strict=True))
    assert (device.batches, device.registered) == (0, 0)
    (store,) = first.worker._stores._stores.values()
    assert store.stats().counters["connection"]["unpinned_arenas"] >= 1


def test_a_driver_that_fails_costs_a_hit_and_its_copies_end_first(on_device, monkeypatch, caplog):
    first = on_device()
    second = on_device(device=first.on.device)
    first.save(Request("a", TOKENS), TABLE, 70)
    ended = []
    blocks = second.worker._groups[0].blocks

    def refused(stream, chunk, address):
        raise DeviceError("no")

    monkeypatch.setattr(type(blocks._method), "up", lambda self, *ends: refused(*ends))
    monkeypatch.setattr(second.on.device, "synchronize", ended.append)
    results = load(second, Request("b", TOKENS), OTHER)
    monkeypatch.undo()
    assert results.finished == {"b"}
    assert results.blocks == set(OTHER[0][:8])
    assert ended
    assert second.errors.counts.pop("copying to KV blocks")
    caplog.clear()  # the frames in it hold on to the mapping
    assert second.matched(Request("c", TOKENS)) == 0  # it is not tried again at once


def test_streams_and_pages_are_used_again(on_device):
    first = on_device()
    made = []
    device = first.on.device
    original = device.stream
    device.stream = lambda: made.append(1) or original()
    for number in range(6):
        first.save(Request(f"a{number}", [number, *TOKENS]), TABLE, 70)
    assert 1 <= len(made) <= first.settings.threads
    del device.stream


def test_pieces_are_collected_where_they_are_small():
    def way(run, *, layers=1):
        array = np.zeros((layers, 8, run), np.uint8)
        shapes = [
            TensorShape(str(at), each.__array_interface__["data"][0], each.shape, each.strides, 1, "uint8")
            for at, each in enumerate(array)
        ]
        layout = page_layout(shapes, num_blocks=8, blocks=4)
        tensors = [torch.from_numpy(each) for each in array]
        reach = Reach(FakeDevice())
        return type(cuda.make_blocks(layout, tensors, reach, computing=int, on_stream=print)._method)

    sizes = (cuda.LEAST_PIECE - 1, cuda.LEAST_PIECE)
    found = [way(run, layers=layers) for run, layers in itertools.product(sizes, (1, 3))]
    assert found == [cuda.StagedCopy] * 2 + [cuda.DirectCopy] * 2


# -- the kernel that collects pieces ---------------------------------------------------------------------

BLOCKS = 12
CHUNK = [7, 0, 3, 11]


def planes_of(run):
    """The KV tensors of three layers in vLLM's default layout, and their pages' layout."""
    tensors = [
        guarded(np.random.default_rng(layer).integers(0, 255, (2, BLOCKS, run), np.uint8))
        for layer in range(3)
    ]
    shapes = [
        TensorShape(str(at), each.__array_interface__["data"][0], each.shape, each.strides, 1, "uint8")
        for at, each in enumerate(tensors)
    ]
    return tensors, page_layout(shapes, num_blocks=BLOCKS, blocks=len(CHUNK))


def copy_both_ways(run, seed, folder=pieces.SOURCE.parent):
    """Whether a page gets the bytes that torch's way gives it, and blocks likewise."""
    tensors, layout = planes_of(run)
    views = [
        cuda.plane_view(
            [torch.from_numpy(each) for each in tensors],
            plane.address,
            plane.block_stride,
            plane.run_bytes,
            BLOCKS,
        )
        for plane in layout.planes
    ]
    kernel = pieces.KernelPieces(layout, launcher(seed, folder), torch.device("cpu"))
    by_torch = pieces.TorchPieces(views)
    page, expected = (torch.from_numpy(guarded(np.zeros(layout.page_bytes, np.uint8))) for _ in range(2))
    kernel.gather(CHUNK, page)
    by_torch.gather(CHUNK, expected)
    assert torch.equal(page, expected)
    page.copy_(page.flip(0))
    before = [each.copy() for each in tensors]
    by_torch.scatter(CHUNK, page)
    wanted = [each.copy() for each in tensors]
    for each, old in zip(tensors, before, strict=True):
        each[:] = old
    kernel.scatter(CHUNK, page)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(tensors, wanted, strict=True))
    assert all(np.array_equal(each[:, 0], old[:, 0]) for each, old in zip(tensors, before, strict=True))


@pytest.mark.parametrize("seed", KERNEL_SCHEDULES)
@pytest.mark.parametrize("run", [16, 2064, 4096])
def test_one_launch_collects_what_torch_collects_plane_by_plane(run, seed):
    copy_both_ways(run, seed)


MISTAKES = {
    "the null block is written to": ("if (!into_page && block == 0) continue;", ""),
    "the last pieces are left out": (
        "piece < num_planes * count; piece",
        "piece < num_planes * count - 1; piece",
    ),
    "tail is left out": ("for (; i < vectors; i += 32) target[i] = source[i];", ""),
    "one beyond the end": ("i < vectors; i += 32", "i <= vectors; i += 32"),
    "the plane's place in the page": ("page + plane[3] + at", "page + at"),
    "both ways are one": ("into_page ? theirs : ours", "theirs"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_mistakes_in_the_kernel_are_caught(mistake, tmp_path):
    text = pieces.SOURCE.read_text()
    assert text.count(mistake[0]) == 1
    (tmp_path / pieces.SOURCE.name).write_text(text.replace(*mistake))
    for run, seed in itertools.product((16, 2064), KERNEL_SCHEDULES):
        try:
            copy_both_ways(run, seed, tmp_path)
        except (AssertionError, ExecutionError):
            return
    pytest.fail("not caught")


def test_the_kernel_compiles_for_every_architecture():
    try:
        nvrtc = Nvrtc(find_toolkit())
    except KernelError as error:
        pytest.skip(f"kernels cannot be compiled: {error}")
    for arch in ARCHITECTURES:
        compiled = nvrtc.compile(pieces.SOURCE.read_text(), pieces.KERNEL, arch=arch, includes=[])
        assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)
        assert compiled.registers <= 64  # two blocks of it on an SM


def test_pieces_of_odd_sizes_are_left_to_torch():
    def taken(run, launch):
        tensors, layout = planes_of(run)
        blocks = cuda.make_blocks(
            layout,
            [torch.from_numpy(each) for each in tensors],
            Reach(FakeDevice()),
            computing=int,
            on_stream=print,
            launch=launch,
        )
        return type(blocks._method._pieces)

    assert taken(32, launcher(0)) is pieces.KernelPieces
    assert taken(24, launcher(0)) is pieces.TorchPieces
    assert taken(32, None) is pieces.TorchPieces


def test_without_cupy_pieces_are_left_to_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert pieces.cupy_launch(torch.device("cuda:0")) is None


def test_a_cupy_that_cannot_load_a_kernel_costs_speed_only(caplog):
    pytest.importorskip("cupy")
    if torch.cuda.is_available():
        pytest.skip("it can, here")
    assert pieces.cupy_launch(torch.device("cuda:0")) is None
    assert "CuPy cannot load a kernel" in caplog.text
