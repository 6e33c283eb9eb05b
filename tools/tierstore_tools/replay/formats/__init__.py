"""Traces as they are published, read into one shape.

``load`` is all that others need: it finds out the format from the content, reads the file once, and counts
what it could not read. A format is one file here, a generator of requests: ``jsonl`` (Mooncake, Bailian),
``weka`` (agent sessions), ``lengths`` (CSV without ids). ``lines`` reads bytes and keeps the complaints.

**Damage.** A line that cannot be read is left out and counted, and the first one is told as ``file:line:
what``: a download that was cut must not cost a run. When more than a tenth of the lines (or sessions) is
unreadable, the file is not what it is taken for and is refused.
"""

from tierstore_tools.replay.formats.lengths import LengthsTrace
from tierstore_tools.replay.formats.load import FORMATS, Loaded, load

__all__ = ["FORMATS", "LengthsTrace", "Loaded", "load"]
