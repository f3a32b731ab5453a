"""Every state of one sequence in static memory, written in place at positions that the device holds.

    keys, values, index keys    one place for each position, in pages of 256
    convolutions, recurrent     rings by position (`kernels.delta_window`); a state matrix that lags one window

A row that was rejected is overwritten by the next row at its position, so taking a window back is moving one number,
`start`, on the device. Nothing is allocated or moved while windows run; `reserve` takes more pages between them, after
which a captured graph must be captured again. transformers' modules see a `Cache`; modules that need another form are
in `forms`. Knows transformers' cache classes and no modelling code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionLayer,
)

from warmset.config import MAX_WINDOW_ROWS
from warmset.kernels.window_state import RING, DeltaState
from warmset.states import SequenceState

PAGE_ROWS = 256


def pages_for(num_rows: int) -> int:
    """Places of whole pages that hold `num_rows` rows and a window after them."""
    return -(-(num_rows + MAX_WINDOW_ROWS) // PAGE_ROWS) * PAGE_ROWS


def why_not_static(state: SequenceState) -> str | None:
    """Why this model's states have no static form, as the end of a sentence, or None."""
    for layer in state.cache.layers:
        if type(layer) in (DynamicLayer, DynamicIndexedLayer) or isinstance(layer, LinearAttentionLayer):
            continue
        return f"the states of a {type(layer).__name__} have no static form"
    return None


@dataclass
class Place:
    """Where the window stands: begin_2 int64 [2] on the device (`kernels.delta_window`), and its rows' positions."""

    begin_2: torch.Tensor
    position_T: torch.Tensor

    def open(self, num_rows: int) -> torch.Tensor:
        """A window of `num_rows` rows begins at `begin_2[1]`: their positions, int64 [T]."""
        self.position_T = self.begin_2[1] + torch.arange(num_rows, device=self.begin_2.device)
        return self.position_T


class _Attention:
    """Keys and values [1, B, S, D] of one layer."""

    def __init__(self, place: Place, layer: Any, places: int) -> None:
        self.place = place
        self.keys, self.values = (_pages(part, places, 2) for part in (layer.keys, layer.values))

    @property
    def places(self) -> int:
        return self.keys.shape[2]

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.index_copy_(2, self.place.position_T, keys)
        self.values.index_copy_(2, self.place.position_T, values)
        return self.keys, self.values

    def load(self, layer: Any, length: int) -> None:
        self.keys[:, :, :length].copy_(layer.keys)
        self.values[:, :, :length].copy_(layer.values)

    def store(self, layer: Any, length: int) -> None:
        layer.keys, layer.values = self.keys[:, :, :length].clone(), self.values[:, :, :length].clone()

    def grow(self, places: int) -> None:
        self.keys, self.values = _grown(self.keys, places, 2), _grown(self.values, places, 2)

    def tensors(self) -> list[torch.Tensor]:
        return [self.keys, self.values]


class _Indexed(_Attention):
    """Also the index keys [1, S, D] of a QSA layer, and its blocks (filled by `forms`).

    `indexer_position_ids` is what Qwen4-Exp's forward grows by concatenation; here it stays empty, so that the
    positions of a forward are those of its own rows.
    """

    def __init__(self, place: Place, layer: Any, places: int) -> None:
        super().__init__(place, layer, places)
        self.has_index = layer.is_indexer_initialized
        self.index_keys = _pages(layer.indexer_keys, places, 1) if self.has_index else None
        self.block_keys: torch.Tensor | None = None
        """[blocks, D]: pooled, normed and rotated key of each block; None until `forms.prepare` makes it."""
        self.blocks_known = False

    @property
    def indexer_position_ids(self) -> None:
        return None

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor) -> None:
        pass

    def load(self, layer: Any, length: int) -> None:
        super().load(layer, length)
        self.blocks_known = False
        if self.index_keys is not None:
            self.index_keys[:, :length].copy_(layer.indexer_keys)

    def store(self, layer: Any, length: int) -> None:
        super().store(layer, length)
        if self.index_keys is not None:
            layer.indexer_keys = self.index_keys[:, :length].clone()

    def grow(self, places: int) -> None:
        super().grow(places)
        self.block_keys, self.blocks_known = None, False
        if self.index_keys is not None:
            self.index_keys = _grown(self.index_keys, places, 1)

    def tensors(self) -> list[torch.Tensor]:
        extras = (self.index_keys, self.block_keys)
        return [*super().tensors(), *(extra for extra in extras if extra is not None)]


