"""``make gpu-check``: all checks that need a GPU, in one run. See :mod:`tierstore_tools.gpu.check`."""
