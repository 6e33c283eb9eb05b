"""``tierstore-bench peers``: our daemon beside other KV caches that are installed.

* ``tierstore``: ``tierstore serve`` over a unix socket; durable in the disk tier.
* ``lmcache``: LMCache's server in its default transfer mode; durable in its ``fs`` adapter.
* ``redis``: ``redis-server`` over a unix socket; durable in an append-only file, synced each second.
* ``mooncake``: a master, and a client that lends memory, over TCP; not durable here.

Each peer has a daemon and one client process, which stands for an engine. All clients get prompts of the same
tokens and bytes. A client fills its pages, saves, looks up, loads into zeroed pages, and compares every byte.
Rounds go from peer to peer, each directly after a memcpy between the client's own buffers. A peer with
packages of its own runs in its own Python. Its client is the same program
(:mod:`~tierstore_tools.peers.client`), with the standard library, numpy and the peer's packages.
"""