@dataclass
class _Columns:
    """The last columns of a convolution, in a ring by position: ring [R, ...], K columns before a window."""

    ring: torch.Tensor
    count: int

    def before(self, place: Place) -> torch.Tensor:
        """[1, ..., K]: the columns before the window."""
        back_K = torch.arange(-self.count, 0, device=self.ring.device)
        return self.ring[(place.begin_2[1] + back_K) % len(self.ring)].movedim(0, -1)[None]

    def write(self, place: Place, new: torch.Tensor) -> None:
        self.ring.index_copy_(0, place.position_T % len(self.ring), new[0].movedim(-1, 0).to(self.ring.dtype))

    def load(self, state: torch.Tensor, length: int) -> None:
        at_K = torch.arange(length - self.count, length, device=self.ring.device) % len(self.ring)
        self.ring[at_K] = state[0].movedim(-1, 0)

    def store(self, state: torch.Tensor, length: int) -> None:
        at_K = torch.arange(length - self.count, length, device=self.ring.device) % len(self.ring)
        state.copy_(self.ring[at_K].movedim(0, -1)[None])


class _Linear:
    """The states of one linear-attention layer: `delta` is the gated delta net's, `columns` those of PLE."""

    def __init__(self, place: Place, layer: Any, delta: Any) -> None:
        self.place = place
        self.delta = delta
        self.columns: dict[int, _Columns] = {}
        for index, state in layer.conv_states.items():
            if index > 0 and state is not None:
                count = state.shape[-1]
                size = 1 << (count + MAX_WINDOW_ROWS - 1).bit_length()
                ring = torch.zeros(size, *state.shape[1:-1], dtype=state.dtype, device=state.device)
                self.columns[index] = _Columns(ring, count)

    def load(self, layer: Any, length: int) -> None:
        delta, state = self.delta, layer.conv_states[0]
        for ring in delta.tensors():
            ring.zero_()
        at_K = torch.arange(length - state.shape[-1], length, device=state.device) % RING
        delta.ring_x_RC[at_K] = state[0].T
        delta.state_NDV.copy_(layer.recurrent_states[0][0])
        for index, columns in self.columns.items():
            columns.load(layer.conv_states[index], length)

    def settle(self, settled: int, length: int) -> None:
        """Bring the state matrix to `length`, as the next window would."""
        delta = self.delta
        repeat = delta.state_NDV.shape[0] // delta.ring_k_RMD.shape[1]
        for position in range(settled, length):
            place = position % RING
            key_ND1 = delta.ring_k_RMD[place].repeat_interleave(repeat, 0)[:, :, None]
            delta.state_NDV.mul_(delta.ring_g_RN[place, :, None, None])
            delta.state_NDV.add_(key_ND1 * delta.ring_d_RNV[place, :, None, :])

    def store(self, layer: Any, length: int) -> None:
        """Needs the state matrix settled at `length`."""
        delta, state = self.delta, layer.conv_states[0]
        at_K = torch.arange(length - state.shape[-1], length, device=state.device)
        state.copy_(torch.where(at_K >= 0, delta.ring_x_RC[at_K % RING].T, 0)[None])
        layer.recurrent_states[0].copy_(delta.state_NDV[None])
        for index, columns in self.columns.items():
            columns.store(layer.conv_states[index], length)

    def grow(self, places: int) -> None:
        pass

    def tensors(self) -> list[torch.Tensor]:
        return [*self.delta.tensors(), *(columns.ring for columns in self.columns.values())]


