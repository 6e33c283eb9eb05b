"""Whatever the strides: the bytes of a block come and go as they are, and nobody else's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore_connectors.vllm.copies import HostBlocks, valid_blocks
from tierstore_connectors.vllm.layout import TensorShape, UnsupportedError, page_layout

NUM_BLOCKS = 7


def tensor_shape(name, array):
    pointer = array.__array_interface__["data"][0]
    return TensorShape(name, pointer, array.shape, array.strides, array.itemsize, str(array.dtype))


@st.composite
def registered(draw):
    """Layers as views ``[blocks, heads, states, content]`` of one buffer, in any order of strides, layers and
    padding included: what vLLM hands over."""
    sizes = {"L": draw(st.integers(1, 3)), "B": NUM_BLOCKS, "H": draw(st.integers(1, 3)), "N": 4, "C": 6}
    order = draw(st.permutations("LBHNC"))
    padding = draw(st.integers(0, 2))
    stored = [sizes[dim] + (padding if dim == order[-1] else 0) for dim in order]
    buffer = np.zeros(stored, np.uint16)
    view = buffer[..., : sizes[order[-1]]]
    logical = view.transpose([order.index(dim) for dim in "LBHNC"])
    return buffer, list(logical)


@given(registered(), st.data())
def test_blocks_survive_a_round_trip_and_nothing_else_changes(registered, data):
    buffer, layers = registered
    buffer[...] = np.arange(buffer.size, dtype=np.uint32).reshape(buffer.shape).astype(np.uint16)
    try:
        layout = page_layout(
            [tensor_shape(str(at), layer) for at, layer in enumerate(layers)], num_blocks=NUM_BLOCKS, blocks=2
        )
    except UnsupportedError:
        pytest.fail("a layout that does not overlap itself")
    assert layout.page_bytes == 2 * sum(layer[0].nbytes for layer in layers)
    chosen = data.draw(st.permutations(range(1, NUM_BLOCKS)))
    source, target = chosen[:2], [chosen[2], 0]
    page = np.zeros(layout.page_bytes + 16, np.uint8)
    blocks = HostBlocks(layout)
    before = buffer.copy()
    blocks.gather([(source, page.__array_interface__["data"][0])])
    assert (buffer == before).all()
    assert not page[layout.page_bytes :].any()
    expected = [layer.copy() for layer in layers]
    for layer in expected:
        layer[target[0]] = layer[source[0]]
    blocks.scatter([(target, page.__array_interface__["data"][0])])
    for layer, wanted in zip(layers, expected, strict=True):
        assert (layer == wanted).all()


def test_layouts_that_vllm_has_had():
    shapes = {
        "blocks first": np.zeros((9, 2, 16, 4), np.float32),
        "K and V apart": np.zeros((2, 9, 16, 4), np.float32),
        "a latent": np.zeros((9, 1, 16, 5), np.float32),
        "kernel blocks of half the size": np.zeros((18, 2, 8, 4), np.float32),
    }
    planes = {
        name: page_layout([tensor_shape("x", array)], num_blocks=9, blocks=1).planes
        for name, array in shapes.items()
    }
    assert {name: [plane.run_bytes for plane in each] for name, each in planes.items()} == {
        "blocks first": [512],
        "K and V apart": [256, 256],
        "a latent": [320],
        "kernel blocks of half the size": [512],
    }


def test_a_block_of_all_layers_in_one_run_is_one_plane():
    array = np.zeros((9, 3, 2, 4), np.float32)  # block, layer, …
    layers = [tensor_shape(str(at), array[:, at]) for at in range(3)]
    (plane,) = page_layout(layers, num_blocks=9, blocks=2).planes
    assert (plane.run_bytes, plane.block_stride) == (96, 96)


def test_what_is_not_understood_is_refused():
    array = np.zeros((9, 2, 16, 4), np.float32)
    overlapping = np.lib.stride_tricks.as_strided(array, (9, 2, 16, 4), (256, 256, 16, 4))
    for tensors, num_blocks in (
        ([], 9),
        ([tensor_shape("x", array)], 10),
        ([tensor_shape("x", array)], 2),
        ([tensor_shape("x", overlapping)], 9),
        ([tensor_shape("x", array[..., ::-1])], 9),
    ):
        with pytest.raises(UnsupportedError):
            page_layout(tensors, num_blocks=num_blocks, blocks=1)


def test_the_digest_tells_apart_what_bytes_mean():
    base = np.zeros((9, 2, 4, 4), np.float32)
    arrays = [
        base,
        base.transpose(0, 2, 1, 3),  # the same shape, K before the heads
        np.zeros((9, 2, 4, 4), np.int32),
        np.zeros((9, 4, 2, 4), np.float32),
        np.zeros((2, 9, 4, 4), np.float32).transpose(1, 0, 2, 3),
    ]
    digests = [page_layout([tensor_shape("x", each)], num_blocks=9, blocks=1).digest for each in arrays]
    digests.append(page_layout([tensor_shape("y", base)], num_blocks=9, blocks=1).digest)
    assert all(a != b for a, b in itertools.combinations(digests, 2))
    # The number of blocks is not part of it: two engines may have different memory.
    more = np.zeros((30, 2, 4, 4), np.float32)
    assert page_layout([tensor_shape("x", more)], num_blocks=30, blocks=1).digest == digests[0]


def test_block_numbers_are_checked():
    assert valid_blocks([(1, 2), (0, 8)], 9, 2)
    assert not valid_blocks([(1, 9)], 9, 2)
    assert not valid_blocks([(-1, 2)], 9, 2)
    assert not valid_blocks([(1,)], 9, 2)


def test_pieces_that_are_collected_on_a_gpu_make_the_same_page():
    """Over host memory: the indexing is torch's on every device."""
    torch = pytest.importorskip("torch")
    from tierstore_connectors.vllm import cuda, pieces

    buffer = torch.arange(2 * 9 * 2 * 4 * 4, dtype=torch.float32).reshape(2, 9, 2, 4, 4)
    layers = [buffer[0], buffer[1]]
    layout = page_layout(
        [tensor_shape(str(i), each.numpy()) for i, each in enumerate(layers)], num_blocks=9, blocks=2
    )
    planes = [
        cuda.plane_view(layers, plane.address, plane.block_stride, plane.run_bytes, 9)
        for plane in layout.planes
    ]
    page = torch.empty(layout.page_bytes, dtype=torch.uint8)
    by_torch = pieces.TorchPieces(planes)
    by_torch.gather((3, 7), page)
    expected = np.zeros(layout.page_bytes, np.uint8)
    HostBlocks(layout).gather([((3, 7), expected.__array_interface__["data"][0])])
    assert (page.numpy() == expected).all()
    before = buffer.clone()
    by_torch.scatter((0, 5), page)
    assert (buffer[:, 5] == before[:, 7]).all()
    buffer[:, 5] = before[:, 5]
    assert (buffer == before).all()
