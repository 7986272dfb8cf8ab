"""Runs the model for the embedded engine: batched prefill, one decode step for all lanes, cache and weight changes.

    place(sequence)    -> a lane, with whatever prefix can be reused
    prefill(sequences) -> their uncached tokens go through the model; where that completes a prompt, one token is drawn
    decode(sequences)  -> one token for each
    release(sequence)  -> the lane is free, its tokens stay for reuse

Layout of a prefill of two rows, the second with four tokens in the cache already (left padding, so the last column is
always the one to draw from; padding writes to the cache's spare position and is never attended to):

    column     0   1   2   3   4   5
    row 0      t0  t1  t2  t3  t4  t5
    row 1      .   .   .   t4  t5  t6
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agentrl.errors import UnavailableError
from agentrl.inference.kv_cache import KVShapeProbe, LaneCache, slot_bytes
from agentrl.inference.lanes import LaneTable
from agentrl.inference.lean import LeanDecoder
from agentrl.inference.sampling import BatchSampler, Sampled, top_entries
from agentrl.inference.sequence import Sequence
from agentrl.inference.weights import apply_weights, checksums, load_model, read_weights

logger = logging.getLogger(__name__)

_PREFILL_PADDED_TOKENS = 4096  # of one forward: bounds its memory, and how long decoding waits
_PREFILL_CHUNK = 1024  # tokens of one sequence per forward
_ARCHIVE_BYTES = 512 * 2**20  # at most, for prefixes of finished sequences beside the lanes
_LEAN_TOLERANCES = {torch.float32: 1e-3}  # on logits, relative and absolute; of half precision, little can be asked
_LEAN_TOLERANCE_HALF = 0.05
_MAX_PADDING = 0.4  # share of a prefill's rows that may be padding before the batch is split


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an embedded engine serves and how much of it at a time. `device` "auto" takes a GPU where there is one."""

    model_path: Path
    max_running_requests: int = 64
    context_length: int = 1024
    num_threads: int = 1
    seed: int = 0
    device: str = "auto"
    weight_version: str = "0"
    lean_decode: bool = True  # a shorter decode step where the architecture is known; equal within rounding