class StaticCache(Cache):
    """The static states of one sequence. Loaded from a `SequenceState` that has read a prompt, and stored back."""

    def __init__(self, state: SequenceState, places: int, device: torch.device) -> None:
        assert state.length > 0 and why_not_static(state) is None
        self.place = Place(
            begin_2=torch.zeros(2, dtype=torch.int64, device=device),
            position_T=torch.zeros(1, dtype=torch.int64, device=device),
        )
        self.places = places
        layers = [self._make(layer, device) for layer in state.cache.layers]
        super().__init__(layers=layers)  # type: ignore[arg-type]  # our own layers, by the methods below
        self.load(state)

    def _make(self, layer: Any, device: torch.device) -> _Attention | _Linear:
        if type(layer) is DynamicIndexedLayer:
            return _Indexed(self.place, layer, self.places)
        if type(layer) is DynamicLayer:
            return _Attention(self.place, layer, self.places)
        recurrent, conv = layer.recurrent_states[0], layer.conv_states[0]
        _, heads, key_dim, value_dim = recurrent.shape
        key_heads = (conv.shape[1] - heads * value_dim) // (2 * key_dim)
        delta = DeltaState.make(
            channels=conv.shape[1], key_heads=key_heads, value_heads=heads, key_dim=key_dim, value_dim=value_dim,
            dtype=conv.dtype, device=device,
        )  # fmt: skip
        return _Linear(self.place, layer, delta)

    @property
    def own_layers(self) -> list[Any]:
        """The layers under their own type."""
        return self.layers

    # -- between windows --------------------------------------------------------------------------------------

    def load(self, state: SequenceState) -> None:
        """Every state as `state` has it; its places must be enough."""
        assert state.open_rows == 0 and pages_for(state.length) <= self.places
        for mine, layer in zip(self.own_layers, state.cache.layers, strict=True):
            mine.load(layer, state.length)
        self.place.begin_2.fill_(state.length)

    def store(self, state: SequenceState) -> None:
        """Give every state back to the `state` that was loaded; it is then as if it had run the windows itself."""
        settled, length = self.place.begin_2.tolist()
        for mine in self.own_layers:
            if isinstance(mine, _Linear):
                mine.settle(settled, length)
        self.place.begin_2.fill_(length)
        for mine, layer in zip(self.own_layers, state.cache.layers, strict=True):
            mine.store(layer, length)
        positions = torch.arange(length, device=self.place.begin_2.device)
        theirs: Any
        for theirs in state.cache.layers:
            if getattr(theirs, "indexer_position_ids", None) is not None:
                theirs.indexer_position_ids = positions.expand(
                    *theirs.indexer_position_ids.shape[:-1], -1
                ).clone()
        state.set_length(length)

    def reserve(self, num_rows: int) -> bool:
        """Have places for `num_rows` rows and a window; True when memory moved: graphs must be captured again."""
        if pages_for(num_rows) <= self.places:
            return False
        self.places = max(pages_for(num_rows), 2 * self.places)
        for mine in self.own_layers:
            mine.grow(self.places)
        return True

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of every layer."""
        return [tensor for mine in self.own_layers for tensor in mine.tensors()]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    # -- what transformers' modules call ----------------------------------------------------------------------

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return self.layers[layer_idx].update(key_states, value_states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        layer: Any = self.layers[layer_idx]
        return layer.columns[state_idx].before(self.place)

    def update_conv_state(self, conv_states, layer_idx: int, state_idx: int = 0, **kwargs) -> torch.Tensor:
        layer: Any = self.layers[layer_idx]
        columns = layer.columns[state_idx]
        before = columns.before(self.place)
        columns.write(self.place, conv_states)
        return torch.cat([before, conv_states], dim=-1)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        raise AssertionError("a static window is given its positions")


def _pages(like: torch.Tensor, places: int, dim: int) -> torch.Tensor:
    shape = list(like.shape)
    shape[dim] = places
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _grown(old: torch.Tensor, places: int, dim: int) -> torch.Tensor:
    new = _pages(old, places, dim)
    new.narrow(dim, 0, old.shape[dim]).copy_(old)
    return new
