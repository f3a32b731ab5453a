"""What one sequence leaves behind in a model, and how a window is taken back to any of its rows.

    keys and values     attention layers; cut to a length
    index keys          of QSA indexers, and the positions they share; cut to a length
    recurrent state     gated delta nets: the state after each row of a window is kept until the window is settled
    convolution state   the same, for the columns that a convolution still reads; PLE's two states are of this kind

A window of several rows writes no recurrent or convolution state: the layers hold what its rows lead to, and `settle`
writes the state after the last row that is kept. A window of one row is always kept, so it writes in place. Knows
transformers' cache classes and no modelling code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)


class RecurrentLayer(LinearAttentionLayer):
    """The states of one linear-attention layer; `pending` while a window of several rows is open."""

    def __init__(self, number_of_states: int = 1, **kwargs: Any) -> None:
        super().__init__(number_of_states=number_of_states, **kwargs)
        self.pending = False
        self.length = 0
        """Rows of the sequence that are settled."""
        self._columns: dict[int, torch.Tensor] = {}
        self._rows: dict[int, torch.Tensor] = {}

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not self.pending:
            return super().update_conv_state(conv_states, state_idx, conv_kernel_size, **kwargs)
        self._columns[state_idx] = torch.cat([_there(self.conv_states[state_idx]), conv_states], dim=-1)
        return self._columns[state_idx]

    def get_seq_length(self) -> int:
        """transformers 5.25 and later ask the first layer for it, of whatever kind it is."""
        return self.length

    def increase_count(self, state_idx: int) -> None:
        """Nothing: rows are counted when they are settled."""

    def update_recurrent_state(
        self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Takes the state [B, N, D, V], or in an open window the states after each row [T, B, N, D, V]."""
        if not self.pending:
            if recurrent_states.ndim == 5:
                recurrent_states = recurrent_states[-1]
            return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        assert recurrent_states.ndim == 5, "this module gives no state after each row"
        self._rows[state_idx] = recurrent_states
        return recurrent_states[-1]

    def settle(self, num_rows: int) -> None:
        """Write the states after the first `num_rows` rows of the open window (0: leave them), and close it."""
        if num_rows:
            for index, columns in self._columns.items():
                state = _there(self.conv_states[index])
                state.copy_(columns[..., num_rows : num_rows + state.shape[-1]])
            for index, rows in self._rows.items():
                _there(self.recurrent_states[index]).copy_(rows[num_rows - 1])
        self._columns, self._rows, self.pending = {}, {}, False

    def tensors(self) -> list[torch.Tensor]:
        """Every state that exists by now, in a fixed order."""
        found = [*self.conv_states.values(), *self.recurrent_states.values()]
        return [state for state in found if state is not None]


def _there(state: torch.Tensor | None) -> torch.Tensor:
    assert state is not None, "this state does not exist yet"
    return state


CUT = (DynamicLayer, DynamicIndexedLayer)
"""Layers whose state is a row for each token, so that it is cut to a length; by exact class."""


def why_not_several_rows(config: Any) -> str | None:
    """Why windows of several rows cannot be taken back for this model, as the end of a sentence, or None."""
    for layer in _new_cache(config).layers:
        if type(layer) not in (*CUT, RecurrentLayer, DynamicSlidingWindowLayer):
            return f"the states of a {type(layer).__name__} cannot be taken back"
    return None


def _new_cache(config: Any) -> DynamicCache:
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is LinearAttentionLayer:
            cache.layers[index] = RecurrentLayer(number_of_states=layer.number_of_states)
        elif isinstance(layer, DynamicSlidingWindowLayer):
            layer.activate_past_recording()  # keeps what slid out of sight until the window is settled
    return cache


def _slides(layer: Any) -> bool:
    return isinstance(layer, DynamicSlidingWindowLayer)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The recurrent states of a sequence at one length; keys and values are not in it, since they can be cut."""

    length: int
    states: tuple[tuple[torch.Tensor, ...], ...]

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for layer in self.states for state in layer)


@dataclass
class SequenceState:
    """Every state of one sequence in one model; `cache` is what transformers' modules read and write."""

    cache: DynamicCache = field(repr=False)
    length: int = 0
    """Rows whose states are settled."""
    open_rows: int = 0

    @classmethod
    def new(cls, config: Any) -> SequenceState:
        return cls(cache=_new_cache(config))

    @property
    def recurrent(self) -> list[RecurrentLayer]:
        return [layer for layer in self.cache.layers if isinstance(layer, RecurrentLayer)]

    def open(self, num_rows: int) -> None:
        """A forward over `num_rows` further rows follows, and `settle` after it."""
        assert self.open_rows == 0, "the last window was not settled"
        self.open_rows = num_rows

    def open_window(self, num_rows: int) -> None:
        """As `open`, for rows of which only the first ones may be kept."""
        self.open(num_rows)
        if num_rows > 1:
            assert self.length > 0 or not self.recurrent, "the first rows of a sequence are read as a prompt"
            for layer in self.recurrent:
                layer.pending = True

    def settle(self, num_rows: int) -> None:
        """Keep the first `num_rows` of the open rows; every state is as if the others had never run."""
        assert 0 <= num_rows <= self.open_rows, (num_rows, self.open_rows)
        for layer in self.recurrent:
            if layer.pending:
                layer.settle(num_rows)
            else:
                assert num_rows == self.open_rows, "these rows were written in place"
        self.open_rows = 0
        self.set_length(self.length + num_rows)

    def set_length(self, length: int) -> None:
        """Cut what can be cut to `length` rows; the recurrent states must already be those after so many."""
        self.length = length
        for recurrent in self.recurrent:
            recurrent.length = length
        layer: Any
        for layer in self.cache.layers:
            if isinstance(layer, DynamicLayer) and layer.is_initialized:
                surplus = layer.get_seq_length() - self.length
                if surplus > 0 or _slides(layer):
                    layer.crop(-surplus)
            positions = getattr(layer, "indexer_position_ids", None)
            if positions is not None and positions.shape[-1] > self.length:
                layer.indexer_position_ids = positions[..., : self.length]

    # -- going back further -----------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Copies of the recurrent states as they are now."""
        assert self.open_rows == 0
        states = tuple(tuple(state.clone() for state in layer.tensors()) for layer in self.recurrent)
        return Snapshot(length=self.length, states=states)

    def can_go_back(self) -> bool:
        """Whether keys and values of earlier lengths are all still there."""
        return not any(_slides(layer) for layer in self.cache.layers)

    def go_back(self, snapshot: Snapshot) -> None:
        """Every state as it was when `snapshot` was taken from this sequence."""
        assert self.open_rows == 0 and snapshot.length <= self.length
        for layer, states in zip(self.recurrent, snapshot.states, strict=True):
            for state, kept in zip(layer.tensors(), states, strict=True):
                state.copy_(kept)
        self.set_length(snapshot.length)

    def cut_to(self, length: int) -> None:
        """As `go_back`, for a model without recurrent states, which needs no snapshot."""
        assert self.open_rows == 0 and not self.recurrent and length <= self.length
        self.set_length(length)

    @property
    def nbytes(self) -> int:
        """Bytes of all states, keys and values among them."""
        total = sum(state.nbytes for layer in self.recurrent for state in layer.tensors())
        layer: Any
        for layer in self.cache.layers:
            if isinstance(layer, DynamicLayer) and layer.is_initialized:
                total += _there(layer.keys).nbytes + _there(layer.values).nbytes
                indexed = getattr(layer, "indexer_keys", None)
                total += indexed.nbytes if indexed is not None else 0
        return total
