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


@triton.jit
def rank_in_chunk(experts, slots):
    """How many earlier slots of the chunk have the same expert; both (CHUNK,)."""
    earlier = (experts[:, None] == experts[None, :]) & (slots[:, None] > slots[None, :])
    return tl.sum(earlier.to(tl.int32), axis=1)


@triton.jit
def write_tables(
    chunk,
    totals,
    before,
    experts,
    slots,
    sorted_slots_ptr,
    block_expert_ptr,
    block_count_ptr,
    tail_slots_ptr,
    tail_expert_ptr,
    tail_count_ptr,
    num_blocks,
    num_tails,
    NUM_EXPERTS: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
):
    """Place one chunk of slots, and CHUNK entries of the tables of blocks and of tails.

    totals (E_PAD,): slots of each expert; before (E_PAD,): those of them in earlier chunks; experts and slots (CHUNK,).
    """
    rest = totals % BLOCK_M
    has_tail = rest <= TAIL_M  # also where the rest is 0: that tail has no slots
    main = tl.where(has_tail, totals - rest, totals)
    block_counts = (main + BLOCK_M - 1) // BLOCK_M
    block_ends = tl.cumsum(block_counts, axis=0)
    first = (block_ends - block_counts) * BLOCK_M
    expert = tl.where(experts < 0, 0, experts)
    rank = tl.gather(before, expert, axis=0) + rank_in_chunk(experts, slots)
    in_main = rank < tl.gather(main, expert, axis=0)
    tl.store(sorted_slots_ptr + tl.gather(first, expert, axis=0) + rank, slots, mask=(experts >= 0) & in_main)
    write_blocks(
        chunk,
        block_ends,
        first + main,
        block_expert_ptr,
        block_count_ptr,
        num_blocks,
        NUM_EXPERTS,
        E_PAD,
        CHUNK,
        BLOCK_M,
    )
    if TAIL_M > 0:
        rest = totals - main
        tail_counts = (rest > 0).to(tl.int32)
        tail_ends = tl.cumsum(tail_counts, axis=0)
        first = (tail_ends - tail_counts) * TAIL_M
        position = tl.gather(first - main, expert, axis=0) + rank
        tl.store(tail_slots_ptr + position, slots, mask=(experts >= 0) & (in_main == 0))
        write_blocks(
            chunk,
            tail_ends,
            first + rest,
            tail_expert_ptr,
            tail_count_ptr,
            num_tails,
            NUM_EXPERTS,
            E_PAD,
            CHUNK,
            TAIL_M,
        )


