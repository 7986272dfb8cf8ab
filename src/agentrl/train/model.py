"""The policy model of the trainer: loaded, checked, and wrapped so that one forward returns log-probs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.autograd.graph import save_on_cpu
from transformers import AutoModelForCausalLM

from agentrl.algo.logprobs import default_chunk_size, token_logprobs
from agentrl.config.sections import RunConfig
from agentrl.errors import ConfigError, UnavailableError
from agentrl.train.context import ATTENTION_NAME, ContextGroup, check_context_parallel
from agentrl.train.liger import use_liger_kernels
from agentrl.train.lora import add_adapter, is_adapter, load_adapter
from agentrl.train.tree_attention import attention_name, model_arguments
from agentrl.train.tree_plan import TreePlan

HEAD_TOLERANCE = 1e-3
PROBE_TOKENS = 8


class PolicyModule(nn.Module):
    """A Hugging Face causal language model whose forward returns log-probs of chosen tokens, never full logits.

    One forward of this module touches every weight that a pass needs, the head included, so the hooks of FSDP2, DDP
    and DeepSpeed gather them at the right time. `causal_lm` is the model to export.
    """

    def __init__(
        self,
        causal_lm: nn.Module,
        *,
        temperature: float,
        chunk_size: int,
        with_entropy: bool,
        offload_activations: bool = False,
    ) -> None:
        super().__init__()
        self.causal_lm: Any = causal_lm
        self.temperature = temperature
        self.chunk_size = chunk_size
        self.with_entropy = with_entropy
        self.offload_activations = offload_activations
        # Accelerate asks the model it shards for its layers by this name.
        self._no_split_modules = causal_lm._no_split_modules
        self._context: ContextGroup | None = None

    def split_positions(self, context: ContextGroup) -> None:
        """Compute only this rank's positions from now on; a forward still returns the log-probs of all tokens."""
        check_context_parallel(self.causal_lm)
        self.causal_lm.set_attn_implementation(ATTENTION_NAME)
        self._context = context

    def forward(
        self,
        input_ids_BT: torch.Tensor,
        predictors_N: torch.Tensor,
        labels_N: torch.Tensor,
        tree: TreePlan | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-prob of each label under softmax(logits / temperature), float32, and the entropy if asked for.

        With `tree`, the input is one sequence [1, T]: the nodes of a token trie.
        """
        if self._context is not None:
            assert tree is None, "layout_rule plans no trees for ranks that share a sequence"
            return self._forward_share(self._context, input_ids_BT, predictors_N, labels_N)
        layout = {} if tree is None else model_arguments(tree)
        with self._saved_activations():
            output = self.causal_lm.base_model(input_ids=input_ids_BT, use_cache=False, **layout)
        hidden_ND = output.last_hidden_state.flatten(0, 1)[predictors_N]
        return self._logprobs(hidden_ND, labels_N)

    def _forward_share(
        self, context: ContextGroup, input_ids_BT: torch.Tensor, predictors_N: torch.Tensor, labels_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        share = context.share_of(input_ids_BT.shape[1], device=input_ids_BT.device)
        with self._saved_activations():
            output = self.causal_lm.base_model(
                input_ids=share.tokens(input_ids_BT),
                position_ids=share.positions_T.expand(input_ids_BT.shape[0], -1),
                use_cache=False,
                context_share=share,
            )
        is_own_N, own = share.own(predictors_N, num_positions=input_ids_BT.shape[1])
        logprobs, entropy = self._logprobs(output.last_hidden_state.flatten(0, 1)[own], labels_N[is_own_N])
        entropy_N = None if entropy is None else share.together(entropy, is_own_N=is_own_N)
        return share.together(logprobs, is_own_N=is_own_N), entropy_N

    def _saved_activations(self) -> AbstractContextManager[None]:
        """Where a forward puts what the backward needs of the layers: CPU memory, pinned for GPUs, or the device."""
        return save_on_cpu(pin_memory=torch.cuda.is_available()) if self.offload_activations else nullcontext()

    def _logprobs(self, hidden_ND: torch.Tensor, labels_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return token_logprobs(
            hidden_ND,
            self.causal_lm.get_output_embeddings().weight,
            labels_N,
            temperature=self.temperature,
            chunk_size=self.chunk_size,
            with_entropy=self.with_entropy,
        )

    @property
    def vocabulary_size(self) -> int:
        """Token ids from 0 to below this have an embedding."""
        return int(self.causal_lm.config.get_text_config().vocab_size)

    @property
    def has_adapter(self) -> bool:
        """Whether a LoRA adapter is trained and the rest of the model is frozen."""
        return any(is_adapter(name) for name, _ in self.named_parameters())

    def tie_weights(self) -> None:
        """Tie input and output embeddings again where the model shares them (after loading shards)."""
        self.causal_lm.tie_weights()


def load_policy(
    model_dir: Path, *, config: RunConfig, with_entropy: bool, adapter_dir: Path | None = None
) -> PolicyModule:
    """Read a model directory into float32 master weights. `adapter_dir` fills the adapter of a `lora_rank` above 0.

    With `bf16`, Accelerate computes in bfloat16 (FSDP2 mixed precision or autocast); the optimizer keeps float32.
    Raises UnavailableError if there is no model or it cannot be loaded, ConfigError if its head is not a plain matrix.
    """
    if not (model_dir / "config.json").is_file():
        raise UnavailableError(f"model_name_or_path = {model_dir}: no config.json there; give a local model directory")
    base = config.model.attention_implementation
    try:
        causal_lm = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=torch.float32,
            attn_implementation=attention_name(base) or base,
            local_files_only=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise UnavailableError(f"model_name_or_path = {model_dir}: cannot load the model: {error}") from error
    except RuntimeError as error:  # what transformers raises for tensors of other shapes
        raise UnavailableError(f"model_name_or_path = {model_dir}: its weights do not fit its config.json") from error
    causal_lm.train()
    if config.model.use_liger_kernel:
        use_liger_kernels(causal_lm)
    if config.model.lora_rank:
        add_adapter(causal_lm, config=config.model)
    if adapter_dir is not None:
        load_adapter(causal_lm, adapter_dir, config=config.model)
    if config.model.gradient_checkpointing or config.model.activation_offloading:
        causal_lm.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    return PolicyModule(
        causal_lm,
        temperature=sampling_temperature(config),
        chunk_size=config.train.loss_seq_chunk_size or default_chunk_size(causal_lm.config.vocab_size),
        with_entropy=with_entropy,
        offload_activations=config.model.activation_offloading,
    )


def sampling_temperature(config: RunConfig) -> float:
    """The temperature tokens are sampled at: log-probs of both sides belong to that distribution."""
    temperature = float(config.inference.preferred_sampling_params.get("temperature", 1.0))
    if temperature <= 0:
        raise ConfigError(
            f"preferred_sampling_params: temperature = {temperature:g}; greedy decoding has no distribution to train, "
            "use a value above 0"
        )
    return temperature


def check_head(policy: PolicyModule) -> None:
    """Refuse models whose logits are not hidden states times the head's weight (soft-capping, scaling, bias).

    Their log-probs would be silently wrong here. Costs one forward of a few tokens; call it before sharding.
    """
    causal_lm = policy.causal_lm
    probe = torch.arange(PROBE_TOKENS, device=causal_lm.device).unsqueeze(0) % causal_lm.config.vocab_size
    with torch.no_grad():
        expected = causal_lm(input_ids=probe, use_cache=False).logits
        hidden = causal_lm.base_model(input_ids=probe, use_cache=False).last_hidden_state
        difference = (hidden @ causal_lm.get_output_embeddings().weight.T - expected).abs().max().item()
    if not difference <= HEAD_TOLERANCE * max(1.0, expected.abs().max().item()):
        raise ConfigError(
            f"{type(causal_lm).__name__}: logits are not hidden states times the output embedding "
            f"(difference {difference:g}: soft-capping, scaling or a bias), which the chunked log-probs need"
        )


def prepare_torch(config: RunConfig) -> None:
    """Seed everything random and bound the compute threads. Call once, before the model is loaded."""
    torch.manual_seed(config.run.seed)
    if not torch.cuda.is_available():
        torch.set_num_threads(config.train.train_threads)
