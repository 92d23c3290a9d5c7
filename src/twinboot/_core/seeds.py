"""One seed for a run, and an independent seed for each use of it.

Every random number of this package comes from a generator with the seed `derive(seed, purpose, count)`. No global
generator is read or changed. To resume, a run needs its counters alone, and no state of a generator, whatever the
device or the number of workers.
"""

from __future__ import annotations

import operator
from hashlib import blake2b
from typing import SupportsIndex

from .checks import shown

BITS = 1024  # the most of a seed: `derive` prints its parts, and Python does not print integers of thousands of digits


def derive(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on their order.

    >>> derive(0, "noise", 1) == derive(0, "noise", 1)
    True
    >>> derive(0, "noise", 1) == derive(0, "noise", 2)
    False
    """
    digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def checked(seed: SupportsIndex) -> int:
    """The seed as an int. Refuses what is not an integer, or too long."""
    try:
        found = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed must be an integer, not {shown(seed)}.") from None
    if found.bit_length() > BITS:
        raise ValueError(f"seed must be an integer of at most {BITS} bits, not one of {found.bit_length()}.")
    return found
