"""Prompt lookup on the device: the drafts that `draft.LookupDraft` gives, from the tokens in device memory.

history_S  [S] int64  settled tokens, then the one drawn last at `length`; what lies behind does not matter
"""

from __future__ import annotations

import torch

from warmset.draft import MAX_MATCH, MIN_MATCH


def look_up(history_S: torch.Tensor, length: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts int64 [count], and whether there are any (bool []).

    length: int64 [], settled tokens, so that `history_S[length]` was drawn last. The longest run of latest tokens, of
    MAX_MATCH down to MIN_MATCH, that was settled before counts, and of those the last; what followed it is copied,
    going on into the copy where the text ends.
    """
    places = len(history_S)
    end_E = torch.arange(places, device=history_S.device)
    padded = torch.cat([history_S.new_full((MAX_MATCH,), -1), history_S])
    matching_E = end_E <= length
    matched_E = torch.zeros_like(end_E)
    for back in range(1, MAX_MATCH + 1):
        wanted = padded.index_select(
            0, (length + 1 - back + MAX_MATCH).view(1)
        )  # an index of no dimension would sync
        shifted_E = padded[MAX_MATCH - back : MAX_MATCH - back + places]
        matching_E = matching_E & (shifted_E == wanted) & (end_E >= back)
        matched_E = matched_E + matching_E
    score_E = torch.where(matched_E >= MIN_MATCH, matched_E * places + end_E, -1)
    best = score_E.amax()
    found, start = best >= 0, best.clamp(min=0) % places
    step = torch.arange(count, device=history_S.device) % (length + 1 - start).clamp(min=1)
    return history_S[(start + step).clamp(max=places - 1)], found
