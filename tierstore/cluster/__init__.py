"""Pages shared between hosts, through an existing store: Mooncake Store, or a bucket of an object store.

The daemon itself does not use the store's library. A process beside it, the **agent**, does so as an ordinary
client of the daemon. Such libraries crash, hang, and write to memory after their calls have returned (76 MB
in one trial). Also, every host of the network could read and overwrite a registered arena. So:

* No byte from the network is written to the arena directly. It is written to the agent's own *staging*
  memory. One pass then copies it into a slot and hashes the copy. Any difference from the requested page is a
  miss.
* A hanging agent is killed, and a crashed agent is started again. Its connection to the daemon ends with it,
  and the daemon takes back its reservations, as for any client.
* A lane of staging memory is never used again after a call on it has failed or was late.

A page is one object. Its name is the SHA-256 of the identity, the tokens and keys up to its end, and the
cluster's secret if there is one. This prevents an attack: a store keeps the old bytes if a name exists, so an
attacker with two prompts of equal XXH3 could block a page. The page's bytes follow a header with the same
data. The reader builds the expected header and compares (``objects.py``).

The shared store is not a fourth tier. Its pages may disappear at any time, so the index does not know them. A
lookup whose local hit ends early asks the shared store (``Found.remote``, a hint). Then the client may fetch
the pages (``FetchOrder``), which are in host memory afterwards and are found like any others.

``orders.py`` has the messages between daemon and agents, ``supervisor.py`` the daemon's side, ``agent.py``
the process, ``fetching.py`` its way from the store to the daemon, and ``shared_store.py`` the interface of a
store. ``forms.py`` has the form of a page there, plain or sealed, and ``shared_keys.py`` the keys of sealed
pages. ``mooncake.py`` implements a store, and ``bundle_store.py`` over ``s3.py``. There, pages of one prompt
are one object (``bundles.py``), and ``warm_up.py`` fills a new host.
"""
