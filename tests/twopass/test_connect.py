"""Addresses, and which failures are tried again, where and when."""

import socket
from concurrent import futures

import grpc
import pytest

from tests.hang import HANG_S
from twopass import Client
from twopass.connect import Place, Tries, places
from twopass.errors import ClientClosed, InvalidRequest, Unavailable
from twopass.proto import twopass_pb2 as pb


def test_addresses() -> None:
    assert places("127.0.0.1:1") == [Place("127.0.0.1:1", tls=False)]
    assert places("grpc://a:1, grpcs://b:2") == [Place("a:1", tls=False), Place("b:2", tls=True)]
    assert places(["dns:///a:1", "unix:///run/x"]) == [Place("dns:///a:1", False), Place("unix:///run/x", False)]
    for wrong in ("", "http://a:1", "grpcs://", "a:1,"):
        with pytest.raises(InvalidRequest, match="grpc://HOST:PORT or grpcs://HOST:PORT"):
            places(wrong)


def test_every_address_is_tried_before_there_is_a_wait() -> None:
    tries, visited, waits = Tries(3, 5, 2, None), [], []
    wait_s: float | None = 0.0
    while wait_s is not None:
        visited.append(tries.place)
        waits.append(wait_s := tries.wait_s("UNAVAILABLE"))
    assert visited == [2, 0, 1, 2, 0, 1]
    assert waits[:2] == waits[3:5] == [0.0, 0.0]
    assert waits[2] is not None and 0.05 <= waits[2] <= 0.1
    assert Tries(3, 0, 2, None).wait_s("INTERNAL") is None
    out_of_time = Tries(1, 0, 9, 0.0)
    assert (out_of_time.timeout_s, out_of_time.wait_s("UNAVAILABLE")) == (0.0, None)


class Counting(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio ships no types
    """Ends the first `failures` calls with UNAVAILABLE, after `pieces` pieces."""

    def __init__(self, failures: int, pieces: int) -> None:
        self.failures, self.pieces, self.calls = failures, pieces, 0

    def service(self, details: object) -> grpc.RpcMethodHandler:
        def answer(request: bytes, context: grpc.ServicerContext) -> object:
            self.calls += 1
            for _ in range(self.pieces):
                yield pb.GenerateResponse(text="a", token_ids=[1])
            if self.calls <= self.failures:
                context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
            piece = pb.GenerateResponse(text="b", token_ids=[2], finish_reason=pb.FINISH_REASON_STOP)
            piece.usage.completion_tokens, piece.timing.total_s = 1, 1.0
            yield piece

        return grpc.unary_stream_rpc_method_handler(
            answer, response_serializer=lambda message: message.SerializeToString()
        )


def test_what_is_closed_while_it_waits_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = Counting(failures=9, pieces=0)
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    client = Client(f"127.0.0.1:{port}", timeout_s=HANG_S)
    stream = client.generate("x")
    monkeypatch.setattr("twopass.stream.time.sleep", lambda wait_s: stream.close())
    with pytest.raises(Unavailable, match="not now"):
        next(stream)
    assert handler.calls == 1
    other = client.generate("x")
    monkeypatch.setattr("twopass.stream.time.sleep", lambda wait_s: client.close())
    with pytest.raises(ClientClosed):
        next(other)
    server.stop(0).wait()


@pytest.mark.parametrize(("pieces", "calls"), [(0, 3), (1, 1)])
def test_a_call_is_started_again_before_its_first_piece_and_never_after(pieces: int, calls: int) -> None:
    handler = Counting(failures=2, pieces=pieces)
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # nobody listens there
        address = f"127.0.0.1:{dead.getsockname()[1]},grpc://127.0.0.1:{port}"
        with Client(address, timeout_s=HANG_S) as client:
            if pieces:
                with pytest.raises(Unavailable, match="not now"):
                    client.generate_text("x")
            else:
                assert client.generate_text("x").text == "b"
    assert handler.calls == calls
    server.stop(0).wait()


class Older(Counting):
    """A server from before GenerateMany."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return super().service(details) if details.method.endswith("/Generate") else None


def test_an_older_server_gets_every_call_alone() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers([Older(0, 3)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with Client(f"127.0.0.1:{port}", timeout_s=HANG_S) as client:
            streams = [client.generate(prompt_token_ids=[1]) for _ in range(3)]
            assert [stream.read().text for stream in streams] == ["aaab"] * 3
    finally:
        server.stop(None).wait()
