"""``tierstore-bench longctx``: a 100K-token prompt, cold and from every tier.

``settings`` has the options, ``session`` runs one prompt on one engine, ``cases`` is the experiment,
``worker`` is the new process of the disk case, ``plot`` draws.
"""
