"""The process of a rank other than 0: ``python -m tierstore_engine.ranks.worker FD``.

One thread receives messages. It answers pings at once, and ends the process when rank 0 has ended. The main
thread computes the steps. After an error, the process reports it to rank 0 and ends, because the other ranks
wait for this rank in a sum.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from multiprocessing.connection import Connection

import torch

from tierstore.errors import TierStoreError
from tierstore_engine.layer_weights import ModelWeights
from tierstore_engine.model import Model
from tierstore_engine.ranks.member import RankGroups, model_of, read_weights
from tierstore_engine.ranks.messages import (
    FromRank,
    RankConnect,
    RankFailed,
    RankLoaded,
    RankPing,
    RankPong,
    RankReady,
    RankSetup,
    ToRank,
)
from tierstore_engine.ranks.shared import SharedWeights
from tierstore_engine.step import Step
from tierstore_engine.weights import states_of


class Wire:
    """The connection to rank 0. :meth:`next` returns all messages except pings."""

    def __init__(self, connection: Connection[FromRank, ToRank]) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._received: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="tierstore-rank", daemon=True).start()

    def send(self, message: FromRank) -> None:
        with self._sending:
            self._connection.send(message)

    def next(self) -> ToRank:
        return self._received.get()

    def _receive(self) -> None:
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, RankPing):
                    self.send(RankPong())
                else:
                    self._received.put(message)
        except (EOFError, OSError):
            os._exit(0)  # rank 0 has ended, so a sum in the main thread would never end


def main() -> None:
    wire = Wire(Connection(int(sys.argv[1])))
    try:
        setup = wire.next()
        assert isinstance(setup, RankSetup)
        model = _model(setup, wire)
        while True:
            step = wire.next()
            assert isinstance(step, Step)
            model.compute(step)
    except BaseException as error:
        why = str(error) if isinstance(error, TierStoreError) else f"{type(error).__name__}: {error}"
        wire.send(RankFailed(why))
        raise


def _model(setup: RankSetup, wire: Wire) -> Model:
    torch.set_num_threads(setup.threads)
    config, device = setup.opened.config, setup.opened.device
    if device != "cpu":
        torch.cuda.set_device(device)
    weights, pools = _weights(setup), setup.pools.open()
    wire.send(RankLoaded())
    connect = wire.next()
    assert isinstance(connect, RankConnect)
    groups = RankGroups.meet(setup.place, setup.meeting, device)
    model = model_of(
        config, weights, pools, setup.place, groups.heads, groups.tokens, setup.part_large_pages, device
    )
    wire.send(RankReady())
    return model


def _weights(setup: RankSetup) -> ModelWeights:
    opened = setup.opened
    if setup.weights_fd is not None:
        return SharedWeights(opened.config, setup.weights_fd).weights
    weights = read_weights(opened, setup.place.heads, seed=setup.seed)
    if states_of(opened.source) != setup.files:
        raise TierStoreError("the checkpoint has changed since rank 0 began to read it")
    return weights


if __name__ == "__main__":
    main()
