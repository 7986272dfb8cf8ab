"""Section `inference`: the services that generate, and when one of them is trusted."""

from __future__ import annotations

from pydantic import Field, model_validator

from agentrl.config.section import Section

SAMPLING_BOUNDS = {"temperature": (0, 100), "top_p": (0, 1), "top_k": (-1, 2**31 - 1), "min_p": (0, 1)}


class InferenceConfig(Section):
    """The inference services."""

    inference_url: str | None = Field(
        None,
        description="URL(s), comma separated, of running SGLang servers. Empty: an embedded engine is started.",
    )
    serve_host: str = Field("127.0.0.1", description="Address the embedded engine listens on.")
    serve_port: int = Field(0, ge=0, le=65535, description="Port of the embedded engine; 0 picks a free one.")
    max_running_requests: int = Field(64, ge=1, description="Sequences the embedded engine decodes together.")
    context_length: int = Field(1024, ge=16, description="Longest prompt plus completion the embedded engine accepts.")
    engine_threads: int = Field(1, ge=1, description="Compute threads of the embedded engine.")
    preferred_sampling_params: dict[str, float] = Field(
        default_factory=lambda: {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": -1},
        description="Sampling parameters as JSON: temperature, top_p, top_k, min_p.",
    )
    presence_penalty: float = Field(0.0, description="Sampling penalty; keep 0 for training.")
    frequency_penalty: float = Field(0.0, description="Sampling penalty; keep 0 for training.")
    request_timeout_s: float = Field(120.0, gt=0, description="Seconds one completion may take, retries included.")
    policy_poll_s: float = Field(0.1, gt=0, description="Seconds between looks for a new policy version.")
    canary_tolerance: float = Field(
        0.2,
        gt=0,
        description="Mean |log-prob difference| (nats) to the trainer's on the canary prompts above which a service is "
        "quarantined. Room for bfloat16; where trainer and engines compute in float32, 0.001 will do.",
    )
    canary_interval_s: float = Field(
        10.0, gt=0, description="Seconds between canary checks of a service, beside the one of each new version."
    )
    canary_timeout_s: float = Field(
        20.0, gt=0, description="Seconds without an answer or any progress after which a service counts as hung."
    )
    fleet_dwell_s: float = Field(
        60.0,
        gt=0,
        description="Seconds a service of a fleet keeps a run's weights while another run waits for them, and again as "
        "long at most for what still runs.",
    )

    @model_validator(mode="after")
    def _check_sampling_params(self) -> InferenceConfig:
        for name, value in self.preferred_sampling_params.items():
            if name not in SAMPLING_BOUNDS:
                known = ", ".join(SAMPLING_BOUNDS)
                raise ValueError(f"preferred_sampling_params: {name} is not known; there are {known}")
            low, high = SAMPLING_BOUNDS[name]
            if not low <= value <= high or (name == "top_k" and value != int(value)):
                raise ValueError(f"preferred_sampling_params: {name} = {value:g} is not from {low:g} to {high:g}")
        return self

    @model_validator(mode="after")
    def _check_urls(self) -> InferenceConfig:
        for url in (self.inference_url or "").split(","):
            if self.inference_url is not None and not url.strip().startswith(("http://", "https://")):
                raise ValueError("inference_url: every address, separated by commas, needs the form http://host:port")
        return self
