"""``tierstore-bench scenarios``: what clients of an OpenAI server see, in four ways of use.

==========  =====================================================  ==========================================
scenario    load                                                   figures
==========  =====================================================  ==========================================
batch       documents with several questions each, all waiting     tokens/s, hit rate, KV memory, peak memory
longctx     a long prompt: new, again, after restarts              TTFT by the tier that it came from
online      conversations, arriving by Poisson or by a trace       goodput under an SLO, TTFT, ITL
stream      quick readers, alone and beside many slow ones         ITL, its jitter
==========  =====================================================  ==========================================

The load is made from a seed: every target gets the same prompts at the same times. A target is an endpoint:
a process that is started here, at a loopback port, or one that runs already. All that are started here serve
one checkpoint, with page pools (or batches) of the same number of tokens.
"""
