"""Sizes that inputs are resized and cropped to, so that a few shapes hold a whole collection."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from .errors import BatchError

# Width and height.
Size = tuple[int, int]


def parse_buckets(text: str) -> tuple[Size, ...]:
    """`1280x720,720x1280` as sizes."""
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)x(\d+)\s*", part)
        if not match or 0 in map(int, match.groups()):
            raise BatchError(f"{part!r} is not WIDTHxHEIGHT")
        sizes.append((int(match[1]), int(match[2])))
    return tuple(sizes)


def choose(width: int, height: int, buckets: Sequence[Size]) -> Size:
    """The bucket that crops least; of equal ones that of the nearest area, then the first."""

    def distance(size: Size) -> tuple[float, float]:
        ratio = abs(math.log(width * size[1] / (height * size[0])))
        area = abs(math.log(width * height / (size[0] * size[1])))
        return (round(ratio, 9), area)

    return min(buckets, key=distance)


def cover(width: int, height: int, bucket: Size) -> Size:
    """The size with the input's aspect ratio that just covers the bucket."""
    if width * bucket[1] >= height * bucket[0]:
        return (max(bucket[0], round(width * bucket[1] / height)), bucket[1])
    return (bucket[0], max(bucket[1], round(height * bucket[0] / width)))
