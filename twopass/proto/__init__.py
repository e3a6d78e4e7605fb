"""The gRPC contract and its generated code. Regenerate with `python -m twopass.proto.generate` (needs grpcio-tools)."""
