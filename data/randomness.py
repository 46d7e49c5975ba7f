"""Seeds by name: every random choice of a run is derived from what it is for, never from a shared generator's
history."""

from __future__ import annotations

import hashlib
import operator
from typing import SupportsIndex


def key(*parts: SupportsIndex | str) -> int:
    """A 63-bit seed that is a pure function of ``parts``.

    ``key("stream", seed, epoch)`` is the same on every machine, process and Python version. Different parts give
    unrelated seeds, so neighbouring run seeds do not share streams. NumPy integers count as the integers they stand
    for.

    Raises TypeError for anything but integers and strings: the repr of other objects is not stable.
    """
    plain = tuple(part if isinstance(part, str) else operator.index(part) for part in parts)
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
