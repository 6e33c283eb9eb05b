"""The daemon: a server over the host and disk tiers, for all engines of a host. It outlives the engines.

::

    engine process                                daemon (tierstore serve)
    Store ── RemoteBackend ── connection ── unix socket ── server ── service ── LocalBackend, one per client
      │                                                                              │
      └── copies pages ── the mapped arena ──────────────────────────────────────── Core: host, disk

**Messages** are defined in ``wire/messages.py``. A prompt needs one round trip, not one for each page. On the
same host, messages go over a unix socket (``wire/framing.py``). From other hosts they go over ZMQ: DEALER in
the client and ROUTER in the daemon (``client/transport.py``, ``endpoint.py``). An engine on the same host
maps the daemon's arena, and copies pages between its own memory and the slots that the daemon names in its
answers. An engine on another host receives and sends pages as frames behind the messages.

**The arena's own socket.** Beside ``ipc://PATH`` the daemon listens at the unix socket ``PATH.arena``. A
process that connects receives the arena's file descriptor and a token, and sends all messages over this
connection. When the process dies, in any way, the kernel closes the connection, and the daemon immediately
releases the leases and reservations of the process. In the same way, a client notices the death of the daemon
at once, and its lookups miss from then on. TCP clients use heartbeats instead.

**Reading under a lease** is explained in ``client/reading.py``. A device may still copy after the engine has
received its pages. In this case the lease is kept until the copies have ended (``store/load.py``).

**Writing under a reservation.** The daemon never takes a reservation back from a living process, because the
process may still be writing to the slots. Instead, the bytes that each client may reserve are limited. When a
client dies, its connection and its reservations end.

**No request blocks the daemon.** The daemon's event loop matches prompts in memory and never accesses a disk.
Pages that only the disk has are searched by a thread (``core/find.py``) and loaded by the mover's threads.
Every request contains the seconds that its sender will wait. The daemon answers by then, with the pages that
are available.
"""
