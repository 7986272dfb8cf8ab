"""A document as it comes back from the database."""

from datetime import UTC
from typing import Any

import bson
from bson.codec_options import CodecOptions

OPTIONS: CodecOptions[dict[str, Any]] = CodecOptions(tz_aware=True, tzinfo=UTC)


def through_bson(document: dict[str, Any]) -> dict[str, Any]:
    return bson.decode(bson.encode(document), codec_options=OPTIONS)
