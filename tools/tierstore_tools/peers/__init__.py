"""``tierstore-bench peers``: our daemon beside the caches that can be installed next to it.

==============  =====================================================  ======================================
peer            what runs                                              what stays after ``kill -9``
==============  =====================================================  ======================================
tierstore       ``tierstore serve``, over a unix socket                the disk tier
lmcache         LMCache's server, in its default transfer mode         its ``fs`` adapter for a second tier
redis           ``redis-server``, over a unix socket                   an append-only file, synced each second
mooncake        a master, and a client that lends memory, over TCP     nothing: it has no disk here
==============  =====================================================  ======================================

Each has a daemon and one client process, which stands for an engine. All get prompts of the same tokens and
bytes; the client fills its pages, saves, looks up, loads into other pages that were zeroed before, and
compares every byte. Rounds go from peer to peer, with a memcpy between the client's own buffers right before.
A peer that needs packages of its own runs in its own Python; its client is the same program
(:mod:`~tierstore_tools.peers.client`) with the standard library, numpy and that peer's packages.
"""
