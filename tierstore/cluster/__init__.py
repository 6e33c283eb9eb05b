"""Pages shared between hosts, through an existing store: Mooncake Store, or a bucket of an object store.

The daemon does not load the shared store's client library, because such libraries crash, hang, and write to
memory after their calls have returned (76 MB in one trial). A process beside the daemon, the **agent**, loads
it and is an ordinary client of the daemon. With some libraries, every host of the network could also read and
overwrite memory that is registered with them. Therefore:

* No byte from the network is written to the daemon's memory directly. The library writes to the agent's own
  *staging* memory. The agent then copies each page into the daemon's memory and hashes the copy. If the hash
  differs from that of the requested page, the page is a miss.
* The daemon kills a hanging agent and restarts an agent that has ended. When the agent's connection ends,
  the daemon takes back the agent's reservations, as it does for any client.
* Staging memory is divided into lanes. A lane is never used again after a call on it has failed or was late.

Each page is one object in the shared store (or a part of one). Its name is the SHA-256 of the identity, the
tokens and keys up to the page's end, and the cluster's secret if there is one. A shared store keeps the old
bytes of an existing name. So if names were XXH3, an attacker with two prompts of equal XXH3 could block a
page. The page's bytes follow a header with the same data as the name. The reader of a page computes the
expected header and compares it with the stored header (``objects.py``).

The shared store is not a fourth tier. Its pages may disappear at any time, so the daemon's index does not
contain them. If a local hit ends early, the daemon asks the shared store how many more pages it has
(``Found.remote``, a hint). The client may then request that these pages are fetched (``FetchOrder``). After
that they are in host memory, and lookups find them like all other pages.

``orders.py`` has the messages between daemon and agents, ``supervisor.py`` the daemon's side, ``agent.py``
the agent's process, ``fetching.py`` its copies from the shared store to the daemon, and ``shared_store.py``
the interface of a shared store. ``forms.py`` has the two encodings of a page (plain or sealed), and
``shared_keys.py`` the keys of sealed pages. ``mooncake.py`` and ``bundle_store.py`` (over ``s3.py``)
implement shared stores. In a bucket, consecutive pages of one prompt are one object (``bundles.py``), and
``warm_up.py`` fills the memory of a new host.
"""
