"""``make gpu-check``: everything that can only be known on a GPU, in one run. See
:mod:`tierstore_tools.gpu.check`."""
