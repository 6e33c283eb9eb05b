"""``tierstore-bench scenarios``: OpenAI servers as their clients see them, in four scenarios.

* ``batch``: documents with several questions each, all at once. Tokens/s, hit rate, KV memory, peak memory.
* ``longctx``: a long prompt, new, again, and after restarts. TTFT by the tier that had it.
* ``online``: conversations that arrive by Poisson or by a trace. Goodput under an SLO, TTFT, ITL.
* ``stream``: quick readers, alone and beside many slow ones. ITL and its jitter.

The load is made from a seed: every target gets the same prompts at the same times. A target is an endpoint: a
process that is started here, at a loopback port, or a running server. All targets that are started here serve
one checkpoint, with page pools (or batches) of the same number of tokens.
"""
