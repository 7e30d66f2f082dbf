# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""Sort the slots by expert: count, prefix sums, placement. No atomics, so the order is the same every time.

A slot is ``t * TOP_K + k``. A chunk is CHUNK consecutive slots; C is the number of chunks. Experts are local experts.
"""

import triton
import triton.language as tl


@triton.jit
def local_expert(ids_ptr, slots, mask, expert_map_ptr, NUM_EXPERTS: tl.constexpr, NUM_IDS: tl.constexpr):
    """Local expert of each slot as int32, -1 where there is none: an id out of range, or mapped out of range."""
    ids = tl.load(ids_ptr + slots, mask=mask, other=-1).to(tl.int64)
    valid = (ids >= 0) & (ids < NUM_IDS)
    if expert_map_ptr is not None:
        ids = tl.load(expert_map_ptr + ids, mask=valid, other=-1).to(tl.int64)
        valid = (ids >= 0) & (ids < NUM_EXPERTS)
    return tl.where(valid, ids, -1).to(tl.int32)


@triton.jit(do_not_specialize=["num_slots", "num_chunks"])
def count_kernel(
    ids_ptr,  # (T, TOP_K) int32 or int64
    expert_map_ptr,  # (NUM_IDS,) or None
    counts_ptr,  # (E, C) int32, out
    num_slots,
    num_chunks,
    NUM_EXPERTS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Slots per expert in one chunk. Grid: (C,)."""
    chunk = tl.program_id(0)
    slots = chunk * CHUNK + tl.arange(0, CHUNK)
    experts = local_expert(ids_ptr, slots, slots < num_slots, expert_map_ptr, NUM_EXPERTS, NUM_IDS)
    columns = tl.arange(0, E_PAD)
    counts = tl.sum((experts[:, None] == columns[None, :]).to(tl.int32), axis=0)
    tl.store(counts_ptr + columns * num_chunks + chunk, counts, mask=columns < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_chunks"])
def scan_kernel(
    counts_ptr,  # (E, C) int32; in place: how many slots of this expert lie in earlier chunks
    totals_ptr,  # (E,) int32, out
    num_chunks,
    BLOCK: tl.constexpr,
):
    """Prefix sum over the chunks of one expert. Grid: (E,)."""
    expert = tl.program_id(0)
    row = counts_ptr + expert * num_chunks
    before = tl.zeros((), dtype=tl.int32)
    start = 0
    # Not a `range`: the interpreter of Triton 3.6 cannot have num_chunks as a bound (with numpy 2.4).
    while start < num_chunks:
        chunks = start + tl.arange(0, BLOCK)
        counts = tl.load(row + chunks, mask=chunks < num_chunks, other=0)
        tl.store(row + chunks, before + tl.cumsum(counts, axis=0) - counts, mask=chunks < num_chunks)
        before += tl.sum(counts, axis=0)
        start += BLOCK
    tl.store(totals_ptr + expert, before)


@triton.jit(do_not_specialize=["num_slots", "num_chunks", "num_blocks"])
def place_kernel(
    ids_ptr,  # (T, TOP_K)
    expert_map_ptr,  # (NUM_IDS,) or None
    counts_ptr,  # (E, C) int32, as scan_kernel left it
    totals_ptr,  # (E,) int32
    sorted_slots_ptr,  # (S,) int32, out: slots by expert, in rising order within one; the first sum(totals) are set
    block_expert_ptr,  # (num_blocks,) int32, out: the expert of each block of BLOCK_M sorted positions, or -1
    block_start_ptr,  # (num_blocks,) int32, out: its first position
    block_end_ptr,  # (num_blocks,) int32, out: where its expert's positions end
    num_slots,
    num_chunks,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write the sorted order of one chunk, and CHUNK entries of the block tables. Grid: (max(C, blocks / CHUNK),)."""
    chunk = tl.program_id(0)
    columns = tl.arange(0, E_PAD)
    totals = tl.load(totals_ptr + columns, mask=columns < NUM_EXPERTS, other=0)
    ends = tl.cumsum(totals, axis=0)
    starts = ends - totals

    slots = chunk * CHUNK + tl.arange(0, CHUNK)
    experts = local_expert(ids_ptr, slots, slots < num_slots, expert_map_ptr, NUM_EXPERTS, NUM_IDS)
    # A vector mask `&` a scalar one is not a mask in the interpreter of Triton 3.9, hence the bound of 0.
    experts_in_chunk = tl.where(chunk < num_chunks, NUM_EXPERTS, 0)
    first = starts + tl.load(counts_ptr + columns * num_chunks + chunk, mask=columns < experts_in_chunk, other=0)
    earlier = (experts[:, None] == experts[None, :]) & (slots[:, None] > slots[None, :])
    position = tl.gather(first, tl.where(experts < 0, 0, experts), axis=0) + tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(sorted_slots_ptr + position, slots, mask=experts >= 0)

    blocks = chunk * CHUNK + tl.arange(0, CHUNK)
    block_counts = (totals + BLOCK_M - 1) // BLOCK_M
    block_ends = tl.cumsum(block_counts, axis=0)
    ended = (columns[None, :] < NUM_EXPERTS) & (block_ends[None, :] <= blocks[:, None])
    owner = tl.sum(ended.to(tl.int32), axis=1)
    used = owner < NUM_EXPERTS
    owner = tl.where(used, owner, 0)
    # Position of the owner's block 0, counted as if every expert's blocks began at the block number 0.
    origin = starts - (block_ends - block_counts) * BLOCK_M
    exists = blocks < num_blocks
    tl.store(block_expert_ptr + blocks, tl.where(used, owner, -1), mask=exists)
    tl.store(block_start_ptr + blocks, tl.gather(origin, owner, axis=0) + blocks * BLOCK_M, mask=exists)
    tl.store(block_end_ptr + blocks, tl.gather(ends, owner, axis=0), mask=exists)
