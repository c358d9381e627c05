"""The arguments of `llaisys.ray:app` become deployments, or an error that names the argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from llaisys.config import Config
from llaisys.errors import RejectedError
from llaisys.ray import app
from llaisys.ray.builder import RaySettings

ROOT = Path(__file__).parents[3]


def deployments(**arguments: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the gateway's and the replicas' deployment, and the settings of a replica."""
    gateway = app(arguments)._bound_deployment
    settings, replicas = gateway.init_args
    assert replicas._bound_deployment.init_args == (settings,)
    return gateway, replicas._bound_deployment, settings


def test_arguments_of_the_command_line_are_texts() -> None:
    gateway, replica, settings = deployments(
        model="smollm2", num_replicas="3", num_cpus="2", max_num_seqs="16"
    )
    assert settings == {"model": "smollm2", "max_num_seqs": "16", "num_threads": 2}
    assert (replica.num_replicas, replica.ray_actor_options["num_cpus"]) == (3, 2)
    assert replica.max_ongoing_requests == 16 + Config().max_num_queued_reqs
    assert gateway.num_replicas == 1


def test_replicas_follow_the_queue() -> None:
    """A replica is full when its sequences are: more open requests wait in its queue."""
    _, replica, _ = deployments(max_replicas=5, min_replicas=2, max_num_seqs=16)
    found = replica._deployment_config.autoscaling_config
    assert (found.min_replicas, found.max_replicas) == (2, 5)
    assert found.target_ongoing_requests == 16
    router = replica._deployment_config.request_router_config
    assert router.request_router_kwargs == {"target_ongoing_requests": 16}


def test_a_drain_lasts_as_long_as_that_of_a_server() -> None:
    gateway, replica, _ = deployments(shutdown_timeout_s=77)
    for each in (gateway, replica):
        assert each._deployment_config.graceful_shutdown_timeout_s == 77


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"num_replicas": 0}, "num_replicas"),
        ({"num_replicas": 2, "max_replicas": 3}, "num_replicas"),
        ({"num_gpus": "many"}, "num_gpus"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"no_such_setting": 1}, "no_such_setting"),
        ({"api_key": "secret"}, "api_key"),
        ({"host": "0.0.0.0"}, "host"),
        ({"response_store": "r.db"}, "response_store"),
        ({"uds": "/tmp/s"}, "uds"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(RejectedError) as error:
        app(arguments)
    assert name in str(error.value)
    assert "secret" not in str(error.value)


def test_the_example_is_valid() -> None:
    text = (ROOT / "configs" / "ray.yaml").read_text("utf-8")
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    (application,) = schema.applications
    assert application.import_path == "llaisys.ray:app"
    _, replica, settings = deployments(**application.args)
    assert replica._deployment_config.autoscaling_config.max_replicas == 4
    assert schema.http_options is not None
    assert (schema.http_options.host, schema.http_options.port) == (settings["host"], settings["port"])


def test_every_argument_is_documented() -> None:
    page = (ROOT / "docs" / "deployment" / "scale.md").read_text("utf-8")
    assert all(f"`{name}`" in page for name in RaySettings.model_fields)
