"""The second part of a schedule: who enters. Arrived sequences come first, then the queue. Nobody overtakes in it: only
its head is ever looked at.
"""

from engine.scheduler.block_manager import NO_BLOCKS
from engine.scheduler.loops_blocks import BlockIds
from engine.scheduler.outcome import Reserved
from engine.scheduler.sequence import Request, Sequence
from engine.scheduler.sequence_table import NEVER
from engine.scheduler.state import SchedulerState
from protocol.arrays import Int32
from protocol.errors import InvalidRequest


def check_servable(state: SchedulerState, request: Request) -> None:
    """Raises InvalidRequest if the request is empty or could wait for ever."""
    config, num_prompt = state.config, len(request.prompt_token_ids)
    if num_prompt < 1:
        raise InvalidRequest("prompt_token_ids", num_prompt, "at least 1 token")
    if request.max_tokens < 1:
        raise InvalidRequest("max_tokens", request.max_tokens, "at least 1")
    if num_prompt > config.max_model_len - 1:
        raise InvalidRequest(
            "prompt_token_ids", num_prompt, f"at most max_model_len - 1 = {config.max_model_len - 1} tokens"
        )
    known = _num_destination_tokens(request) if request.kv == "consumer" else num_prompt
    if state.num_blocks(known) > state.blocks.num_usable:
        room = state.blocks.num_usable * config.block_size
        raise InvalidRequest("prompt_token_ids", num_prompt, f"the KV pool holds {room} tokens")
    whole = not config.enable_chunked_prefill and request.kv != "consumer" and not request.offset
    if whole and num_prompt > config.max_num_batched_tokens:
        limit = f"at most max_num_batched_tokens = {config.max_num_batched_tokens} tokens"
        raise InvalidRequest("prompt_token_ids", num_prompt, f"{limit} while enable_chunked_prefill is off")


def seat_arrived(state: SchedulerState, budget: int) -> int:
    """Seats arrived sequences, with one token each, while there are seats and tokens. Their blocks have room for the
    next token already. Returns what is left of the budget.
    """
    while state.arrived and budget > 0 and state.has_seat():
        sequence = state.arrived.popleft()
        position = _seat(state, sequence, sequence.num_first, sequence.blocks, hashed=sequence.num_first)
        state.table.num[position] = 1
        _note_admission(state, sequence, sequence.num_cached)
        sequence.blocks = NO_BLOCKS
        budget -= 1
    return budget


def admit_waiting(state: SchedulerState, budget: int, *, alone: bool) -> None:
    """Serves the head of the queue until one does not fit: a consumer reserves its destination, others are admitted."""
    while (sequence := state.waiting.head()) is not None and not state.closed:
        if sequence.kv == "consumer":
            if not _reserve(state, sequence):
                break
        elif state.num_blocks(len(sequence.tokens)) > state.blocks.num_usable:
            state.waiting.pop()
            state.drop_swapped(sequence)
            del state.live[sequence.request.key]
            state.events.ended.append((sequence.request.key, "length"))
        else:
            num = _admit(state, sequence, budget, alone=alone) if budget > 0 and state.has_seat() else 0
            if num == 0:
                break
            budget -= num


