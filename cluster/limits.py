"""Warns of what the limits of engines mean: which prompts are refused, and which bypass the prefill pool."""

from cluster.config import ClusterConfig


def limit_warnings(config: ClusterConfig, *, prefill_blocks: int, decode_blocks: int) -> list[str]:
    """Says in words what a reader of `decode.max_model_len` would not expect.

    `prefill_blocks` and `decode_blocks` are KV blocks of one engine, block 0 included.
    """
    decode, prefill, mode = config.decode.engine, config.prefill.engine, config.router.disaggregation
    promised = decode.max_model_len - 1
    colocated = min(promised, decode.max_prompt_tokens(decode_blocks)) if mode != "strict" else 0
    split = (
        min(promised, prefill.max_prompt_tokens(prefill_blocks))
        if config.prefill.replicas and mode != "colocated"
        else 0
    )
    warnings = []
    if max(colocated, split) < promised:
        warnings.append(f"prompts of more than {max(colocated, split)} tokens are refused: no engine computes them")
    if 0 < split < colocated:
        warnings.append(
            f"prompts of more than {split} tokens are computed by decode engines themselves: "
            "prefill engines do not take them"
        )
    if 0 < colocated < split:
        warnings.append(
            f"prompts of more than {colocated} tokens are refused while no prefill engine is up: "
            "decode engines do not take them"
        )
    held = prefill.max_known_tokens(prefill_blocks)
    if mode == "strict" and held < promised:
        warnings.append(
            f"requests of more than {held} tokens, answer included, are refused: "
            "strict, and prefill engines hold no more"
        )
    return warnings
