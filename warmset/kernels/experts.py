"""Kernels that run the picked experts of a window, wherever each one's weights lie.

    ids_TK --> gate_up: h = act(x Wg') * (x Wu')  --> down_sum: y = h Wd', then out = sum over ranks of w * y

Shape letters: T rows, K picks a row, P = T * K picks, E experts a layer, L layers, H hidden, I expert width;
R rows padded to a tile, N columns of a tile.

    x_TH        [T, H]  dtype    hidden states
    ids_TK      [T, K]  int32    expert of each pick, distinct within a row; -1 or E is padding
    weights_TK  [T, K]  float    mixing weights
    slot_LE     [L, E]  int32    slot of each expert, -1 where it is cold
    address_LE  [L, E]  int64    where the expert lies: gate [I, H], up [I, H], then down [H, I]
    h_PI        [P, I]  dtype    what `gate_up` leaves, one line a pick
    y_PH        [P, H]  float32  what `down_sum` leaves before the sum, one line a pick
    arrived_N   [tiles] int32    picks that have reached a tile of `down_sum`; all zero between launches
    counts_2    [2]     int64    distinct experts, and the cold ones among them; added to
    out_TH      [T, H]  dtype    the sum

A launch takes either the resident experts or the cold ones. Both are the same compiled code (`want_cold` is a
runtime number that is never specialised), so a row's bits cannot depend on where an expert lies.
- resident: one program a (pick, tile). The first row that picks an expert leads; the programs of later rows that
  pick it leave at once, so each distinct expert is read once for all its rows.
- cold: a few programs walk the distinct cold experts in ascending order and share their tiles. PCIe needs few
  reads in flight, and programs that wait for it must not keep resident ones from running.

No plan is made beforehand and nothing returns to the host: each program finds its rows in `ids_TK`, which costs
less than a launch. All rows of the window lie in the tile of every expert, masked to those that picked it, so a
row's place in the tile, its reduction order and with that its bits are the same alone and among others.

The sum is made by whoever arrives last at a tile, resident or cold: each pick is counted once a tile, in
`arrived_N`, and the last one adds up the lines of all ranks in order. So the two streams meet without a launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
MAX_ROWS = 64
ROW_TILE = 16  # the smallest tile of a tensor-core product


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Block sizes of the two kernels. None of them changes a row's bits; the bench tries several."""

    name: str
    block_i: int = 16
    gate_k: int = 128
    gate_warps: int = 2
    gate_stages: int = 4
    block_h: int = 32
    down_k: int = 128
    down_warps: int = 2
    down_stages: int = 4
    cold_programs: int = 132
    early: bool = False


TILES = {
    tiles.name: tiles
    for tiles in (
        Tiles(name="narrow"),
        Tiles(name="deep", gate_k=256, gate_warps=4, gate_stages=3, down_k=256, down_warps=4, down_stages=3),
        Tiles(name="wide", block_i=32, gate_warps=4, block_h=64, down_warps=4),
        Tiles(name="queue", gate_stages=6, block_h=16, down_k=256, down_stages=3),
        Tiles(name="early", early=True),
        Tiles(name="wide-early", block_i=32, gate_warps=4, block_h=64, down_warps=4, early=True),
    )
}
DEFAULT_TILES = TILES["wide-early"]


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    """The activation, in float32."""
    if ACTIVATION == 0:
        return gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == 1:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == 2:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-2.0 * inner))  # 0.5 * (1 + tanh(z)) = 1 / (1 + exp(-2 z))
    else:
        return tl.maximum(gate, 0.0)


