"""The daemon: a server over what is below HBM, for every engine on the host. It outlives them all.

::

    engine process                                daemon (tierstore serve)
    Store ── RemoteBackend ── connection ── unix socket ── server ── service ── LocalBackend, one a session
      │                                                                              │
      └── copies pages ── the mapped arena ──────────────────────────────────────── Core: host, disk

**Control** is messages as written down in ``wire/messages.py``, one round trip for a prompt and not for a
page: on the same host over a unix socket (``wire/framing.py``), from others over ZMQ, DEALER in the client
and ROUTER in the daemon (``client/transport.py``, ``endpoint.py``). **Bytes** of an engine on the same host
are in no message: it maps the daemon's arena and copies between its own memory and the slots it was told. An
engine on another host gets and sends pages as frames.

**The arena's own socket.** Beside ``ipc://PATH`` the daemon listens on the unix socket ``PATH.arena``.
Whoever connects there is handed the arena's file descriptor and a token, and keeps the connection: it is
the line that both talk over, and the sign of life. When a process dies, however it dies, the kernel closes
it, and the daemon takes back what the process held in the same moment. The same the other way round: a client
learns of the daemon's death at once, and answers "miss" from then on without waiting. No heartbeat can be
that quick, and no stopped process is taken for a dead one. (Heartbeats are what a TCP client has instead.)

**Reading under a lease.** A lease ends ``lease_s`` after the daemon gave it; the client counts from when it
*asked*, so its own end is the earlier one. After copying it looks at its clock: before the end the bytes are
those that were promised, after it they are not used. Nothing has to be asked or shared for that. A device
copies after the engine was given its pages; there the lease is kept until the copies have ended
(``store/load.py``).

**Writing under a reservation.** A reservation is never taken back from a living process: a write that was
already under way could otherwise end in somebody else's page. What a client may hold in reservations is
bounded instead, and a dead client's come back with its connection.

**Requests cost few hand-overs.** In the client any thread sends, under a lock, and the thread that waits for
an answer receives it: its connection's own thread is there for answers that nobody waits for, for deadlines,
and to hear of the daemon's end (``client/channel.py``). Leases are given back some at a time.

**Who waits for what.** The daemon's event loop matches prompts in memory and never touches a disk: where the
tree ends, a thread looks on disk (``core/find.py``); pages come from disk on the mover's threads. Every
request carries the seconds its sender will wait, and is answered by then with what there is.

**When the daemon is away** every verb of the client answers at once, with a miss. Requests are not repeated:
a lookup is asked again by the engine soon enough, and a save that may or may not have been committed is
found, or saved again, by the next one.
"""
