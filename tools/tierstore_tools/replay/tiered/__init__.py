"""A trace through all tiers of one engine: what is found where, what is moved, and how long a user waits.

``machine`` is what the engine has (capacities, bandwidths, speed of prefill), ``links`` the time that moving
takes, ``conversations`` who continues whom, ``prefetch`` the loads before they are asked for, ``engine`` one
request after the other, ``result`` what came of it.

**What is modelled.** Tiers include one another as in the live store: what is computed is in HBM, is saved to
the host tier at once and written behind to disk, as far as the queue of writes (half of the host tier) has
room; what is found on disk goes to the host tier on its way. Each tier has a policy of its own. A request
arrives when the trace says so. Its time to first token is the time to load what is loaded plus the time to
compute the rest; of the leading blocks that are held, as many are loaded as makes this shortest, so a slow
disk is never worse than none. The disk reads for one request at a time, and so does the way from host to
HBM: a request waits for those before it.

**What is not.** Requests do not wait for each other's computing, and decoding costs nothing: TTFT here is
that of an engine that is not overloaded, and what is compared is the same engine without a store. Loading
does not overlap with computing (layer by layer it partly does). Output tokens are not saved, because
traces do not say which blocks they became. Hash lookups take no time.

**Prefetch.** Only what the store could know is used: after each turn of a conversation the next one is
expected after the median of its own earlier gaps (those after a tool call and those after an answer apart).
Half that gap before, whatever of its prompt is on disk only is read into the host tier, in time that the disk
has to spare; a request that comes meanwhile goes first. Where pages leave the host tier sooner than that, it
is half the time they stay. The first gap of a conversation is never predicted.
"""
