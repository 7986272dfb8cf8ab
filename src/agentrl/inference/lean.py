"""A decode step of the Llama family (Llama, Mistral, Qwen2, Qwen3) with few operations, for `ModelRunner`.

Hugging Face's forward spends much of a small model's step in Python modules and many small operations. This one does
the same arithmetic on the same parameters: query/key/value and gate/up projections are joined by making the parameters
views of one tensor, so weights loaded in place are seen at once. `ModelRunner` checks it against Hugging Face's logits
when it starts and does without it where they differ; other architectures always use Hugging Face's forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own convention
from torch import nn
from transformers import PreTrainedModel

from agentrl.inference.kv_cache import LaneCache

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Tensors of one decoder layer. Joined weights [out, in]; `qk_norm` [query and key heads, head_dim] or None."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor
    middle_norm: torch.Tensor
    qk_norm: torch.Tensor | None


class LeanDecoder:
    """Decodes one token for every row of a batch."""

    def __init__(self, model: PreTrainedModel) -> None:
        config, body = model.config, model.model
        self._body: Any = body
        self._model: Any = model
        self._num_query_heads: int = config.num_attention_heads
        self._num_key_heads: int = config.num_key_value_heads
        self._head_dim: int = body.layers[0].self_attn.head_dim
        self._eps: float = config.rms_norm_eps
        self._joined = [
            (
                _join_weights(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                _join_weights(layer.mlp.gate_proj, layer.mlp.up_proj),
            )
            for layer in body.layers
        ]
        self.refresh()

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        """Whether the model is of the family, with the usual activation and no biases in its feed-forward part."""
        config = model.config
        return (
            config.model_type in MODEL_TYPES
            and config.hidden_act == "silu"
            and all(layer.mlp.gate_proj.bias is None for layer in model.model.layers)
        )

    def refresh(self) -> None:
        """Rebuild the small tensors that are copies. To be called after weights changed in place."""
        self._layers = [
            self._layer(module, qkv=qkv, gate_up=gate_up)
            for module, (qkv, gate_up) in zip(self._body.layers, self._joined, strict=True)
        ]

    @torch.inference_mode()
    def __call__(
        self, ids_N: torch.Tensor, positions_N: torch.Tensor, mask: torch.Tensor, cache: LaneCache
    ) -> torch.Tensor:
        """Logits [N, vocabulary]. `cache.begin_decode` was called; `mask` [N, 1, 1, length] is added to the scores."""
        num_rows, dim = ids_N.shape[0], self._head_dim
        num_q, num_k = self._num_query_heads, self._num_key_heads
        hidden = F.embedding(ids_N, self._body.embed_tokens.weight)
        cos_N1D, sin_N1D = self._rotation(hidden, positions_N)
        for index, layer in enumerate(self._layers):
            normed = F.rms_norm(hidden, hidden.shape[-1:], layer.input_norm, self._eps)
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(num_rows, num_q + 2 * num_k, dim)
            rotated = self._rotate(qkv[:, : num_q + num_k], layer, cos_N1D, sin_N1D)
            keys, values = cache.update(rotated[:, num_q:, None], qkv[:, num_q + num_k :, None], index)
            # The query heads of one key head stand side by side like queries of one sequence: nothing is repeated.
            queries = rotated[:, :num_q].view(num_rows, num_k, num_q // num_k, dim)
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            hidden = hidden + F.linear(attended.reshape(num_rows, num_q * dim), layer.output, layer.output_bias)
            normed = F.rms_norm(hidden, hidden.shape[-1:], layer.middle_norm, self._eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate).mul_(up), layer.down)
        normed = F.rms_norm(hidden, hidden.shape[-1:], self._body.norm.weight, self._eps)
        return F.linear(normed, self._model.lm_head.weight)

    def _rotation(self, hidden: torch.Tensor, positions_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine of the rotary embedding, [N, 1, head_dim]."""
        cos, sin = self._body.rotary_emb(hidden[None], positions_N[None])
        half = self._head_dim // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        return cos[0, :, None], signed[0, :, None]

    def _rotate(
        self, qk_NHD: torch.Tensor, layer: _Layer, cos_N1D: torch.Tensor, sin_N1D: torch.Tensor
    ) -> torch.Tensor:
        if layer.qk_norm is not None:
            qk_NHD = F.rms_norm(qk_NHD, qk_NHD.shape[-1:], None, self._eps) * layer.qk_norm
        swapped = qk_NHD.roll(self._head_dim // 2, dims=-1)
        return torch.addcmul(qk_NHD * cos_N1D, swapped, sin_N1D)

    def _layer(self, module: Any, *, qkv: torch.Tensor, gate_up: torch.Tensor) -> _Layer:
        attention = module.self_attn
        biases = [projection.bias for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]
        qk_norm = None
        if hasattr(attention, "q_norm"):
            norms = (attention.q_norm.weight, attention.k_norm.weight)
            counts = (self._num_query_heads, self._num_key_heads)
            qk_norm = torch.cat([norm.expand(count, -1) for norm, count in zip(norms, counts, strict=True)])
        return _Layer(
            qkv=qkv,
            qkv_bias=None if biases[0] is None else torch.cat(biases),
            output=attention.o_proj.weight,
            output_bias=attention.o_proj.bias,
            gate_up=gate_up,
            down=module.mlp.down_proj.weight,
            input_norm=module.input_layernorm.weight,
            middle_norm=module.post_attention_layernorm.weight,
            qk_norm=qk_norm,
        )


def _join_weights(*projections: nn.Linear) -> torch.Tensor:
    """One weight tensor; each projection's parameter becomes a view of its rows."""
    joined = torch.cat([projection.weight.data for projection in projections])
    start = 0
    for projection in projections:
        rows = projection.weight.shape[0]
        projection.weight.data = joined[start : start + rows]
        start += rows
    return joined
