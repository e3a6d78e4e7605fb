"""When Ray or the supervisor dies, while a deployment runs or starts, the command ends and nothing is left."""

import os
import signal
import socket

import pytest

from tests.e2e.command import command


@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_a_private_ray_that_loses_a_part_ends_the_command(part: str) -> None:
    with command() as serving:
        port = serving.await_serving()
        os.kill(serving.await_part(part), signal.SIGKILL)
        assert serving.ended() == (2, f"ClusterLost: {part} of the private Ray died")
    socket.create_server(("127.0.0.1", port)).close()


def test_a_killed_supervisor_leaves_nothing() -> None:
    with command() as serving:
        port = serving.await_serving()
        serving.process.kill()
        code, _ = serving.ended()
    assert code == -signal.SIGKILL
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("part", ["gcs_server", "raylet"])
def test_a_signal_while_ray_starts_ends_the_command(part: str) -> None:
    with command() as starting:
        starting.await_part(part)
        starting.process.terminate()
        assert starting.ended() == (130, "stopped")


def test_a_signal_while_the_engines_start_ends_the_command() -> None:
    with command() as starting:
        starting.await_line("starting the router")
        starting.process.send_signal(signal.SIGINT)
        assert starting.ended() == (130, "stopped")


def test_a_part_that_dies_while_ray_starts_ends_the_command() -> None:
    with command() as starting:
        gcs = starting.await_part("gcs_server")
        starting.await_part("raylet")
        os.kill(gcs, signal.SIGKILL)
        assert starting.ended() == (2, "ClusterLost: gcs_server of the private Ray died")
