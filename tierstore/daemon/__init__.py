"""The daemon: a server over the tiers below HBM, for all engines of a host. It outlives the engines.

::

    engine process                                daemon (tierstore serve)
    Store ── RemoteBackend ── connection ── unix socket ── server ── service ── LocalBackend, one per client
      │                                                                              │
      └── copies pages ── the mapped arena ──────────────────────────────────────── Core: host, disk

**Control** uses the messages of ``wire/messages.py``, with one round trip for a prompt, not one for each
page. On the same host they go over a unix socket (``wire/framing.py``), from other hosts over ZMQ: DEALER in
the client and ROUTER in the daemon (``client/transport.py``, ``endpoint.py``). **Pages** of an engine on the
same host are not in messages: the engine maps the daemon's arena and copies between its own memory and the
slots that the daemon names. An engine on another host receives and sends pages as frames.

**The arena's own socket.** Beside ``ipc://PATH`` the daemon listens at the unix socket ``PATH.arena``. A
process that connects receives the arena's file descriptor and a token, and keeps the connection for all
messages. The connection also shows that the process lives: when it dies, in any way, the kernel closes the
connection, and the daemon immediately takes back what the process held. In the same way a client learns at
once that the daemon has died, and its lookups miss from then on. TCP clients use heartbeats instead.

**Reading under a lease.** A lease ends ``lease_s`` after the daemon gave it. The client counts from the time
of its *request*, so its own end is earlier. After a copy it reads its clock. If the lease has not ended, the
bytes are those of the page; otherwise it discards them. This needs no message and no shared state. A device
may copy after the engine received its pages. Then the lease is kept until the copies have ended
(``store/load.py``).

**Writing under a reservation.** A reservation is never taken back from a living process, because a running
write could otherwise overwrite another client's page. Instead, the reservations of each client are limited.
A dead client's reservations end with its connection.

**Requests need few hand-overs between threads.** In the client any thread sends, under a lock, and the thread
that waits for an answer receives it. The connection's own thread handles answers without a waiting thread,
deadlines, and the daemon's end (``client/channel.py``). Leases are released in groups.

**No request blocks the daemon.** The daemon's event loop matches prompts in memory and never accesses a disk.
Where the tree ends, a thread searches the disk (``core/find.py``). The mover's threads load pages from disk.
Every request says how many seconds its sender will wait, and is answered by then with the available pages.

**While the daemon is away** every method of the client answers at once, with a miss. Requests are not
repeated: the engine soon sends the next lookup. If it is unknown whether a save was committed, the next save
finds its pages or saves them again.
"""
