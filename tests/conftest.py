"""What all tests share."""

import gc
import os

import pytest

pytest.register_assert_rewrite("tierstore.testing")  # the conformance suites say what they compared

# Where these are set, pytest looks for the best alignment of two things that ought to be equal. For two pages
# of random bytes that takes longer than any test may; without it the first difference is said, at once.
for _name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(_name, None)

# The models of the tests are so small that a second thread of torch only costs. On a busy machine its threads
# wait for one another most of the time. Set before anything imports torch, and inherited by every process.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_finish() -> None:
    """What is there before the first test stays: tests that ask for a collection (to see that something has
    gone) need not look through all of torch each time."""
    gc.collect()
    gc.freeze()
