"""Choice of the next tokens: logits processors, filters and the draw, in integer arithmetic.

The result is the one that `workers.engine.sampling.truncation` defines, from the weights that these
kernels compute. The host neither waits nor learns the number of rows that need more work.

1. `_prepare` applies the processors and finds the greatest logit of each chunk of a row.
2. `_sum_units` sums the weights of each chunk.
3. `_choose` takes the greatest logit, or draws among all tokens: first a chunk, then a token in it.
4. `_choose_filtered` finds the thresholds of min_p, top_k and top_p by halving the range of the
   bits of a weight, and draws among the tokens that are left. Nearly always the tokens with the
   greatest weights decide. They are copied first, so that each halving reads a few tokens. If they
   do not decide, each halving reads the whole row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.cuda.kernels.tiling import pad_to_power_of_two

CHOSEN, NOT_FINITE, NO_TOKEN = 1, 2, 3
"""State of a row: a token was chosen, its logits are not finite, or processors left no token."""
IN_PROMPT = 1 << 30
"""Flag of a prompt's token in a count; the other bits count it in the output."""

NUM_FLOATS, NUM_INTS = 5, 6
MAX_CHUNKS, MIN_CHUNK = 4096, 16
TILE_LOGITS = 2048
NUM_CANDIDATES = 256
"""A candidate has at least the weight that the maxima of this many chunks reach."""
MAX_CANDIDATES = 1024
MAX_REGISTERS = 128
"""Registers of a thread. The compiler would choose a lower limit, and spill registers."""

FLOATS, INTS = tl.constexpr(NUM_FLOATS), tl.constexpr(NUM_INTS)
FLAG = tl.constexpr(IN_PROMPT)
RANKED, CAPACITY = tl.constexpr(NUM_CANDIDATES), tl.constexpr(MAX_CANDIDATES)
FINE, SPOILT, EMPTY = tl.constexpr(CHOSEN), tl.constexpr(NOT_FINITE), tl.constexpr(NO_TOKEN)
UNITS = tl.constexpr(2.0**40)
MAX_EXPONENT = tl.constexpr(64.0)
ONE_BITS = tl.constexpr(127 << 23)
"""Bits of the greatest weight as an integer. Weights have the order of their bits."""
UNIT_BITS = tl.constexpr(127 - 40 << 23)
"""Bits of the least weight that has a unit."""
INFINITY = tl.constexpr(float("inf"))


class Parameters(NamedTuple):
    """Parameters of each row, on the device."""

    floats: Tensor
    """[num_rows, NUM_FLOATS] float32: temperature (0 for greedy), min_p, repetition penalty,
    frequency penalty, presence penalty."""
    top_p: Tensor
    """[num_rows] float64"""
    ints: Tensor
    """[num_rows, NUM_INTS] int32: top_k (the size of the vocabulary keeps all tokens); row among
    the processed rows, mask and row of counts, each -1 for none; first bias and the one after the
    last."""
    masks: Tensor
    """[num_masks, ceil(vocab_size / 32)] int32: a bit for each token that is allowed."""
    bias_tokens: Tensor
    """[num_biases] int32"""
    biases: Tensor
    """[num_biases] float32; minus infinity bans a token."""