class ModelRunner:
    """Model, cache and lanes. Used by one thread. `version` labels what is sampled from now on."""

    def __init__(self, settings: EngineSettings, *, extra_eos_ids: Iterable[int] = ()) -> None:
        torch.set_num_threads(settings.num_threads)
        self.settings = settings
        self.device = _device(settings.device)
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.model = load_model(settings.model_path, device=self.device, dtype=dtype)
        _check_attention_span(self.model, context_length=settings.context_length)
        self.vocab_size: int = self.model.get_input_embeddings().weight.shape[0]
        self.eos_ids = _eos_ids(self.model, extra_eos_ids)
        self.version = settings.weight_version
        self._dtype = dtype
        self._weights_epoch = 0
        self._generator = torch.Generator(device=self.device).manual_seed(settings.seed)
        shapes = self._probe_shapes()
        capacity = settings.context_length
        self.lanes = LaneTable(
            num_lanes=settings.max_running_requests,
            num_archived=min(settings.max_running_requests, _ARCHIVE_BYTES // slot_bytes(shapes, capacity, dtype)),
            capacity=capacity,
        )
        self._cache = LaneCache(
            shapes, num_slots=self.lanes.num_slots, capacity=capacity, dtype=dtype, device=self.device
        )
        self._sampler: BatchSampler | None = None
        self._sampler_for: list[Sequence] = []
        self._rows = torch.arange(self.lanes.num_slots, device=self.device)
        self._columns = torch.arange(settings.context_length, device=self.device)
        self._lean: LeanDecoder | None = None
        if settings.lean_decode:
            self._lean = self._verified_lean()

    @property
    def uses_lean_decode(self) -> bool:
        """Whether the short decode step was found equal to the model's own forward."""
        return self._lean is not None

    def place(self, sequence: Sequence) -> None:
        """Give a waiting sequence a lane. Needs a free one."""
        token_ids = sequence.token_ids
        placement = self.lanes.place(token_ids, key=self.cache_key(sequence), limit=reuse_limit(sequence))
        self._cache.copy(placement.copies)
        sequence.lane = placement.lane
        sequence.num_in_cache = placement.num_cached
        if sequence.num_admissions == 0:
            sequence.num_cached_tokens = min(placement.num_cached, len(sequence.input_ids))
        sequence.num_admissions += 1

    def cache_key(self, sequence: Sequence) -> str:
        """Prefixes are shared between equal keys: the same namespace, and weights loaded with the same flush."""
        return f"{self._weights_epoch}/{sequence.extra_key}"

    def prefill(self, sequences: Rows[Sequence]) -> None:
        """Push uncached tokens through the model, at most a chunk per sequence.

        A sequence whose cache gets complete no longer `needs_prefill`, and has its next token unless it wants none.
        """
        for batch in _prefill_batches(sequences):
            if batch[0].wants_input_logprobs:
                self._prefill_scored(batch[0])
            else:
                self._prefill_batch(batch)

    def decode(self, sequences: Rows[Sequence]) -> None:
        """One more token for every sequence; each has exactly one token that is not in the cache yet."""
        span = self.lanes.span
        capacity = self.settings.context_length
        token_ids, positions = [0] * span, [capacity] * span
        for sequence in sequences:
            token_ids[sequence.lane] = sequence.output_ids[-1]
            positions[sequence.lane] = sequence.num_in_cache
        length = max(sequence.num_in_cache for sequence in sequences) + 1
        positions_N = torch.tensor(positions, device=self.device)
        self._cache.begin_decode(positions_N, self._rows[:span], length=length)
        visible_NL = self._columns[:length] <= positions_N[:, None]
        logits_NV = self._decode(torch.tensor(token_ids, device=self.device), positions_N, visible_NL)
        if len(sequences) != span or any(sequence.lane != row for row, sequence in enumerate(sequences)):
            logits_NV = logits_NV[torch.tensor([sequence.lane for sequence in sequences], device=self.device)]
        for sequence in sequences:
            sequence.num_in_cache += 1
        self._draw(sequences, logits_NV)

    def compact(self, sequences: Rows[Sequence]) -> None:
        """Keep running lanes dense, so that decoding computes few idle rows."""
        copies = self.lanes.compact({sequence.lane: sequence.num_in_cache for sequence in sequences})
        if copies:
            self._cache.copy(copies)
            moved = next(sequence for sequence in sequences if sequence.lane == copies[-1].source)
            moved.lane = copies[-1].target

    def release(self, sequence: Sequence) -> None:
        """Free the lane; what is in its cache stays for sequences that share the prefix."""
        self.lanes.release(sequence.lane, sequence.token_ids[: sequence.num_in_cache])

    def discard(self, sequence: Sequence) -> None:
        """Free the lane of a sequence that met NaN, and erase it: masked NaN would still spoil its successors."""
        self._cache.erase(sequence.lane)
        self.lanes.release(sequence.lane, ())

    def replace_weights(self, directory: Path, *, forget: bool) -> None:
        """Read, check, then write new weights in place. Raises WeightsError with the old ones intact."""
        apply_weights(self.model, read_weights(self.model, directory))
        if self._lean is not None:
            self._lean.refresh()
        self._weights_epoch += forget

    def checksums(self) -> dict[str, str]:
        """Fingerprint of every parameter."""
        return checksums(self.model)

    @torch.inference_mode()
    def _probe_shapes(self) -> list[tuple[torch.Size, torch.Size]]:
        probe = KVShapeProbe()
        ids = torch.zeros((1, 1), dtype=torch.long, device=self.device)
        mask = torch.zeros((1, 1, 1, 1), dtype=self._dtype, device=self.device)
        self.model(input_ids=ids, attention_mask=mask, position_ids=ids, cache=probe, use_cache=True)
        return probe.shapes

    @torch.inference_mode()
    def _verified_lean(self) -> LeanDecoder | None:
        """The short decode step, if its logits of three successive tokens are those of Hugging Face's forward."""
        if not LeanDecoder.supports(self.model):
            return None
        lean = LeanDecoder(self.model)
        for position in range(3):
            positions_N = torch.full((2,), position, device=self.device)
            ids_N = torch.tensor([position % self.vocab_size, self.vocab_size - 1 - position], device=self.device)
            visible_NL = self._columns[: position + 1] <= positions_N[:, None]
            self._cache.begin_decode(positions_N, self._rows[:2], length=position + 1)
            expected = self._decode(ids_N, positions_N, visible_NL)
            found = lean(ids_N, positions_N, self._mask(visible_NL[:, None, None]), self._cache)
            tolerance = _LEAN_TOLERANCES.get(self._dtype, _LEAN_TOLERANCE_HALF)
            if not torch.allclose(found.float(), expected.float(), atol=tolerance, rtol=tolerance):
                logger.warning("the short decode step differs from the model's own forward: not used")
                return None
        return lean

    def _decode(self, ids_N: torch.Tensor, positions_N: torch.Tensor, visible_NL: torch.Tensor) -> torch.Tensor:
        if self._lean is None:
            return self._forward(ids_N[:, None], positions_N[:, None], visible_NL[:, None, None])[:, -1]
        positions_N = positions_N.clamp(max=self.settings.context_length - 1)
        return self._lean(ids_N, positions_N, self._mask(visible_NL[:, None, None]), self._cache)

    def _mask(self, visible: torch.Tensor) -> torch.Tensor:
        """What is added to attention scores."""
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=self.device)
        return mask.masked_fill_(~visible, float("-inf"))

    @torch.inference_mode()
    def _forward(
        self, ids_NQ: torch.Tensor, positions_NQ: torch.Tensor, visible_N1QK: torch.Tensor, *, num_logits: int = 1
    ) -> torch.Tensor:
        """Logits of the last `num_logits` columns. The additive mask is built once here, not in every layer."""
        output = self.model(
            input_ids=ids_NQ,
            attention_mask=self._mask(visible_N1QK),
            position_ids=positions_NQ.clamp(max=self.settings.context_length - 1),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=num_logits,
        )
        logits: torch.Tensor = output.logits
        return logits

    def _prefill_batch(self, batch: Rows[Sequence]) -> None:
        pending = [sequence.token_ids[sequence.num_in_cache :][:_PREFILL_CHUNK] for sequence in batch]
        logits_NV = self._forward_prefill(batch, pending)[:, -1]
        for sequence, token_ids in zip(batch, pending, strict=True):
            sequence.num_in_cache += len(token_ids)
        done = [row for row, sequence in enumerate(batch) if sequence.num_in_cache == sequence.num_tokens]
        for row in done:
            self._note_prefilled(batch[row])
        drawn = [row for row in done if batch[row].sampling.max_new_tokens > 0]
        if drawn:
            rows = torch.tensor(drawn, device=self.device)
            self._draw([batch[row] for row in drawn], logits_NV[rows])

    def _prefill_scored(self, sequence: Sequence) -> None:
        """Prefill one sequence whole and keep the log-probs of its prompt from `logprob_start` on (first one null)."""
        pending = sequence.token_ids[sequence.num_in_cache :]
        prompt = sequence.input_ids
        num_scored = len(prompt) - 1 - sequence.logprob_start
        num_outputs = len(sequence.output_ids)
        logits_QV = self._forward_prefill([sequence], [pending], num_logits=num_scored + 1 + num_outputs)[0]
        logprobs_TV = torch.log_softmax(logits_QV[:num_scored].float(), dim=-1)
        targets_T = torch.tensor(prompt[sequence.logprob_start + 1 :], dtype=torch.long, device=self.device)
        sequence.input_logprobs = [None, *logprobs_TV.gather(1, targets_T[:, None])[:, 0].tolist()]
        if sequence.top_logprobs_num:
            sequence.input_top_logprobs = [None, *top_entries(logprobs_TV, num_top=sequence.top_logprobs_num)]
        sequence.num_in_cache += len(pending)
        self._note_prefilled(sequence)
        if sequence.sampling.max_new_tokens > 0:
            self._draw([sequence], logits_QV[-1:])

    def _note_prefilled(self, sequence: Sequence) -> None:
        sequence.needs_prefill = False
        self.lanes.note_prefilled(sequence.lane, sequence.token_ids)

    def _forward_prefill(self, batch: Rows[Sequence], pending: Rows[list[int]], *, num_logits: int = 1) -> torch.Tensor:
        capacity = self.settings.context_length
        num_columns = max(len(token_ids) for token_ids in pending)
        ids, positions = [], []
        for sequence, token_ids in zip(batch, pending, strict=True):
            padding, start = num_columns - len(token_ids), sequence.num_in_cache
            ids.append([0] * padding + token_ids)
            positions.append([capacity] * padding + list(range(start, start + len(token_ids))))
        positions_NQ = torch.tensor(positions, device=self.device)
        rows_N = torch.tensor([sequence.lane for sequence in batch], device=self.device)
        if any(sequence.num_in_cache for sequence in batch):
            length = max(sequence.num_in_cache + len(item) for sequence, item in zip(batch, pending, strict=True))
            visible_NQK = self._columns[:length] <= positions_NQ[:, :, None]
        else:
            length = 0
            columns_Q = self._columns[:num_columns]
            real_NQ = positions_NQ < capacity
            causal_QQ = columns_Q <= columns_Q[:, None]
            # Padding sees itself: a row of the mask must not be empty.
            visible_NQK = (causal_QQ & real_NQ[:, None, :]) | (columns_Q == columns_Q[:, None])
        self._cache.begin_prefill(positions_NQ, rows_N, length=length)
        ids_NQ = torch.tensor(ids, device=self.device)
        return self._forward(ids_NQ, positions_NQ, visible_NQK[:, None], num_logits=num_logits)

    @torch.inference_mode()
    def _draw(self, sequences: Rows[Sequence], logits_NV: torch.Tensor) -> None:
        """Sample and append; a NaN row appends an end token and finishes with the stop SGLang reports for it."""
        sampled = self._sampler_of(sequences).sample(logits_NV, generator=self._generator)
        for row, sequence in enumerate(sequences):
            token_id, logprob = sampled.token_ids[row], sampled.logprobs[row]
            if token_id < 0:
                token_id = min(sequence.sampling.stop_token_ids or self.eos_ids or {0})
                sequence.finish_reason = {"type": "stop", "matched": "NaN happened"}
            sequence.append(token_id, logprob, version=self.version)
            if sequence.top_logprobs_num:
                sequence.top_logprobs.append(_top_of(sampled, row=row, num_top=sequence.top_logprobs_num))

    def _sampler_of(self, sequences: Rows[Sequence]) -> BatchSampler:
        if self._sampler is None or self._sampler_for != sequences:
            self._sampler = BatchSampler(
                sequences, vocab_size=self.vocab_size, eos_ids=self.eos_ids, device=self.device
            )
            self._sampler_for = list(sequences)
        return self._sampler


