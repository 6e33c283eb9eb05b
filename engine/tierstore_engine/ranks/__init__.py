"""One model over several processes on one host: tensor and sequence parallelism.

Each process is a *rank*. With ``--tensor-parallel N``, each rank computes a share of every layer: some heads
of attention, some rows of an MLP, some experts of a mixture, and some rows of the head. The outputs of all
ranks are summed. With ``--sequence-parallel N``, each rank has a part of the pages, and computes the tokens
in these pages (:mod:`~.sequence`). With both, the ranks of a part share its heads. Rank 0 is the engine
itself. Only rank 0 schedules, samples and uses the store. The other ranks are its child processes. Rank 0
sends them each step, and all ranks compute it together.

On a CPU, the page pools are in memory that all ranks of a part map, and rank 0 maps all parts. A page has all
heads, as without ranks, and each rank reads and writes the heads of its share. Lookups, loads, saves,
evictions and drafts therefore do not depend on ranks. A hit serves all ranks, and an engine with any number
of ranks can use the pages of any other.

On GPUs, each rank has a device. Rank 0 makes the pools on all devices, and each device has its rank's heads
of the pages of its part (:mod:`tierstore.tiers.divided_pool`). All copies are those of rank 0. Rank 0 waits
for copies into pages before it sends a step. Before it copies again, it waits for the end of the step on its
own device. All ranks have finished then, because the last operation of a step needs all of them. On GPUs,
recurrent states are refused, and so are windows and attention chunks with sequence parallelism. This has not
run on a GPU.

A rank must answer pings within 8 seconds only when its first step can begin. Until then it reads weights,
connects NCCL and builds kernels, and has 60 seconds. (All three release the interpreter's lock.)

Rank 0 reads all weights, because the pages' identity has their digest. With tensor parallelism, each other
rank reads only its slices of the files. With sequence parallelism alone, all ranks on a CPU map one copy.

Rank 0 alone computes layers with a recurrent state. With tensor parallelism, blocks that layers share are
refused, and the first rank of each part computes attention that norms all heads together.

- :mod:`~.share`: the part of each rank, and its weights
- :mod:`~.shared`: one copy of the weights for several ranks
- :mod:`~.pools`: the page pools of a rank
- :mod:`~.collective`: tensors between ranks
- :mod:`~.sequence`: the rows of a part, and attention over all parts
- :mod:`~.member`: the model of each rank
- :mod:`~.runner`: the runner of rank 0
- :mod:`~.others`: the other processes, seen from rank 0; detects a process that died or hangs
- :mod:`~.worker`: the main program of the other processes
"""