def choose_tokens(
    logits: Tensor,
    parameters: Parameters,
    points: Tensor,
    counts: Tensor,
    *,
    num_processed: int,
    is_drawn: bool,
    is_filtered: bool,
) -> Tensor:
    """Return the token of each row and its state: int64 [num_rows, 2].

    `logits` are contiguous, [num_rows, vocab_size] of any floating dtype, `points` float64
    [num_rows], and `counts` int32 [num_sequences, vocab_size]. The last two arguments state whether
    any row is drawn, and whether any of these has a filter.
    """
    assert logits.is_contiguous()
    num_rows, vocab_size = logits.shape
    chunk = max(MIN_CHUNK, pad_to_power_of_two(-(-vocab_size // MAX_CHUNKS)))
    num_chunks, num_tiles = (-(-vocab_size // size) for size in (chunk, TILE_LOGITS))
    shape = {"VOCAB": vocab_size, "CHUNK": chunk, "CHUNKS": num_chunks}
    shape_padded = shape | {"CHUNKS_PAD": pad_to_power_of_two(num_chunks)}
    processed = logits.new_empty(num_processed, vocab_size, dtype=torch.float32)
    maxima = logits.new_empty(num_rows, num_chunks, dtype=torch.float32)
    raw_maxima = logits.new_empty(num_rows, num_tiles, dtype=torch.float32)
    sums = logits.new_empty(num_rows, num_chunks, dtype=torch.int64)
    outcome = logits.new_empty(num_rows, 2, dtype=torch.int64)
    floats, top_p, ints, *lists = parameters
    rows = logits, processed, floats, ints
    tile_chunks = TILE_LOGITS // chunk
    grid = num_rows, num_tiles
    _prepare[grid](*rows, *lists, counts, maxima, raw_maxima, **shape, TILE_CHUNKS=tile_chunks)
    if is_drawn:
        _sum_units[grid](*rows, maxima, sums, **shape_padded, TILE_CHUNKS=tile_chunks)
    draws = top_p, points, maxima, sums, outcome
    tiles = {"TILES": num_tiles, "TILES_PAD": pad_to_power_of_two(num_tiles)}
    _choose[(num_rows,)](*rows, *draws, raw_maxima, **shape_padded, **tiles, num_warps=8)
    if is_filtered:
        group = MAX_CANDIDATES // chunk
        active = maxima.new_empty(num_rows, num_chunks, dtype=torch.int32)
        weights = maxima.new_empty(num_rows, MAX_CANDIDATES)
        token_ids = maxima.new_empty(num_rows, MAX_CANDIDATES, dtype=torch.int32)
        candidates = active, weights, token_ids
        _choose_filtered[(num_rows,)](
            *rows,
            *draws,
            *candidates,
            **shape_padded,
            GROUP=group,
            num_warps=8,
            maxnreg=MAX_REGISTERS,
        )
    return outcome


# -- all rows -------------------------------------------------------------------------------------


@triton.jit
def _prepare(
    logits,
    processed,
    floats,
    ints,
    masks,
    bias_tokens,
    biases,
    counts,
    maxima,
    raw_maxima,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
):
    """Process a tile of a row if it needs it, and find the greatest logit of each chunk in it."""
    row, tile = tl.program_id(0), tl.program_id(1)
    chunk = tile * TILE_CHUNKS + tl.arange(0, TILE_CHUNKS)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    is_token = token < VOCAB
    at = logits + row.to(tl.int64) * VOCAB + token
    values = tl.load(at, mask=is_token, other=-INFINITY).to(tl.float32)
    raw = tl.where(values != values, INFINITY, values)
    tl.store(raw_maxima + row * tl.num_programs(1) + tile, tl.max(tl.max(raw, 1), 0))
    fields = ints + row * INTS
    processed_row = tl.load(fields + 1)
    if processed_row >= 0:
        mask = tl.load(fields + 2)
        if mask >= 0:
            words = masks + mask.to(tl.int64) * ((VOCAB + 31) // 32)
            word = tl.load(words + token // 32, mask=is_token, other=0)
            values = tl.where((word >> (token % 32)) & 1 == 0, -INFINITY, values)
        for i in range(tl.load(fields + 4), tl.load(fields + 5)):
            is_biased = token == tl.load(bias_tokens + i)
            values += tl.where(is_biased, tl.load(biases + i), 0.0)
        counted = tl.load(fields + 3)
        if counted >= 0:
            count_at = counts + counted.to(tl.int64) * VOCAB + token
            count = tl.load(count_at, mask=is_token, other=0)
            values = _penalize(values, count, floats + row * FLOATS)
        out_at = processed + processed_row.to(tl.int64) * VOCAB + token
        tl.store(out_at, values, mask=is_token)
    tl.store(maxima + row * CHUNKS + chunk, tl.max(values, 1), mask=chunk < CHUNKS)


@triton.jit
def _penalize(values, count, params):
    """Apply the penalties of `logits_processors`."""
    repetition = tl.load(params + 2)
    repeated = tl.where(values < 0, values * repetition, values / repetition)
    values = tl.where(count != 0, repeated, values)
    num_generated = count & (FLAG - 1)
    penalty = tl.load(params + 3) * num_generated.to(tl.float32) + tl.load(params + 4)
    return tl.where(num_generated > 0, values - penalty, values)


@triton.jit
def _sum_units(
    logits,
    processed,
    floats,
    ints,
    maxima,
    sums,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
):
    """Sum the units of each chunk in a tile of a row that is drawn."""
    row = tl.program_id(0)
    temperature = tl.load(floats + row * FLOATS)
    greatest = tl.max(_load_row(maxima, row, -INFINITY, CHUNKS, CHUNKS_PAD), 0)
    if (temperature > 0) & (greatest > -INFINITY) & (greatest < INFINITY):
        chunk = tl.program_id(1) * TILE_CHUNKS + tl.arange(0, TILE_CHUNKS)
        token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        source = logits, processed, row, tl.load(ints + row * INTS + 1), greatest, temperature
        values = _load_values(source, token, VOCAB)
        units = _to_units(_weigh(source, values))
        tl.store(sums + row * CHUNKS + chunk, tl.sum(units, 1), mask=chunk < CHUNKS)


@triton.jit
def _choose(
    logits,
    processed,
    floats,
    ints,
    top_p,
    points,
    maxima,
    sums,
    outcome,
    raw_maxima,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
):
    """Choose the token of a row without filters, and find the state of any row."""
    row = tl.program_id(0)
    raw = tl.max(_load_row(raw_maxima, row, -INFINITY, TILES, TILES_PAD), 0)
    chunk_maxima = _load_row(maxima, row, -INFINITY, CHUNKS, CHUNKS_PAD)
    greatest = tl.max(chunk_maxima, 0)
    is_finite = (raw > -INFINITY) & (raw < INFINITY) & (greatest < INFINITY)
    state = tl.where(is_finite, tl.where(greatest == -INFINITY, EMPTY, FINE), SPOILT)
    tl.store(outcome + row * 2, 0)
    tl.store(outcome + row * 2 + 1, state)
    temperature = tl.load(floats + row * FLOATS)
    source = logits, processed, row, tl.load(ints + row * INTS + 1), greatest, temperature
    is_filtered = _has_filter(floats, ints, top_p, row, VOCAB)
    within = tl.arange(0, CHUNK)
    if (state == FINE) & (temperature == 0):
        index = tl.arange(0, CHUNKS_PAD)
        chunk = tl.min(tl.where(chunk_maxima == greatest, index, CHUNKS_PAD), 0)
        token = chunk * CHUNK + within
        values = _load_values(source, token, VOCAB)
        tl.store(outcome + row * 2, tl.min(tl.where(values == greatest, token, VOCAB), 0))
    elif (state == FINE) & (is_filtered == 0):
        chunk_sums = _load_row(sums, row, 0, CHUNKS, CHUNKS_PAD)
        offset = _point_to_offset(tl.sum(chunk_sums, 0), tl.load(points + row))
        is_before = tl.cumsum(chunk_sums, 0) <= offset
        offset -= tl.sum(tl.where(is_before, chunk_sums, 0), 0)
        token = tl.sum(is_before.to(tl.int32), 0) * CHUNK + within
        values = _load_values(source, token, VOCAB)
        units = _to_units(_weigh(source, values))
        num_before = tl.sum((tl.cumsum(units, 0) <= offset).to(tl.int32), 0)
        tl.store(outcome + row * 2, tl.min(token, 0) + num_before)


@triton.jit
def _has_filter(floats, ints, top_p, row, VOCAB: tl.constexpr):
    """Return 1 if the row is drawn with min_p, top_k or top_p, else 0."""
    is_drawn = tl.load(floats + row * FLOATS) > 0
    is_limited = (tl.load(floats + row * FLOATS + 1) > 0) | (tl.load(ints + row * INTS) < VOCAB)
    return (is_drawn & (is_limited | (tl.load(top_p + row) < 1))).to(tl.int32)


@triton.jit
def _load_row(values, row, other, NUM: tl.constexpr, NUM_PAD: tl.constexpr):
    at = tl.arange(0, NUM_PAD)
    return tl.load(values + row * NUM + at, mask=at < NUM, other=other)


@triton.jit
def _load_values(source, token, VOCAB: tl.constexpr):
    """Return the logits of tokens of a row, or the processed logits if it has these.

    `source` has the logits and the processed logits of all rows, the number of the row and its
    number among the processed rows, its greatest logit and its temperature.
    """
    logits, processed, row, processed_row, _, _ = source
    is_token = token < VOCAB
    if processed_row >= 0:
        first = processed_row.to(tl.int64) * VOCAB
        values = tl.load(processed + first + token, mask=is_token, other=-INFINITY)
    else:
        first = row.to(tl.int64) * VOCAB
        values = tl.load(logits + first + token, mask=is_token, other=-INFINITY).to(tl.float32)
    return values


@triton.jit
def _weigh(source, values):
    _, _, _, _, greatest, temperature = source
    return tl.exp(tl.maximum((values - greatest) / temperature, -MAX_EXPONENT))


@triton.jit
def _to_units(weights):
    return (weights * UNITS).to(tl.int64)


@triton.jit
def _point_to_offset(total, point):
    return tl.minimum((total.to(tl.float64) * point).to(tl.int64), total - 1)


@triton.jit
def _mass_to_keep(total, top_p):
    return tl.minimum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), total)


# -- rows with filters ----------------------------------------------------------------------------


@triton.jit
def _choose_filtered(
    logits,
    processed,
    floats,
    ints,
    top_p,
    points,
    maxima,
    sums,
    outcome,
    active,
    weights,
    token_ids,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Choose the token of a row with filters."""
    row = tl.program_id(0)
    if _has_filter(floats, ints, top_p, row, VOCAB) == 0:
        return
    if tl.load(outcome + row * 2 + 1) != FINE:
        return
    temperature = tl.load(floats + row * FLOATS)
    weights += row * CAPACITY
    token_ids += row * CAPACITY
    chunk_maxima = _load_row(maxima, row, -INFINITY, CHUNKS, CHUNKS_PAD)
    greatest = tl.max(chunk_maxima, 0)
    source = logits, processed, row, tl.load(ints + row * INTS + 1), greatest, temperature
    lowest = _find_lowest(source, chunk_maxima, CHUNKS_PAD)
    active += row * CHUNKS
    num_active = _list_chunks(source, chunk_maxima, lowest, active, CHUNKS, CHUNKS_PAD)
    num_candidates, mass = _copy_candidates(
        source, lowest, active, num_active, weights, token_ids, VOCAB, CHUNK, GROUP
    )
    min_p, top_k = tl.load(floats + row * FLOATS + 1), tl.load(ints + row * INTS)
    filters = min_p.to(tl.int32, bitcast=True), top_k, tl.load(top_p + row)
    total = tl.sum(_load_row(sums, row, 0, CHUNKS, CHUNKS_PAD), 0)
    is_short = _are_decisive(filters, lowest, num_candidates, mass, total, VOCAB)
    tokens = source, weights, is_short, tl.where(is_short != 0, num_candidates, VOCAB)
    threshold = _apply_filters(tokens, filters, total, VOCAB)
    _, left = _measure(tokens, threshold, VOCAB)
    offset = _point_to_offset(left, tl.load(points + row))
    place = _find_place(tokens, threshold, offset, VOCAB)
    if is_short != 0:
        place = tl.load(token_ids + place)
    tl.store(outcome + row * 2, place)


@triton.jit
def _are_decisive(filters, lowest, num_candidates, mass, total, VOCAB: tl.constexpr):
    """Return 1 if no other tokens than the candidates matter, else 0.

    All others have less than the weight `lowest`. They do not matter if a filter truncates them, if
    they have no units, or if the candidates have the mass that top_p keeps.
    """
    min_bits, top_k, share = filters
    is_closed = (min_bits >= lowest) | (num_candidates >= top_k) | (lowest == UNIT_BITS)
    keeps_all = (min_bits == 0) & (top_k >= VOCAB)
    is_decided = is_closed | (keeps_all & (mass >= _mass_to_keep(total, share)))
    return (is_decided & (num_candidates <= CAPACITY)).to(tl.int32)


@triton.jit
def _apply_filters(tokens, filters, total, VOCAB: tl.constexpr):
    """Return the bits of the least weight that the filters keep; `total` is the row's mass."""
    min_bits, top_k, share = filters
    threshold = min_bits
    if top_k < VOCAB:
        of_count = _find_threshold(tokens, top_k.to(tl.int64), top_k * 0, False, VOCAB)
        threshold = tl.maximum(threshold, of_count)
    if share < 1:
        if (min_bits > 0) | (top_k < VOCAB):
            _, total = _measure(tokens, threshold, VOCAB)
        needed = _mass_to_keep(total, share)
        threshold = _find_threshold(tokens, needed, threshold, True, VOCAB)
    return threshold


@triton.jit
def _find_lowest(source, chunk_maxima, CHUNKS_PAD: tl.constexpr):
    """Return the bits of the least weight of a candidate."""
    bits = _weigh(source, chunk_maxima).to(tl.int32, bitcast=True)
    low, high = tl.full([], UNIT_BITS, tl.int32), tl.full([], ONE_BITS + 1, tl.int32)
    while high - low > 1:
        middle = (low + high) // 2
        is_reached = tl.sum((bits >= middle).to(tl.int32), 0) >= RANKED
        low, high = tl.where(is_reached, middle, low), tl.where(is_reached, high, middle)
    return low


@triton.jit
def _list_chunks(
    source, chunk_maxima, lowest, active, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr
):
    """Store the chunks that have candidates, and return their number."""
    index = tl.arange(0, CHUNKS_PAD)
    bits = _weigh(source, chunk_maxima).to(tl.int32, bitcast=True)
    is_active = (bits >= lowest) & (index < CHUNKS)
    place = tl.cumsum(is_active.to(tl.int32), 0) - 1
    tl.store(active + place, index, mask=is_active)
    tl.debug_barrier()
    return tl.sum(is_active.to(tl.int32), 0)


@triton.jit
def _copy_candidates(
    source,
    lowest,
    active,
    num_active,
    weights,
    token_ids,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Copy the candidates in the order of the vocabulary. Return their number and their mass.

    No more than `CAPACITY` of them are copied.
    """
    num, mass = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    for first in range(0, num_active, GROUP):
        which = first + tl.arange(0, GROUP)
        chunk = tl.load(active + which, mask=which < num_active, other=VOCAB)
        token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        is_token = (which < num_active)[:, None] & (token < VOCAB)
        each = _weigh(source, _load_values(source, tl.where(is_token, token, VOCAB), VOCAB))
        reaches = ((each.to(tl.int32, bitcast=True) >= lowest) & is_token).to(tl.int32)
        of_chunk = tl.sum(reaches, 1)
        before = num + tl.cumsum(of_chunk, 0) - of_chunk
        place = before[:, None] + tl.cumsum(reaches, 1) - 1
        is_copied = (reaches != 0) & (place < CAPACITY)
        tl.store(weights + place, each, mask=is_copied)
        tl.store(token_ids + place, token, mask=is_copied)
        num += tl.sum(of_chunk, 0)
        mass += tl.sum(tl.sum(tl.where(reaches != 0, _to_units(each), 0), 1), 0)
    tl.debug_barrier()
    return num, mass


@triton.jit
def _load_weights(tokens, start, VOCAB: tl.constexpr):
    """Return the next weights of the candidates, or of the whole row; -1 after the last.

    `tokens` has the source, the weights of the candidates, 1 if they decide, and the number of
    tokens: of the candidates if they decide, else of the row.
    """
    source, weights, is_short, num = tokens
    at = start + tl.arange(0, CAPACITY)
    if is_short != 0:
        each = tl.load(weights + at, mask=at < num, other=-1.0)
    else:
        each = tl.where(at < num, _weigh(source, _load_values(source, at, VOCAB)), -1.0)
    return each


@triton.jit
def _measure(tokens, threshold, VOCAB: tl.constexpr):
    """Return the number and the mass of the tokens that reach a threshold."""
    counts, masses = tl.zeros([CAPACITY], tl.int32), tl.zeros([CAPACITY], tl.int64)
    _, _, _, num = tokens
    for start in range(0, num, CAPACITY):
        each = _load_weights(tokens, start, VOCAB)
        reaches = each.to(tl.int32, bitcast=True) >= threshold
        counts += reaches.to(tl.int32)
        masses += tl.where(reaches, _to_units(each), 0)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _find_threshold(tokens, needed, low, BY_MASS: tl.constexpr, VOCAB: tl.constexpr):
    """Return the greatest threshold that enough tokens reach, or tokens of enough mass.

    It is `low` if no greater threshold is reached by enough.
    """
    high = tl.full([], ONE_BITS + 1, tl.int32)
    while high - low > 1:
        middle = (low + high) // 2
        count, mass = _measure(tokens, middle, VOCAB)
        is_enough = (mass if BY_MASS else count) >= needed
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
    return low


@triton.jit
def _find_place(tokens, threshold, offset, VOCAB: tl.constexpr):
    """Return the index of the token at an offset in the mass of those that reach a threshold."""
    place, before = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    _, _, _, num = tokens
    for start in range(0, num, CAPACITY):
        each = _load_weights(tokens, start, VOCAB)
        reaches = each.to(tl.int32, bitcast=True) >= threshold
        units = tl.where(reaches, _to_units(each), 0)
        sum_units = tl.sum(units, 0)
        if (before <= offset) & (offset < before + sum_units):
            is_before = before + tl.cumsum(units, 0) <= offset
            place = start + tl.sum(is_before.to(tl.int32), 0)
        before += sum_units
    return place
