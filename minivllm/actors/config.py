"""AppArgs: everything under `args:` of serve_config.yaml, checked before anything is started."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from minivllm.core.config import EngineConfig


class LiveSettings(BaseModel):
    """Settings that can change while the engine runs: the `user_config` of the deployment `Engine`. Nothing restarts.

    In `user_config`, a field left out has the value that `args` give it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    consumer_timeout_s: float = Field(60.0, gt=0)
    stall_timeout_s: float = Field(300.0, gt=0)
    max_waiting_requests: int | None = Field(None, ge=1)
    max_waiting_tokens: int | None = Field(None, ge=1)


ApiKey = Annotated[str, StringConstraints(min_length=1, pattern=r"^\S+$")]
"""A header value has no spaces: a key with one could never match."""


class AppArgs(EngineConfig):
    """The arguments of the application: those of the engine (see EngineConfig) and those of the service, side by side.

    A wrong name or value raises pydantic's ValidationError, which names the argument and says why. Values are left out
    of the message: one of the arguments is a list of keys.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True)

    # What clients see
    served_model_name: str | None = Field(None, min_length=1, description="name in the API; default: `model`")
    max_request_bytes: int = Field(8 * 1024**2, ge=1024, description="larger request bodies get 413")
    api_keys: tuple[ApiKey, ...] = Field((), description="when given, requests must carry one of them as bearer token")
    cors_origins: tuple[str, ...] = Field((), description="web origins whose scripts may send requests")
    http_port: int | None = Field(None, ge=1, le=65535, description="port of the ingress, besides the proxy's; or none")
    http_host: str = Field("127.0.0.1", min_length=1, description="address of `http_port`; 0.0.0.0: all machines")

    # The engine's process
    consumer_timeout_s: float = Field(60.0, gt=0, description="requests with output unread for this long are aborted")
    stall_timeout_s: float = Field(300.0, gt=0, description="a step that takes longer makes the engine unhealthy")
    engine_num_cpus: float = Field(1.0, ge=0, description="CPUs that Ray reserves for the engine")
    engine_env_vars: dict[str, str] = Field({}, description="environment variables of the engine's process")

    # The other processes
    num_ingress_replicas: int = Field(1, ge=1, description="processes that speak HTTP and turn text into tokens")
    metrics_history_size: int = Field(3600, ge=1, description="points of block counts that the Metrics actor keeps")

    @model_validator(mode="before")
    @classmethod
    def _name_is_known(cls, values: Any) -> Any:
        """Suggests the argument that a mistyped name is closest to."""
        if isinstance(values, dict):
            for name in values:
                if name not in cls.model_fields:
                    close = difflib.get_close_matches(str(name), cls.model_fields, n=1)
                    hint = f"; did you mean {close[0]!r}?" if close else ""
                    raise ValueError(f"unknown argument {str(name)[:100]!r}{hint}")
        return values

    @model_validator(mode="after")
    def _one_process_has_a_port(self) -> Self:
        if self.http_port is not None and self.num_ingress_replicas > 1:
            raise ValueError("http_port: only one ingress can have it; leave it out, or num_ingress_replicas at 1")
        return self

    @field_validator("device")
    @classmethod
    def _ray_chooses_the_gpu(cls, value: str) -> str:
        if value.startswith("cuda:"):
            raise ValueError("must be 'auto', 'cpu' or 'cuda': which GPU the engine gets is for Ray to choose")
        return value

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model

    def engine_config(self, **changes: Any) -> EngineConfig:
        """Returns the engine's part, with `changes`."""
        return EngineConfig(**(self.model_dump(include=set(EngineConfig.model_fields)) | changes))

    def live_settings(self) -> LiveSettings:
        """Returns the settings in force when there is no `user_config`."""
        return LiveSettings.model_validate(self, from_attributes=True)
