"""app: builds the application of Ray Serve, as `serve run` and `serve deploy` call it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ray import serve
from ray.serve import Application

from llaisys.config import Config, load_config
from llaisys.errors import RejectedError
from llaisys.ray.gateway import Gateway
from llaisys.ray.replica import Replica
from llaisys.ray.router import PrefixAffinityRouter
from llaisys.server.listener import REQUESTS_MAX
from llaisys.server.middleware.hosts import check_exposure

# Settings that a replica cannot apply: it has no socket, and its files and ports would belong to one replica.
NOT_OF_REPLICAS = (
    *("uds", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "root_path"),
    *("chat_store", "response_store", "session_store", "prefix_cache_dir", "kv_events_config"),
)


class RaySettings(BaseModel):
    """What Ray decides; every other argument of `app` is a setting of `llaisys serve`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_replicas: int | None = Field(
        None, ge=1, description="replicas (default: 1, or by load if max_replicas is set)"
    )
    min_replicas: int = Field(1, ge=0, description="fewest replicas when their number follows the load")
    max_replicas: int | None = Field(None, ge=1, description="most replicas; setting it turns autoscaling on")
    target_ongoing_requests: int | None = Field(
        None,
        ge=1,
        description="open requests of a replica above which another is started, and new conversations go "
        "elsewhere (default: max_num_seqs, so that replicas are added once requests wait)",
    )
    upscale_delay_s: float = Field(30.0, ge=0, description="seconds of high load before replicas are added")
    downscale_delay_s: float = Field(
        600.0, ge=0, description="seconds of low load before replicas are removed, with their cached prefixes"
    )
    num_cpus: float = Field(
        1, ge=0, description="CPUs that Ray reserves for a replica; setting it also sets num_threads"
    )
    num_gpus: float = Field(0, ge=0, description="GPUs that Ray reserves for a replica")
    num_gateways: int = Field(1, ge=1, description="processes that pass requests on")
    max_surge_percent: int = Field(
        0,
        ge=0,
        le=100,
        description="replicas that an update starts before it stops old ones, in percent; needs free CPUs",
    )

    @model_validator(mode="after")
    def _one_number(self) -> RaySettings:
        if self.num_replicas is not None and self.max_replicas is not None:
            raise ValueError(
                "num_replicas and max_replicas exclude each other; set max_replicas to follow the load"
            )
        return self


def app(args: dict[str, Any]) -> Application:
    """Return the application: gateways over replicas of one configuration.

    `args`: RaySettings, and settings of `llaisys serve` by the names of their YAML keys. Raises RejectedError
    naming the argument.
    """
    own = {name: value for name, value in args.items() if name in RaySettings.model_fields}
    try:
        ray_settings = RaySettings(**own)
    except ValidationError as e:
        first = e.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "num_replicas"
        raise RejectedError(f"{name}: {first['msg']}", param=name) from e
    settings = {name: value for name, value in args.items() if name not in own}
    if "api_key" in settings:
        raise RejectedError(
            "api_key: Ray shows the arguments of an application; set LLAISYS_API_KEY in the environment of "
            "the nodes (runtime_env.env_vars), or api_key_file",
            param="api_key",
        )
    if "num_threads" not in settings and ray_settings.num_cpus >= 1 and "num_cpus" in own:
        settings["num_threads"] = int(ray_settings.num_cpus)
    config = load_config(settings)
    check_exposure(config)
    if wrong := [name for name in NOT_OF_REPLICAS if name in config.model_fields_set]:
        raise RejectedError(
            f"{wrong[0]} cannot be set on Ray Serve: replicas do not share it", param=wrong[0]
        )
    replicas = _replicas(ray_settings, config).bind(settings)
    gateways: serve.Deployment = serve.deployment(  # type: ignore[assignment]  # of a class, it returns that
        serve.ingress()(Gateway),
        name="Gateway",
        num_replicas=ray_settings.num_gateways,
        max_ongoing_requests=REQUESTS_MAX,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.shutdown_timeout_s,
    )
    return gateways.bind(settings, replicas)


def _replicas(ray_settings: RaySettings, config: Config) -> serve.Deployment:
    target = ray_settings.target_ongoing_requests or config.max_num_seqs
    number: dict[str, Any] = {"num_replicas": ray_settings.num_replicas or 1}
    if ray_settings.max_replicas is not None:
        number = {
            "autoscaling_config": {
                "min_replicas": ray_settings.min_replicas,
                "max_replicas": ray_settings.max_replicas,
                "target_ongoing_requests": target,
                "upscale_delay_s": ray_settings.upscale_delay_s,
                "downscale_delay_s": ray_settings.downscale_delay_s,
            }
        }
    return serve.deployment(  # type: ignore[return-value]  # as above
        Replica,
        name="Replica",
        # The engine's own queue is the limit: it is fair to each key and responds 429.
        max_ongoing_requests=config.max_num_seqs + config.max_num_queued_reqs,
        ray_actor_options={"num_cpus": ray_settings.num_cpus, "num_gpus": ray_settings.num_gpus},
        graceful_shutdown_timeout_s=config.shutdown_timeout_s,
        max_surge_percent=ray_settings.max_surge_percent,
        request_router_config={
            "request_router_class": PrefixAffinityRouter,
            "request_router_kwargs": {"target_ongoing_requests": target},
        },
        **number,
    )
