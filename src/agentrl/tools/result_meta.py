"""What a failed result of a tool server may say in its `_meta`, for those that write it and those that read it."""

from __future__ import annotations

from typing import Final

STATUS_META: Final = "agentrl/status"  # rate_limited, quota, auth or timeout
RETRY_META: Final = "agentrl/retry_after_s"