@triton.jit
def write_blocks(
    chunk,
    block_ends,
    slot_ends,
    expert_ptr,
    count_ptr,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """CHUNK entries of a table of blocks. Per expert (E_PAD,): where its blocks end, and its positions in the slots."""
    columns = tl.arange(0, E_PAD)
    blocks = chunk * CHUNK + tl.arange(0, CHUNK)
    ended = (columns[None, :] < NUM_EXPERTS) & (block_ends[None, :] <= blocks[:, None])
    owner = tl.sum(ended.to(tl.int32), axis=1)
    used = owner < NUM_EXPERTS
    owner = tl.where(used, owner, 0)
    count = tl.gather(slot_ends, owner, axis=0) - blocks * BLOCK_M
    exists = blocks < num_blocks
    tl.store(expert_ptr + blocks, tl.where(used, owner, -1), mask=exists)
    tl.store(count_ptr + blocks, tl.where(used, tl.where(count < BLOCK_M, count, BLOCK_M), 0), mask=exists)


@triton.jit
def sort_few(
    ids_ptr,
    expert_map_ptr,
    sorted_slots_ptr,
    block_expert_ptr,
    block_count_ptr,
    num_slots,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    S_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """All of it for S <= S_PAD in one program, by comparing every slot with every other: three times faster at 64."""
    slots = tl.arange(0, S_PAD)
    experts = local_expert(ids_ptr, slots, slots < num_slots, expert_map_ptr, NUM_EXPERTS, NUM_IDS)
    same = experts[:, None] == experts[None, :]
    rank = tl.sum((same & (slots[:, None] > slots[None, :])).to(tl.int32), axis=1)
    total = tl.sum(same.to(tl.int32), axis=1)
    # The first slot of a block stands for it, so the blocks of smaller experts can be counted.
    first = ((experts >= 0) & (rank % BLOCK_M == 0)).to(tl.int32)
    block = rank // BLOCK_M + tl.sum(tl.where(experts[None, :] < experts[:, None], first[None, :], 0), axis=1)
    tl.store(sorted_slots_ptr + block * BLOCK_M + rank % BLOCK_M, slots, mask=experts >= 0)
    count = total - rank
    tl.store(block_expert_ptr + block, experts, mask=first > 0)
    tl.store(block_count_ptr + block, tl.where(count < BLOCK_M, count, BLOCK_M), mask=first > 0)
    unused = (slots >= tl.sum(first, axis=0)) & (slots < num_blocks)  # num_blocks <= S
    tl.store(block_expert_ptr + slots, tl.full((S_PAD,), -1, tl.int32), mask=unused)
    tl.store(block_count_ptr + slots, tl.zeros((S_PAD,), dtype=tl.int32), mask=unused)


@triton.jit
def sort_chunk(
    chunk,
    ids_ptr,
    expert_map_ptr,
    sorted_slots_ptr,
    block_expert_ptr,
    block_count_ptr,
    tail_slots_ptr,
    tail_expert_ptr,
    tail_count_ptr,
    num_slots,
    num_blocks,
    num_tails,
    NUM_EXPERTS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    E_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
):
    """All of it for one chunk, in one program that reads all S <= S_PAD ids: no other program is waited for."""
    all_slots = tl.arange(0, S_PAD)
    all_experts = local_expert(ids_ptr, all_slots, all_slots < num_slots, expert_map_ptr, NUM_EXPERTS, NUM_IDS)
    # Slots without an expert are counted behind the last one.
    bins: tl.constexpr = 2 * E_PAD
    counted = tl.where(all_experts < 0, E_PAD, all_experts)
    counted_before = tl.where(all_slots < chunk * CHUNK, counted, E_PAD)
    columns = tl.arange(0, E_PAD)
    totals = tl.gather(tl.histogram(counted, bins), columns, axis=0)
    before = tl.gather(tl.histogram(counted_before, bins), columns, axis=0)
    slots = chunk * CHUNK + tl.arange(0, CHUNK)
    experts = local_expert(ids_ptr, slots, slots < num_slots, expert_map_ptr, NUM_EXPERTS, NUM_IDS)
    write_tables(
        chunk,
        totals,
        before,
        experts,
        slots,
        sorted_slots_ptr,
        block_expert_ptr,
        block_count_ptr,
        tail_slots_ptr,
        tail_expert_ptr,
        tail_count_ptr,
        num_blocks,
        num_tails,
        NUM_EXPERTS,
        E_PAD,
        CHUNK,
        BLOCK_M,
        TAIL_M,
    )


@triton.jit
def sort_slots(
    program,
    ids_ptr,
    expert_map_ptr,
    sorted_slots_ptr,
    block_expert_ptr,
    block_count_ptr,
    tail_slots_ptr,
    tail_expert_ptr,
    tail_count_ptr,
    num_slots,
    num_blocks,
    num_tails,
    NUM_EXPERTS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    E_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
):
    """What one of the programs does that sort together, without waiting for each other; see place_kernel's tables."""
    if S_PAD <= CHUNK:
        sort_few(
            ids_ptr,
            expert_map_ptr,
            sorted_slots_ptr,
            block_expert_ptr,
            block_count_ptr,
            num_slots,
            num_blocks,
            NUM_EXPERTS,
            NUM_IDS,
            S_PAD,
            BLOCK_M,
        )
    else:
        sort_chunk(
            program,
            ids_ptr,
            expert_map_ptr,
            sorted_slots_ptr,
            block_expert_ptr,
            block_count_ptr,
            tail_slots_ptr,
            tail_expert_ptr,
            tail_count_ptr,
            num_slots,
            num_blocks,
            num_tails,
            NUM_EXPERTS,
            NUM_IDS,
            E_PAD,
            S_PAD,
            CHUNK,
            BLOCK_M,
            TAIL_M,
        )


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "num_tails"])
def sort_kernel(
    ids_ptr,  # (T, TOP_K) int32 or int64
    expert_map_ptr,  # (NUM_IDS,) or None
    sorted_slots_ptr,  # out, as place_kernel
    block_expert_ptr,
    block_count_ptr,
    tail_slots_ptr,
    tail_expert_ptr,
    tail_count_ptr,
    num_slots,
    num_blocks,
    num_tails,
    NUM_EXPERTS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    E_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
):
    """Up to S_PAD slots in one launch. Grid: (1,) if S_PAD <= CHUNK, else (max(C, num_blocks / CHUNK),)."""
    sort_slots(
        tl.program_id(0),
        ids_ptr,
        expert_map_ptr,
        sorted_slots_ptr,
        block_expert_ptr,
        block_count_ptr,
        tail_slots_ptr,
        tail_expert_ptr,
        tail_count_ptr,
        num_slots,
        num_blocks,
        num_tails,
        NUM_EXPERTS,
        NUM_IDS,
        E_PAD,
        S_PAD,
        CHUNK,
        BLOCK_M,
        TAIL_M,
    )


