"""Shows a plan as a table for people."""

from rich import box
from rich.table import Table

from cluster.plan import Plan
from cluster.pool_plan import PoolPlan


def table(plan: Plan) -> Table:
    """The table has one column per pool. It holds no warnings."""
    load = plan.load
    result = Table(
        title=f"{load.num_running} answers at once, "
        f"{load.prompt_tokens} prompt tokens, {load.output_tokens} output tokens",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    result.add_column("per engine", style="bold cyan", overflow="fold")
    for pool in plan.pools:
        result.add_column(f"{pool.role} x{pool.replicas}", justify="right", overflow="fold")
    rows = [_rows(pool) for pool in plan.pools]
    for name in rows[0]:
        result.add_row(name, *(row[name] for row in rows))
    facts = [f"computes in {plan.dtype}"] if plan.dtype else []
    facts += [f"a handoff moves {_size(plan.prompt_kv_bytes)}"] if len(plan.pools) > 1 else []
    facts += [f"in {plan.transfer_s:.3g} s"] if plan.transfer_s is not None else []
    facts += [f"prefill of one prompt takes {plan.prefill_s:.3g} s"] if plan.prefill_s is not None else []
    result.caption = "; ".join(facts)
    return result


def _rows(pool: PoolPlan) -> dict[str, str]:
    ceilings = {f"  by {name}": f"{num}" for name, num in pool.ceilings.items()}
    return {
        "weights": _size(pool.weight_bytes),
        "activations (estimate)": _size(pool.activation_bytes),
        "KV per token": _size(pool.kv_token_bytes),
        "KV per block": _size(pool.block_bytes),
        "usable blocks": f"{pool.num_usable_blocks}",
        "  decided by": pool.blocks_from,
        "KV in all": _size(pool.num_usable_blocks * pool.block_bytes),
        "tokens per sequence": f"{pool.context_tokens}",
        "N_max": f"{pool.num_contexts}",
        "steps per prompt, alone": f"{pool.steps_per_lone_prompt or 'never'}",
        "  beside others": f"{pool.steps_per_prompt or 'never'}",
        "  decodes beside it": f"{pool.num_running}",
        "  its tokens in the first step": f"{pool.first_chunk_tokens}",
        "tokens per step": f"{pool.step_tokens}",
        "sequences at once": "",
        **ceilings,
        "what binds": pool.binds or "nothing",
    }


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
