"""One model over several processes on one host: tensor parallelism (``--tensor-parallel N``).

Each process is a *rank* and computes a share of every layer: some heads of attention, some rows of an MLP,
some experts of a mixture, and some rows of the head. The shares of a layer's output are summed over all ranks
(gloo). Rank 0 is the engine itself. It alone schedules, samples and talks to the store. The others are its
child processes. It sends them each step, and all ranks compute it together.

The page pools are in memory that all ranks map. A page has all heads, as it has without ranks, and each rank
reads and writes those of its share. So lookups, loads, saves, evictions and drafts know nothing of ranks, a
hit always counts for all of them, and pages that were saved with any number of ranks serve any other number.

Rank 0 alone computes what cannot be divided: layers with a recurrent state, blocks that layers share, and
attention that norms all heads together.

- :mod:`~.share`: the part of each rank, and its weights
- :mod:`~.collective`: sums over all ranks, and the logits at rank 0
- :mod:`~.runner`: the runner of rank 0
- :mod:`~.others`: the other processes as rank 0 sees them; it notices one that died or hangs
- :mod:`~.worker`: the main program of the other processes
"""