@triton.jit(do_not_specialize=["num_slots", "num_chunks", "num_blocks", "num_tails"])
def place_kernel(
    ids_ptr,  # (T, TOP_K)
    expert_map_ptr,  # (NUM_IDS,) or None
    counts_ptr,  # (E, C) int32, as scan_kernel left it
    totals_ptr,  # (E,) int32
    sorted_slots_ptr,  # (num_blocks, BLOCK_M) int32, out: the slots of each block, rising within an expert
    block_expert_ptr,  # (num_blocks,) int32, out: the expert of each block, or -1
    block_count_ptr,  # (num_blocks,) int32, out: how many slots it has
    tail_slots_ptr,  # (num_tails, TAIL_M): likewise; what is left of an expert behind whole blocks, if at most TAIL_M
    tail_expert_ptr,
    tail_count_ptr,
    num_slots,
    num_chunks,
    num_blocks,
    num_tails,
    NUM_EXPERTS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
):
    """Write the sorted order of one chunk, and CHUNK entries of the block tables. Grid: (max(C, blocks / CHUNK),)."""
    chunk = tl.program_id(0)
    columns = tl.arange(0, E_PAD)
    totals = tl.load(totals_ptr + columns, mask=columns < NUM_EXPERTS, other=0)
    # A vector mask `&` a scalar one is not a mask in the interpreter of Triton 3.9, hence the bound of 0.
    experts_in_chunk = tl.where(chunk < num_chunks, NUM_EXPERTS, 0)
    before = tl.load(counts_ptr + columns * num_chunks + chunk, mask=columns < experts_in_chunk, other=0)
    slots = chunk * CHUNK + tl.arange(0, CHUNK)
    experts = local_expert(ids_ptr, slots, slots < num_slots, expert_map_ptr, NUM_EXPERTS, NUM_IDS)
    write_tables(
        chunk,
        totals,
        before,
        experts,
        slots,
        sorted_slots_ptr,
        block_expert_ptr,
        block_count_ptr,
        tail_slots_ptr,
        tail_expert_ptr,
        tail_count_ptr,
        num_blocks,
        num_tails,
        NUM_EXPERTS,
        E_PAD,
        CHUNK,
        BLOCK_M,
        TAIL_M,
    )
