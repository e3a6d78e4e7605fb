"""The configuration file is checked: names, types, overrides, and the words of each error."""

from pathlib import Path

import pytest

from cluster.config import ClusterConfig, from_tree, load
from protocol.errors import ConfigError


def arithmetic(*overrides: str) -> ClusterConfig:
    return load(None, ["runner=arithmetic", *overrides])


def test_the_shipped_example_needs_only_a_model() -> None:
    path = Path(__file__).parents[2] / "deploy" / "local.yaml"
    with pytest.raises(ConfigError, match="^model: "):
        load(path)
    config = load(path, ["model=/models/tiny"])
    assert (config.model, config.prefill.replicas, config.decode.replicas) == ("/models/tiny", 1, 1)
    assert config.router.grpc_host == "127.0.0.1"


def test_overrides_win_and_are_typed() -> None:
    config = arithmetic("decode.max_num_seqs=7", "dtype=float32", "prefill.replicas=0", "router.replica_timeout_s=2")
    assert config.decode.engine.max_num_seqs == 7
    assert config.dtype == "float32"
    assert config.prefill.replicas == 0
    assert config.router.replica_timeout_s == 2.0


def test_prefill_always_holds_and_decode_checks() -> None:
    config = arithmetic()
    assert config.prefill.engine.prompt_reservation == "hold"
    assert config.decode.engine.prompt_reservation == "check"
    with pytest.raises(ConfigError, match=r"prefill\.prompt_reservation: 'none'"):
        arithmetic("prefill.prompt_reservation=none")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("decode.max_num_seq=3", r"decode\.max_num_seq: no such key; did you mean decode\.max_num_seqs\?"),
        ("prefill.preemption=swap", r"prefill\.preemption: a prefill engine"),
        ("prefill.num_speculative_tokens=3", r"prefill\.num_speculative_tokens: a prefill engine"),
        ("decode.preemption=swap", r"decode\.preemption: swap needs num_host_blocks or swap_space_bytes"),
        ("grpc_port=3", r"grpc_port: no such key; did you mean router\.grpc_port\?"),
        ("max_num_seqs=3", r"did you mean prefill\.max_num_seqs or decode\.max_num_seqs\?"),
        ("decod.replicas=3", r"decod: no such key; did you mean decode\?"),
        ("zzz=3", r"zzz: no such key$"),
        ("decode.max_num_seqs=many", r"decode\.max_num_seqs: 'many' is not allowed"),
        ("decode.max_num_seqs=true", r"decode\.max_num_seqs: True is not allowed"),
        ("decode.max_num_seqs=0", r"decode\.max_num_seqs: 0 is below 1"),
        ("decode.max_num_batched_tokens=63", r"decode\.max_num_batched_tokens: 63 is below max_num_seqs: 64"),
        ("prefill.max_num_seqs=2049", r"prefill\.max_num_batched_tokens: 2048 is below max_num_seqs: 2049"),
        ("decode.watermark=1.5", r"decode\.watermark: 1\.5"),
        ("decode.replicas=0", r"decode\.replicas: 0 is below 1"),
        ("prefill.replicas=-1", r"prefill\.replicas: -1 is below 0"),
        ("decode.num_gpus=2", r"decode\.num_gpus: 2 is not 0 or 1: there is no tensor parallelism"),
        ("decode.gpu_memory_utilization=1.5", r"decode\.gpu_memory_utilization: 1\.5 is not in \(0, 1\]"),
        ("decode.stall_timeout_s=0", r"decode\.stall_timeout_s: 0\.0 is not above 0"),
        ("decode.num_threads=0", r"decode\.num_threads: 0 is below 1"),
        ("dtype=float8", r"dtype: 'float8' is not allowed: .*'auto', 'bfloat16', 'float16' or 'float32'"),
        ("log_level=loud", r"log_level: 'loud' is not allowed"),
        ("transfer.checksum=3", r"transfer\.checksum: 3 is not allowed"),
        (
            "router.otlp_endpoint=127.0.0.1:4318",
            r"router\.otlp_endpoint: '127\.0\.0\.1:4318' is no URL of http or https",
        ),
        (
            "transfer.transport=pigeon",
            r"transfer\.transport: 'pigeon' is not one of auto, shared_memory, ",
        ),
        ("decode.block_size=32", r"prefill\.block_size: 16 differs from decode\.block_size 32"),
        ("decode=3", r"decode: 3 is not a mapping"),
        ("decode.max_num_seqs", r"--set decode\.max_num_seqs: expected key=value"),
        ("=3", r"--set =3: expected key=value"),
        ("decode.max_num_seqs=[", r"the value is not YAML"),
        ("runner.kind=torch", r"--set runner\.kind=torch: runner is not a section"),
    ],
)
def test_what_is_wrong_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arithmetic(override)


def test_colocated_pools_may_differ_in_block_size() -> None:
    assert arithmetic("prefill.replicas=0", "decode.block_size=32").decode.engine.block_size == 32


def test_strict_disaggregation_needs_a_prefill_pool() -> None:
    assert arithmetic("router.disaggregation=strict").router.disaggregation == "strict"
    with pytest.raises(ConfigError, match="disaggregation: strict refuses every request where prefill.replicas is 0"):
        arithmetic("router.disaggregation=strict", "prefill.replicas=0")


def test_the_torch_runner_needs_a_model() -> None:
    with pytest.raises(ConfigError, match="^model: "):
        from_tree({})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "the file holds no mapping"),
        ("a: [\n", "not YAML"),
        ("prefill: 3\n", "prefill: 3 is not a mapping"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.yaml: No such file"):
        load(tmp_path / "nowhere.yaml")


def test_an_empty_section_means_defaults() -> None:
    assert from_tree({"runner": "arithmetic", "decode": None}).decode.replicas == 1


def test_int8_weights_are_for_cpu_engines_that_have_weights() -> None:
    assert load(None, ["model=somewhere"]).quantization == "none"
    assert load(None, ["model=somewhere", "quantization=int8", "dtype=float32"]).quantization == "int8"
    with pytest.raises(ConfigError, match="quantization: int8, but the arithmetic runner has no weights"):
        arithmetic("quantization=int8")
    for pool in ("prefill", "decode"):
        with pytest.raises(ConfigError, match=rf"quantization: int8 .* on CPUs alone, but {pool}\.num_gpus is 1"):
            load(None, ["model=somewhere", "quantization=int8", f"{pool}.num_gpus=1"])
    with pytest.raises(ConfigError, match="quantization: 'int4' is not allowed"):
        load(None, ["model=somewhere", "quantization=int4"])