@triton.jit
def _first_work(
    ids_TK, slot_LE, address_LE, layer, num_rows, want_cold,
    E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, K_PAD: tl.constexpr, NUM_TILES: tl.constexpr,
):  # fmt: skip
    """What this program does first.

    Returns the ids [R, K_PAD] with E for padding, which of them are cold and still to do [R, K_PAD], the first
    expert (E for none) and its address, the first unit of work, the stride to the next, and two facts about the
    program's own pick (resident launch only): whether it leads its expert, and whether that expert is cold.
    A resident program's weights wait for two loads in a row and no more: its id, then its address.
    """
    pid = tl.program_id(0)
    rows_R = tl.arange(0, ROWS)
    ranks_K = tl.arange(0, K_PAD)
    inside_RK = (rows_R[:, None] < num_rows) & (ranks_K[None, :] < K)
    ids_RK = tl.load(ids_TK + rows_R[:, None] * K + ranks_K[None, :], mask=inside_RK, other=E)
    ids_RK = tl.where((ids_RK >= 0) & (ids_RK < E), ids_RK, E)
    if want_cold != 0:
        todo_RK = tl.load(slot_LE + layer * E + ids_RK, mask=ids_RK < E, other=0) < 0
        expert = tl.min(tl.where(todo_RK, ids_RK, E))
        address = _address_of(address_LE, layer, expert, E)
        work = pid
        stride = tl.num_programs(0)
        leads = False
        own_cold = False
    else:
        pick = pid // NUM_TILES
        own = tl.load(ids_TK + pick)
        real = (own >= 0) & (own < E)
        own = tl.where(real, own, E)
        address = _address_of(address_LE, layer, own, E)
        own_cold = tl.load(slot_LE + layer * E + own, mask=real, other=0) < 0
        earlier = tl.sum(tl.where((ids_RK == own) & (rows_R[:, None] < pick // K), 1, 0))
        leads = real & (earlier == 0)
        expert = tl.where(leads & (own_cold == 0), own, E)
        todo_RK = ids_RK < 0
        work = pid % NUM_TILES
        stride = NUM_TILES + 0
    return ids_RK, todo_RK, expert, address, work, stride, leads, own_cold


@triton.jit
def _address_of(address_LE, layer, expert, E: tl.constexpr):
    return tl.load(address_LE + layer * E + expert, mask=expert < E, other=0)


@triton.jit
def _rows_of(ids_RK, expert, ROWS: tl.constexpr, K_PAD: tl.constexpr):
    """Which rows [R] picked the expert, and at which rank."""
    ranks_K = tl.arange(0, K_PAD)
    picked_RK = ids_RK == expert
    has_R = tl.max(picked_RK.to(tl.int32), axis=1) > 0
    rank_R = tl.sum(tl.where(picked_RK, ranks_K[None, :], 0), axis=1)
    return has_R, rank_R


@triton.jit
def _matrix_at(address, like, offset: tl.constexpr):
    """Pointer to a matrix `offset` elements behind an expert's address; 16-byte aligned, and said so."""
    pointer = tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)
    if offset != 0:  # adding nothing would be folded away, and the hint with it
        pointer = tl.multiple_of(pointer + offset, 16)
    return pointer


@triton.jit(do_not_specialize=["layer", "num_rows", "want_cold"])
def gate_up_kernel(
    x_TH, ids_TK, slot_LE, address_LE, h_PI, counts_2, layer, num_rows, want_cold,
    E: tl.constexpr, K: tl.constexpr, H: tl.constexpr, I: tl.constexpr, ACTIVATION: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr, K_PAD: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """h[pick, tile] = act(x Wg') * (x Wu') for the experts of one kind."""
    NUM_TILES: tl.constexpr = (I + BLOCK_I - 1) // BLOCK_I
    if EARLY:  # `down_sum` may start and find its work as soon as all programs here have started
        tl.extra.cuda.gdc_launch_dependents()
    ids_RK, todo_RK, expert, address, work, stride, leads, own_cold = _first_work(
        ids_TK, slot_LE, address_LE, layer, num_rows, want_cold, E, K, ROWS, K_PAD, NUM_TILES
    )
    if leads & (work == 0):  # resident launch: count each distinct expert once
        tl.atomic_add(counts_2, 1)
        if own_cold:
            tl.atomic_add(counts_2 + 1, 1)
    rows_R = tl.arange(0, ROWS)
    k_N = tl.arange(0, BLOCK_K)
    base = 0
    while expert < E:
        has_R, rank_R = _rows_of(ids_RK, expert, ROWS, K_PAD)
        gate_IH = _matrix_at(address, x_TH, 0)
        up_IH = _matrix_at(address, x_TH, I * H) if (I * H) % 8 == 0 else gate_IH + I * H
        while work < base + NUM_TILES:
            i_N = (work - base) * BLOCK_I + tl.arange(0, BLOCK_I)
            in_I = i_N < I
            gate_RN = tl.zeros((ROWS, BLOCK_I), tl.float32)
            up_RN = tl.zeros((ROWS, BLOCK_I), tl.float32)
            for start in range(0, H, BLOCK_K):
                in_H = start + k_N < H
                x_at_RK = x_TH + rows_R[:, None] * H + (start + k_N)[None, :]
                where_KN = i_N[None, :] * H + (start + k_N)[:, None]
                # a mask along k would keep the compiler from 16-byte loads, so even sizes go without
                if (H % BLOCK_K == 0) and (I % BLOCK_I == 0):
                    x_RK = tl.load(x_at_RK, mask=has_R[:, None], other=0.0)
                    gate_KN = tl.load(gate_IH + where_KN)
                    up_KN = tl.load(up_IH + where_KN)
                else:
                    inside = in_H[:, None] & in_I[None, :]
                    x_RK = tl.load(x_at_RK, mask=has_R[:, None] & in_H[None, :], other=0.0)
                    gate_KN = tl.load(gate_IH + where_KN, mask=inside, other=0.0)
                    up_KN = tl.load(up_IH + where_KN, mask=inside, other=0.0)
                gate_RN = tl.dot(x_RK, gate_KN, gate_RN, input_precision="ieee")
                up_RN = tl.dot(x_RK, up_KN, up_RN, input_precision="ieee")
            h_RN = (_activate(gate_RN, ACTIVATION) * up_RN).to(h_PI.dtype.element_ty)
            pick_R = rows_R * K + rank_R
            tl.store(h_PI + pick_R[:, None] * I + i_N[None, :], h_RN, mask=has_R[:, None] & in_I[None, :])
            work += stride
        base += NUM_TILES
        expert = tl.min(tl.where(todo_RK & (ids_RK > expert), ids_RK, E))
        address = _address_of(address_LE, layer, expert, E)


@triton.jit
def _arrive(
    arrived_N, tile, y_PH, ids_TK, weights_TK, out_TH, num_rows,
    E: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Count one pick at the tile; whoever is last adds up all rows of the tile, in rank order, in float32."""
    tl.debug_barrier()  # every thread's part of y is written before one thread counts
    before = tl.atomic_add(arrived_N + tile, 1, sem="acq_rel", scope="gpu")
    if before == num_rows * K - 1:
        tl.store(arrived_N + tile, 0)
        h_N = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        in_H = h_N < H
        for first in range(0, num_rows, 8):
            row_8 = first + tl.arange(0, 8)
            total_8N = tl.zeros((8, BLOCK_H), tl.float32)
            for rank in tl.static_range(K):
                pick_8 = row_8 * K + rank
                id_8 = tl.load(ids_TK + pick_8, mask=row_8 < num_rows, other=-1)
                real_8 = (id_8 >= 0) & (id_8 < E)
                weight_8 = tl.load(weights_TK + pick_8, mask=row_8 < num_rows, other=0.0)
                weight_8 = tl.where(real_8, weight_8.to(tl.float32), 0.0)  # no load waits for an id
                # past L1, which does not see what other multiprocessors wrote
                y_8N = tl.load(
                    y_PH + pick_8[:, None] * H + h_N[None, :],
                    mask=(row_8 < num_rows)[:, None] & in_H[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                y_8N = tl.where(real_8[:, None], y_8N, 0.0)
                total_8N += weight_8[:, None] * y_8N
            tl.store(
                out_TH + row_8[:, None] * H + h_N[None, :],
                total_8N.to(out_TH.dtype.element_ty),
                mask=(row_8 < num_rows)[:, None] & in_H[None, :],
            )


@triton.jit(do_not_specialize=["layer", "num_rows", "want_cold"])
def down_sum_kernel(
    h_PI, ids_TK, weights_TK, slot_LE, address_LE, y_PH, arrived_N, out_TH, layer, num_rows, want_cold,
    E: tl.constexpr, K: tl.constexpr, H: tl.constexpr, I: tl.constexpr, DOWN_OFFSET: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr, K_PAD: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y[pick, tile] = h Wd' for the experts of one kind, then the sum where this program is the last one."""
    NUM_TILES: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    ids_RK, todo_RK, expert, address, work, stride, leads, own_cold = _first_work(
        ids_TK, slot_LE, address_LE, layer, num_rows, want_cold, E, K, ROWS, K_PAD, NUM_TILES
    )
    if (want_cold == 0) & (expert >= E) & ((leads & own_cold) == 0):
        # padding, or another row leads: nothing to write, but the pick counts. A cold leader counts over there.
        _arrive(arrived_N, work, y_PH, ids_TK, weights_TK, out_TH, num_rows, E, K, H, BLOCK_H)
    rows_R = tl.arange(0, ROWS)
    k_N = tl.arange(0, BLOCK_K)
    base = 0
    if EARLY:  # h is whole only when every program of `gate_up` has ended
        tl.extra.cuda.gdc_wait()
    while expert < E:
        has_R, rank_R = _rows_of(ids_RK, expert, ROWS, K_PAD)
        pick_R = rows_R * K + rank_R
        down_HI = _matrix_at(address, h_PI, DOWN_OFFSET)
        while work < base + NUM_TILES:
            h_N = (work - base) * BLOCK_H + tl.arange(0, BLOCK_H)
            in_H = h_N < H
            y_RN = tl.zeros((ROWS, BLOCK_H), tl.float32)
            for start in range(0, I, BLOCK_K):
                in_I = start + k_N < I
                h_at_RK = h_PI + pick_R[:, None] * I + (start + k_N)[None, :]
                where_KN = h_N[None, :] * I + (start + k_N)[:, None]
                if (I % BLOCK_K == 0) and (H % BLOCK_H == 0):
                    h_RK = tl.load(h_at_RK, mask=has_R[:, None], other=0.0)
                    down_KN = tl.load(down_HI + where_KN)
                else:
                    h_RK = tl.load(h_at_RK, mask=has_R[:, None] & in_I[None, :], other=0.0)
                    down_KN = tl.load(down_HI + where_KN, mask=in_I[:, None] & in_H[None, :], other=0.0)
                y_RN = tl.dot(h_RK, down_KN, y_RN, input_precision="ieee")
            tl.store(y_PH + pick_R[:, None] * H + h_N[None, :], y_RN, mask=has_R[:, None] & in_H[None, :])
            _arrive(
                arrived_N, work - base, y_PH, ids_TK, weights_TK, out_TH, num_rows, E, K, H, BLOCK_H
            )  # fmt: skip
            work += stride
        base += NUM_TILES
        expert = tl.min(tl.where(todo_RK & (ids_RK > expert), ids_RK, E))
        address = _address_of(address_LE, layer, expert, E)


@dataclass(kw_only=True)
class Workspace:
    """Buffers of a window, shared by all layers of one device; allocated once, so that a graph may hold them."""

    h_PI: torch.Tensor
    y_PH: torch.Tensor
    arrived_N: torch.Tensor
    counts_2: torch.Tensor

    @classmethod
    def make(
        cls, *, max_rows: int, top_k: int, hidden: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Workspace:
        picks = max_rows * top_k
        return cls(
            h_PI=torch.empty(picks, width, dtype=dtype, device=device),
            y_PH=torch.empty(picks, hidden, dtype=torch.float32, device=device),
            arrived_N=torch.zeros(-(-hidden // ROW_TILE), dtype=torch.int32, device=device),
            counts_2=torch.zeros(2, dtype=torch.int64, device=device),
        )


def row_tile(num_rows: int) -> int:
    """Rows of a tile: 16, 32 or 64."""
    assert 1 <= num_rows <= MAX_ROWS, num_rows
    return max(ROW_TILE, triton.next_power_of_2(num_rows))


def _warps(tiles_warps: int, rows: int) -> int:
    # 64 rows and 4 warps would turn into Hopper's other matrix instruction, which adds up in another order.
    return min(tiles_warps, 2) if rows > 32 else tiles_warps


def _early(tiles: Tiles, rows_TH: torch.Tensor) -> bool:
    """Whether the second kernel is launched while the first still runs: from Hopper on, where asked for."""
    return tiles.early and rows_TH.is_cuda and torch.cuda.get_device_capability(rows_TH.device) >= (9, 0)


def gate_up(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    slot_LE: torch.Tensor,
    address_LE: torch.Tensor,
    space: Workspace,
    *,
    layer: int,
    cold: bool,
    width: int,
    activation: str,
    tiles: Tiles = DEFAULT_TILES,
) -> None:
    """Fill `space.h_PI` for the resident experts of the picks, or for the cold ones."""
    (num_rows, hidden), (_, top_k), num_experts = x_TH.shape, ids_TK.shape, slot_LE.shape[1]
    _check(x_TH, ids_TK)
    rows, blocks = row_tile(num_rows), triton.cdiv(width, tiles.block_i)
    grid = tiles.cold_programs if cold else num_rows * top_k * blocks
    gate_up_kernel[(grid,)](
        x_TH, ids_TK, slot_LE, address_LE, space.h_PI, space.counts_2, layer, num_rows, int(cold),
        E=num_experts, K=top_k, H=hidden, I=width, ACTIVATION=ACTIVATIONS[activation],
        ROWS=rows, K_PAD=triton.next_power_of_2(top_k), BLOCK_I=tiles.block_i, BLOCK_K=tiles.gate_k,
        EARLY=_early(tiles, x_TH),
        num_warps=_warps(tiles.gate_warps, rows), num_stages=tiles.gate_stages, enable_fp_fusion=True,
    )  # fmt: skip


def down_sum(
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_LE: torch.Tensor,
    address_LE: torch.Tensor,
    space: Workspace,
    out_TH: torch.Tensor,
    *,
    layer: int,
    cold: bool,
    width: int,
    down_offset: int,
    tiles: Tiles = DEFAULT_TILES,
) -> None:
    """Finish the resident experts or the cold ones; `out_TH` is whole once both launches have run.

    down_offset: elements from an expert's address to its down matrix.
    """
    (num_rows, hidden), (_, top_k), num_experts = out_TH.shape, ids_TK.shape, slot_LE.shape[1]
    _check(out_TH, ids_TK)
    rows, blocks, early = row_tile(num_rows), triton.cdiv(hidden, tiles.block_h), _early(tiles, out_TH)
    grid = tiles.cold_programs if cold else num_rows * top_k * blocks
    down_sum_kernel[(grid,)](
        space.h_PI, ids_TK, weights_TK, slot_LE, address_LE, space.y_PH, space.arrived_N, out_TH,
        layer, num_rows, int(cold),
        E=num_experts, K=top_k, H=hidden, I=width, DOWN_OFFSET=down_offset,
        ROWS=rows, K_PAD=triton.next_power_of_2(top_k), BLOCK_H=tiles.block_h, BLOCK_K=tiles.down_k,
        EARLY=early, **({"launch_pdl": True} if early else {}),
        num_warps=_warps(tiles.down_warps, rows), num_stages=tiles.down_stages, enable_fp_fusion=True,
    )  # fmt: skip


def _check(rows_TH: torch.Tensor, ids_TK: torch.Tensor) -> None:
    # One compiled variant: Triton compiles again for a pointer that is not 16-byte aligned.
    assert rows_TH.is_contiguous() and rows_TH.data_ptr() % 16 == 0, "rows must be contiguous and aligned"
    assert ids_TK.is_contiguous() and ids_TK.dtype == torch.int32, ids_TK.dtype
