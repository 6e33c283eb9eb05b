"""Read the images of a request, which are ``data:`` URLs of PNG, JPEG and WebP files. Pillow decodes them
within limits.

The size of an image is read from its header, before any pixel is decoded. The server never fetches a URL.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierstore.extras import install
from tierstore_engine.server.errors import ApiError, bad_request

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_IMAGES = 64
MOST_PIXELS = 7680 * 4320
_FORMATS = ("PNG", "JPEG", "WEBP")
_ORIENTATION = 0x0112  # a tag of EXIF
_URL = re.compile(r"data:image/(?:png|jpe?g|webp);base64,", re.ASCII | re.IGNORECASE)


def check_count(urls: Sequence[str]) -> None:
    """Raise :class:`ApiError` (400) for more images than a request may have."""
    if len(urls) > MOST_IMAGES:
        raise _refused(f"a request has at most {MOST_IMAGES} images, got {len(urls)}")


def read_image(url: str) -> Image:
    """Return the image of a ``data:`` URL, upright and in RGB. Raises :class:`ApiError` (400) for another
    URL, an image of more than ``MOST_PIXELS`` pixels, and for one that is damaged, animated or in another
    format.

    >>> read_image("https://example.com/cat.png")  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    ApiError: images are not fetched from URLs: send data:image/png;base64,…
    """
    given = _URL.match(url)
    if given is None:
        if url.startswith("data:"):
            raise _refused(
                "an image must be data:image/png, jpeg or webp, followed by ;base64, and its bytes"
            )
        raise _refused("images are not fetched from URLs: send data:image/png;base64,…")
    try:
        data = base64.b64decode(url[given.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise _refused("the bytes of an image are not valid base64") from None
    try:
        from PIL import Image as Pillow
        from PIL import UnidentifiedImageError
    except ImportError as error:
        raise _refused(f"images need Pillow ({error}): {install('images')}") from None
    try:
        with Pillow.open(io.BytesIO(data), formats=_FORMATS) as image:
            pixels = image.width * image.height
            if pixels > MOST_PIXELS:
                raise _refused(
                    f"an image has {image.width} × {image.height} pixels, more than {MOST_PIXELS}: "
                    "make it smaller"
                )
            if image.format in ("PNG", "WEBP") and image.is_animated:
                raise _refused("animated images are not supported: send one frame")
            image.load()
            return _upright(image).convert("RGB")
    except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning):
        raise _refused(f"an image has more than {MOST_PIXELS} pixels: make it smaller") from None
    except UnidentifiedImageError:
        raise _refused("an image is not a readable PNG, JPEG or WebP") from None
    except (
        OSError,
        SyntaxError,
        ValueError,
        TypeError,
        EOFError,
        LookupError,
        struct.error,
        zlib.error,
    ) as error:
        raise _refused(f"an image is damaged: {str(error)[:200] or type(error).__name__}") from None


def _upright(image: Image) -> Image:
    """Return an image in the orientation that its EXIF data give. (Pillow's own function also writes the EXIF
    data again, and some EXIF data cannot be written.)"""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    orientation = image.getexif().get(_ORIENTATION)
    turn = turns.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _refused(why: str) -> ApiError:
    return bad_request(why, param="messages")
