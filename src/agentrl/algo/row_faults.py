"""What is wrong with a stored training row: the trainer asks before it uses one, the audit afterwards. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from agentrl.types import DBRecordData


def row_faults(row: DBRecordData, *, is_supervised: bool) -> Iterator[str]:
    """What no model could train on: arrays that do not line up, values that are missing or not finite under the mask.

    Supervised rows need no log-probs and no versions.
    """
    logprobs = row.behaviour_logprobs
    arrays = [row.loss_mask, row.advantages, row.policy_versions, *([] if logprobs is None else [logprobs])]
    if any(array.size != row.token_ids.size for array in arrays):
        yield f"its arrays have lengths {[array.size for array in arrays]} for {row.token_ids.size} tokens"
        return
    mask = row.loss_mask
    if mask.size and mask[0]:
        yield "its first token is trained, which nothing predicts"
    if not np.isfinite(row.advantages[mask]).all():
        yield "an advantage is not finite"
    if logprobs is not None and (num_bad := int((~np.isfinite(logprobs[mask])).sum())):
        yield f"{num_bad} of {int(mask.sum())} trained tokens have no finite log-prob"
    if is_supervised:
        return
    if logprobs is None:
        yield "it was sampled, but has no log-probs"
    if num_bad := int((row.policy_versions[mask] < 0).sum()):
        yield f"{num_bad} of {int(mask.sum())} trained tokens have no policy version"


def model_faults(row: DBRecordData, *, vocabulary_size: int, newest_version: int | None) -> Iterator[str]:
    """Why this model cannot have made a row whose arrays line up: ids it does not know, tokens of a later version."""
    if not row.token_ids.size:
        yield "it has no tokens"
        return
    lowest, highest = int(row.token_ids.min()), int(row.token_ids.max())
    if lowest < 0 or highest >= vocabulary_size:
        wrong = lowest if lowest < 0 else highest
        yield f"its token id {wrong} is not in the model's vocabulary of {vocabulary_size}"
    newest = int(row.policy_versions[row.loss_mask].max(initial=-1))
    if newest_version is not None and newest > newest_version:
        yield f"v{newest_version} is trained, and it has tokens of v{newest}, sampled later"