def _admit(state: SchedulerState, sequence: Sequence, budget: int, *, alone: bool) -> int:
    """Moves the head of the queue into the batch. Returns its tokens in this step; 0 if it does not fit.

    Blocks of a swapped sequence that the prefix cache still has are not copied back.
    """
    config, known = state.config, len(sequence.tokens)
    hits = _lookup(state, sequence, known - 1)
    cached = len(hits) * config.block_size
    computed = max(cached, sequence.num_swapped)
    num = known - computed
    if config.long_prefill_token_threshold and not alone:
        num = min(num, config.long_prefill_token_threshold)
    if not config.enable_chunked_prefill and budget < num <= config.max_num_batched_tokens:
        return 0  # it waits for a step with room; a chunk that exceeds any step is cut, or it would wait for ever
    num = min(num, budget)
    first = state.num_blocks(computed + num)
    full = first if config.prompt_reservation == "none" else state.num_blocks(known)
    blocks = _allocate(state, full, full if config.prompt_reservation == "hold" else first, hits)
    if blocks is None:
        return 0
    state.waiting.pop()
    if sequence.host_blocks:
        state.swap_in += zip(sequence.host_blocks[len(hits) :], blocks[len(hits) :].tolist(), strict=False)
        state.drop_swapped(sequence)
    position = _seat(state, sequence, computed, blocks, hashed=cached)
    _note_admission(state, sequence, computed)
    state.table.num[position] = num
    if computed + num >= state.table.edge[position]:
        state.cache_full_blocks(position, position + 1)
    return num


def _reserve(state: SchedulerState, sequence: Sequence) -> bool:
    """Takes a consumer's whole destination, with the slot of its next token. Returns False if it does not fit."""
    count = state.num_blocks(_num_destination_tokens(sequence.request))
    hits = _lookup(state, sequence, sequence.num_first)
    blocks = _allocate(state, count, count, hits)
    if blocks is None:
        return False
    state.waiting.pop()
    sequence.blocks = blocks
    sequence.num_published = len(hits)
    sequence.num_cached = len(hits) * state.config.block_size
    sequence.stage = "reserved"
    state.num_reserved += 1
    state.events.reserved.append(Reserved(sequence.request.key, sequence.blocks.tolist(), sequence.num_cached))
    return True


def _num_destination_tokens(request: Request) -> int:
    """The prompt and the next token, if the answer has one beyond the first."""
    num_prompt = len(request.prompt_token_ids)
    return min(num_prompt + 1, num_prompt + request.max_tokens - 1)


def _lookup(state: SchedulerState, sequence: Sequence, max_num_tokens: int) -> Int32:
    """Cached blocks of a sequence's known tokens, which cover at most `max_num_tokens` tokens."""
    if not state.config.enable_prefix_caching:
        return NO_BLOCKS
    limit = max_num_tokens // state.config.block_size
    state.table.extend_chain(sequence, limit)
    return state.blocks.lookup(sequence.chain[1 : limit + 1])


def _allocate(state: SchedulerState, room: int, count: int, hits: Int32) -> BlockIds | None:
    """Takes `count` blocks, `hits` first, if `room` blocks are to be had and, while anything runs, the watermark stays
    free. Returns None otherwise.
    """
    spare = int(state.config.watermark * state.blocks.num_blocks) if len(state.table) else 0
    return state.blocks.allocate_if(room + spare, count, hits)


def _seat(state: SchedulerState, sequence: Sequence, computed: int, blocks: BlockIds, *, hashed: int) -> int:
    """Puts a sequence into the table and returns its position. Every full block below `hashed` tokens can be
    found already.
    """
    size = state.config.block_size
    if sequence.kv == "producer":
        cap = sequence.num_first
    elif state.proposer is not None:
        cap = state.config.max_model_len - 1
    else:
        cap = sequence.limit - 1
    edge = (hashed // size + 1) * size if state.config.enable_prefix_caching else NEVER
    state.num_producers += sequence.kv == "producer"
    return state.table.enter(sequence, computed=computed, blocks=blocks, cap=cap, edge=edge)


def _note_admission(state: SchedulerState, sequence: Sequence, num_cached: int) -> None:
    """Notes that a sequence enters with the KV of `num_cached` tokens; what it had lost beyond that is recomputed."""
    note = state.events.resumed if sequence.admitted else state.events.admitted
    note.append((sequence.request.key, num_cached))
    recomputed = max(0, sequence.num_lost - num_cached)
    state.num_recomputed_tokens += recomputed
    if state.thrash is not None and recomputed:
        state.thrash.add(recomputed=recomputed, generated=0)
    sequence.num_lost = 0
    sequence.admitted = True
