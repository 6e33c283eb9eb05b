"""Pages shared between hosts, through a distributed store that is there already (Mooncake Store).

The daemon does not speak to that store. An **agent** does, a process beside it that is an ordinary client of
the daemon's: such libraries crash, hang, and write to memory they were given after their calls have returned
(76 MB in one trial), and a registered arena could be read and overwritten by anybody on the network. So:

* no byte from the network lands in the arena. It lands in the agent's own *staging* memory, and one pass
  copies it into a slot and hashes what it copied. What is not exactly the page that was asked for is a miss;
* an agent that hangs is killed, one that crashes is started again. Its session with the daemon ends with it,
  and what it had reserved comes back, as any client's;
* a lane of staging memory whose call failed or came late is never used again in that life.

A page is one object. Its name is made by SHA-256 from the identity, the tokens and keys up to its end, and
the cluster's secret if there is one: a store that keeps the old bytes when a name exists must not be blocked
by somebody who found two prompts with one XXH3. Before the page's bytes stands a header that says all this
again; the reader builds the header that it expects and compares (``objects.py``).

The shared store is no fourth tier. What it holds may go at any time, so the index knows nothing of it: a
lookup whose local answer ends early asks (``Found.remote``, a hint), somebody brings (``FetchOrder``), and
then the pages are in host memory and found like any others.

``orders.py`` is what daemon and agents say to each other, ``supervisor.py`` the daemon's side, ``agent.py``
the process, ``shared_store.py`` what a store must be able to do, ``mooncake.py`` the one there is."""