def reuse_limit(sequence: Sequence) -> int:
    """How many leading tokens may come from the cache: the last one must be computed, and so must scored ones."""
    limit = sequence.num_tokens - 1
    return min(limit, sequence.logprob_start) if sequence.wants_input_logprobs else limit


def _top_of(sampled: Sampled, *, row: int, num_top: int) -> list[tuple[float, int]]:
    return sampled.top[row][:num_top] if sampled.top is not None else []


def _prefill_batches(sequences: Rows[Sequence]) -> list[list[Sequence]]:
    """Group sequences whose uncached lengths are alike, under the token budget. Scored prompts go alone."""
    batches = [[sequence] for sequence in sequences if sequence.wants_input_logprobs]
    plain = [sequence for sequence in sequences if not sequence.wants_input_logprobs]
    plain.sort(key=lambda sequence: sequence.num_tokens - sequence.num_in_cache, reverse=True)
    batch: list[Sequence] = []
    width = num_real = 0
    for sequence in plain:
        pending = min(sequence.num_tokens - sequence.num_in_cache, _PREFILL_CHUNK)
        area = width * (len(batch) + 1)
        if batch and (area > _PREFILL_PADDED_TOKENS or num_real + pending < area * (1 - _MAX_PADDING)):
            batches.append(batch)
            batch, num_real = [], 0
        width = width if batch else pending
        batch.append(sequence)
        num_real += pending
    return [*batches, batch] if batch else batches


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _check_attention_span(model: PreTrainedModel, *, context_length: int) -> None:
    """One mask serves all layers: a model that attends only to a window must not see a context longer than that."""
    config = model.config.get_text_config().to_dict()
    window = config.get("sliding_window")
    limited = [kind for kind in config.get("layer_types") or () if "sliding" in kind]
    if window and (limited or model.config.model_type == "mistral") and window < context_length:
        raise UnavailableError(
            f"context_length = {context_length}: the model attends to {window} tokens in some layers, which the "
            f"embedded engine does not imitate; set context_length to at most {window}, or use an SGLang server"
        )


def _eos_ids(model: PreTrainedModel, extra: Iterable[int]) -> frozenset[int]:
    """End tokens of the model configuration, the generation configuration and the tokenizer together."""
    found = set(extra)
    for config in (model.config, model.generation_config):
        eos = config.eos_token_id if config is not None else None
        if isinstance(eos, int):
            found.add(eos)
        elif eos is not None:
            found.update(eos)
    return frozenset(found)
