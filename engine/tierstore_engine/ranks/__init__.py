"""One model over several processes on one host: tensor parallelism (``--tensor-parallel N``).

Each process is a *rank* and computes a share of every layer: some heads of attention, some rows of an MLP,
some experts of a mixture, and some rows of the head. The outputs of all ranks are summed (gloo). Rank 0 is
the engine itself. It alone schedules, samples and talks to the store. The other ranks are its child
processes. Rank 0 sends them each step, and all ranks compute it together.

The page pools are in memory that all ranks map. A page has all heads, as without ranks, and each rank reads
and writes the heads of its share. So lookups, loads, saves, evictions and drafts do not depend on ranks. A
hit serves all ranks, and an engine with any number of ranks can use the pages of any other.

Rank 0 alone computes the layers that cannot be divided: layers with a recurrent state, blocks that layers
share, and attention that norms all heads together.

- :mod:`~.share`: the part of each rank, and its weights
- :mod:`~.collective`: sums over all ranks, and the logits at rank 0
- :mod:`~.runner`: the runner of rank 0
- :mod:`~.others`: the other processes, seen from rank 0; detects a process that died or hangs
- :mod:`~.worker`: the main program of the other processes
"""
