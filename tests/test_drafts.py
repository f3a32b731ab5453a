"""Where drafts come from: lookup, the MTP layer, a second model; and how many rows a window gets."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from conftest import make_config, save_random
from helpers import open_engine
from mtp_checkpoints import add_mtp
from safetensors.torch import load_file, save_file
from windows import ScriptedDraft, decode, parts_at_a_near_tie, use_draft

import warmset
from warmset.config import EngineConfig, SamplingConfig
from warmset.depth import TRY_EVERY, Depth
from warmset.draft import LookupDraft
from warmset.errors import CheckpointError, WarmsetError
from warmset.models import BUILTIN, DATA
from warmset.routing import MarginSwap
from warmset.window import Sequence

TINY = BUILTIN["builtin:tiny"]
PROSE, CODE = (json.loads((DATA / "prompts.json").read_text())[kind][:2] for kind in ("prose", "code"))


# -- lookup ---------------------------------------------------------------------------------------------------


def look_up(ids: list[int], token: int, count: int) -> list[int]:
    return LookupDraft().propose(Sequence(state=None, ids=ids), token, count, lambda logits, position: 0)


def test_lookup_gives_what_followed_the_longest_match_last():
    assert look_up([1, 2, 3, 9, 9, 1, 2, 4, 1], 2, 2) == [4, 1], "the last place of two tokens"
    assert look_up([7, 1, 2, 3, 8, 1, 2, 4, 7, 1], 2, 1) == [3], "three tokens that match beat two"
    assert look_up([1, 2, 3], 9, 3) == []
    assert look_up([], 1, 3) == [] == look_up([1], 1, 3)


def test_lookup_goes_on_into_its_own_copy():
    assert look_up([5, 6, 5], 6, 5) == [5, 6, 5, 6, 5]


def test_lookup_follows_a_sequence_as_it_grows():
    sequence, draft = Sequence(state=None, ids=[1, 2, 3]), LookupDraft()
    assert draft.propose(sequence, 1, 2, lambda logits, position: 0) == []
    sequence.ids += [1]
    assert draft.propose(sequence, 2, 2, lambda logits, position: 0) == [3, 1]


# -- the MTP layer --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_mtp(checkpoints, tmp_path_factory):
    root = tmp_path_factory.mktemp("mtp")
    made = {name: add_mtp(checkpoints[name], root / name) for name in ("qwen3_next", "qwen4_exp_sparse")}
    for name, kind in (("mellum", "full_attention"), ("mellum_sliding", "sliding_attention")):
        made[name] = add_mtp(save_random(root / f"bare-{name}", mellum(kind)), root / name)
    return made


def mellum(kind: str):
    """A family of transformers' `MtpModel`, whose layer has sliding attention; `kind`: of the trunk's first layer."""
    from transformers import MellumConfig

    return MellumConfig(
        vocab_size=8192, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=512, eos_token_id=0, intermediate_size=48, moe_intermediate_size=24,
        num_experts=16, num_experts_per_tok=4, sliding_window=10, num_mtp_layers=1,
        layer_types=[kind, "full_attention"],
    )  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_next", "qwen4_exp_sparse", "mellum", "mellum_sliding"])
def test_mtp_of_other_families_is_loaded_by_the_published_names(with_mtp, prompt_ids, family):
    """A random layer guesses badly, so nearly everything is taken back, past an indexer budget of 8 too."""
    expected = decode(open_engine(with_mtp[family], "33%"), prompt_ids, 30)
    engine = open_engine(with_mtp[family], "33%", window=4, draft="mtp", adapt=False)
    assert decode(engine, prompt_ids, 30) == expected
    drafts = engine.stats()["drafts"]
    assert drafts["rejected"] > 20 and drafts["source"] == "mtp"
    ahead = engine.conversation._sequence.drafting
    assert ahead.length + ahead.num_waiting == len(prompt_ids) + 29


def test_mtp_is_transformers_own_mtp_model_where_that_loads(with_mtp, prompt_ids):
    """`MtpModel` over the same rows, past a sliding window of 10: the same output, in pieces with drafts between."""
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    folder, ids = with_mtp["mellum_sliding"], prompt_ids * 2
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    theirs = MtpModel.from_pretrained(main)
    engine = open_engine(folder, "33%", window=4, draft="mtp")
    hidden: list[torch.Tensor] = []
    engine.windows.on_rows = lambda sequence, hidden_nH: hidden.append(hidden_nH)
    engine.windows.read_prompt(engine.windows.start(), [*ids, 77])
    hidden_TH, following = torch.cat(hidden)[:-1], [*ids[1:], 77]
    with torch.inference_mode():
        cache, position_1T = (
            MtpCache(config=main.config.get_mtp_config()),
            torch.arange(1, len(ids) + 1)[None],
        )
        rows_1T = torch.tensor([following])
        expected_TH = theirs.forward_layer(0, hidden_TH[None], position_1T, cache, input_ids=rows_1T)[0]
    draft, sequence, seen = engine.draft, Sequence(state=None), []
    run = draft._run

    def watch(state, tokens, hidden_PH):
        seen.append((state.length, run(state, tokens, hidden_PH)))
        return seen[-1][1]

    draft._run = watch
    for start in range(0, len(ids), 7):
        part = ids[start : start + 7]
        sequence.ids += part
        draft.see(sequence, hidden_TH[start : start + len(part)])
        draft.propose(sequence, following[start + len(part) - 1], 3, lambda logits_V, position: 9)
    settled = [out for length, out in seen[::3]]
    assert len(seen) == 3 * 4 and torch.allclose(torch.cat(settled), expected_TH, rtol=0, atol=1e-5)


def test_mtp_begins_anew_where_its_sliding_attention_cannot_go_back(with_mtp, prompt_ids):
    """The trunk goes back to the end of an earlier prompt; the layer drafts from there on, and the text is the same."""
    engine = open_engine(with_mtp["mellum"], "33%", window=4, draft="mtp", adapt=False)
    first = decode(engine, prompt_ids, 20)
    assert list(engine.decode(prompt_ids, SamplingConfig(max_new_tokens=20))) == first
    ahead = engine.conversation._sequence.drafting
    assert engine.stats()["cached_tokens"] == len(prompt_ids) and engine.stats()["drafts"]["rejected"] > 0
    assert ahead.start == len(prompt_ids) - 1
    assert ahead.length + ahead.num_waiting == len(prompt_ids) + 19


def test_a_checkpoint_without_an_mtp_layer_is_refused_before_any_work(checkpoints):
    with pytest.raises(WarmsetError, match="draft mtp needs an MTP layer"):
        open_engine(checkpoints["mixtral"], "33%", draft="mtp")


def test_an_mtp_layer_that_lacks_a_tensor_is_refused(with_mtp, tmp_path):
    folder = shutil.copytree(with_mtp["qwen3_next"], tmp_path / "cut")
    tensors = load_file(folder / "model.safetensors")
    del tensors["mtp.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"the MTP layer lacks body\.norm\.weight"):
        open_engine(folder, "33%", draft="mtp")


@pytest.fixture(scope="module")
def tiny():
    return warmset.Engine.load("builtin:tiny", slots="33%", window=8, draft="mtp", adapt=False)


def test_mtp_predicts_what_the_training_form_predicts(tiny):
    """The layer as it was trained, over the same hidden states: the same output after every row, read in pieces."""
    from training.export import load
    from training.model import Run

    engine = tiny.tokens
    ids = tiny.tokenizer.encode(PROSE[0])[:48]
    hidden, waiting = [], engine.windows.on_rows
    engine.windows.on_rows = lambda sequence, hidden_nH: hidden.append(hidden_nH)
    engine.windows.read_prompt(engine.windows.start(), ids)
    engine.windows.on_rows = waiting
    hidden_TH = torch.cat(hidden)[:-1]
    trained = load(TINY).eval()
    with torch.no_grad():
        expected = trained.mtp_hidden(hidden_TH[None], torch.tensor([ids[1:]]), Run())[0]
    ahead = engine.draft._ahead(Sequence(state=None))
    with torch.inference_mode():
        parts = [slice(0, 20), slice(20, 21), slice(21, len(ids) - 1)]
        seen = torch.cat([engine.draft._run(ahead.state, ids[1:][part], hidden_TH[part]) for part in parts])
    assert torch.allclose(seen, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_mtp_bar_accepted_tokens_a_window_on_held_out_text(tiny):
    """The bar: at least 1.5 committed tokens a window with `mtp` at T = 4, on sampled and on greedy text."""
    tiny.tokens.depth = Depth(4, adapt=False)
    tokens = windows = 0
    for number, prompt in enumerate(PROSE + CODE):
        for temperature in (0.0, 0.7):
            list(tiny.stream(prompt, max_new_tokens=40, temperature=temperature, seed=number))
            tokens += tiny.tokens.windows.counts.rows
            windows += tiny.stats()["windows"]
    assert tokens / windows >= 1.5


def test_mtp_catches_up_with_what_it_did_not_draft(tiny):
    """Windows of one row in between leave rows waiting; the drafts after them are those of a layer that saw all."""
    ids = tiny.tokenizer.encode(PROSE[0])
    engine, drafts = tiny.tokens, []
    for chunk in (3, 700):
        sequence, draft = engine.windows.start(), engine.draft
        for start in range(0, len(ids), chunk):
            engine.windows.read_prompt(sequence, ids[start : start + chunk])
            if chunk == 3:
                draft.propose(sequence, 5, 2, lambda logits, position: 7)
                draft.go_back(sequence, sequence.hidden_H)
        drafts.append(draft.propose(sequence, 12, 4, lambda logits_V, position: int(logits_V.argmax())))
    assert drafts[0] == drafts[1]


def test_mtp_experts_have_slots_of_their_own_and_no_policy(prompt_ids):
    settings = {"policy": MarginSwap(margin=0.25), "admission": "off"}
    engine = open_engine("builtin:tiny", "10%", window=4, draft="mtp", adapt=False, **settings)
    expected = decode(open_engine("builtin:tiny", "10%", **settings), prompt_ids, 16)
    assert decode(engine, prompt_ids, 16) == expected
    assert engine.stats()["drafts"]["rejected"] > 0
    assert engine.draft.slots.all_resident and engine.num_slots.value == 205
    assert engine.windows.counts.picks == 15 * 4 * 10, "picks of the trunk's layers in committed rows only"


# -- equal text, whatever drafts ------------------------------------------------------------------------------

ARMS = [(source, rows) for source in ("lookup", "mtp", "model") for rows in (2, 4, 8)]


def equal_greedy_text(slots: str, policy, arms, prompts, tokens: int) -> tuple[int, dict]:
    """Every arm's text against one row at a time: near-ties, and by arm the drafts that were rejected."""
    near_ties, rejected = 0, dict.fromkeys(arms, 0)
    engines = {
        source: open_engine(
            "builtin:tiny", slots, policy, window=8, draft=source, adapt=False, admission="off",
            **({"draft_model": "builtin:tiny"} if source == "model" else {}),
        )
        for source in dict.fromkeys(source for source, _ in arms)
    }  # fmt: skip
    plain = warmset.Engine.load("builtin:tiny", slots=slots, policy=policy, admission="off")
    for prompt in prompts:
        ids = plain.tokenizer.encode(prompt)
        seen: list[torch.Tensor] = []
        verify, draw = plain.tokens.windows.step, plain.tokens.conversation.read

        def step(sequence, token, verify=verify, seen=seen):
            seen.append(verify(sequence, token))
            return seen[-1]

        def read(ids, draw=draw, seen=seen):
            result = draw(ids)
            seen.append(result[1])
            return result

        plain.tokens.windows.step, plain.tokens.conversation.read = step, read
        expected = decode(plain.tokens, ids, tokens)
        plain.tokens.windows.step, plain.tokens.conversation.read = verify, draw
        for source, rows in arms:
            engine = engines[source]
            if source == "model":
                engine.draft._vocab_size = 3000  # so that the model's own copy is wrong at times
            engine.depth = Depth(rows, adapt=False)
            near_ties += parts_at_a_near_tie(expected, decode(engine, ids, tokens), torch.stack(seen))
            rejected[source, rows] += engine.stats()["drafts"]["rejected"]
    return near_ties, rejected


@pytest.mark.parametrize("policy", [None, MarginSwap(margin=0.25)], ids=["exact", "margin"])
def test_the_embedded_models_text_is_the_same_with_every_draft(policy):
    near_ties, rejected = equal_greedy_text(
        "33%", policy, [("lookup", 4), ("mtp", 4), ("model", 3)], CODE[1:], 40
    )
    assert min(rejected.values()) > 0, rejected
    print(f"{near_ties} near-ties")


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, MarginSwap(margin=0.25)], ids=["exact", "margin"])
@pytest.mark.parametrize("slots", ["0", "10%", "33%", "all"])
def test_every_window_every_draft_every_number_of_slots(slots, policy):
    near_ties, rejected = equal_greedy_text(slots, policy, ARMS, PROSE + CODE, 60)
    assert min(rejected.values()) > 0, rejected
    print(f"{slots}: {near_ties} near-ties in {len(ARMS) * 4} texts")


# -- a second model -------------------------------------------------------------------------------------------


def test_a_model_that_drafts_for_itself_is_always_right(prompt_ids):
    engine = open_engine(
        "builtin:tiny", "33%", window=4, draft="model", draft_model="builtin:tiny", adapt=False
    )
    for sampling in ({}, {"temperature": 0.9, "seed": 5}):
        decode(engine, prompt_ids, 33, **sampling)
        assert engine.stats()["drafts"]["rejected"] == 0 and engine.stats()["accepted_per_window"] == 4.0


@pytest.mark.parametrize("second", ["mixtral", "qwen3_next"])
def test_a_second_model_of_another_family(checkpoints, prompt_ids, second):
    """With recurrent states and without: its own states are taken back, and the text is the first model's."""
    folder = checkpoints["qwen3_moe"]
    expected = decode(open_engine(folder, "33%"), prompt_ids, 24)
    engine = open_engine(
        folder, "33%", window=4, draft="model", draft_model=str(checkpoints[second]), adapt=False
    )
    assert decode(engine, prompt_ids, 24) == expected
    assert engine.stats()["drafts"]["rejected"] > 0
    state = engine.conversation._sequence.drafting
    again = copy.deepcopy(engine.draft)
    fresh = Sequence(state=None, ids=engine.conversation._sequence.ids[: state.length])
    guesses = [
        draft.propose(sequence, 5, 3, lambda logits_V, position: int(logits_V.argmax()))
        for draft, sequence in (
            (again, fresh),
            (engine.draft, Sequence(state=None, ids=fresh.ids, drafting=state)),
        )
    ]
    assert guesses[0] == guesses[1]


def test_a_second_model_with_other_tokens_is_refused(checkpoints, copy_of, edit_json):
    folder = copy_of(checkpoints["mixtral"])
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    edit_json(folder / "tokenizer.json", added_tokens=[{**tokens[0], "content": "<other>"}, *tokens[1:]])
    with pytest.raises(WarmsetError, match="draft_model must have the tokenizer"):
        open_engine(checkpoints["qwen3_moe"], "33%", draft="model", draft_model=str(folder))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"window": 0}, "window must be 1 to 8 rows. Got 0"),
        ({"window": 9}, "window must be 1 to 8 rows. Got 9"),
        ({"draft": "guess"}, "draft must be one of none, lookup, mtp, model"),
        ({"draft": "model"}, "belong together"),
        ({"draft_model": "builtin:tiny"}, "belong together"),
        ({"snapshot_bytes": -1}, "snapshot_bytes must be 0 or more"),
    ],
)
def test_c17_settings_of_windows_are_refused_by_name(settings, words):
    with pytest.raises(WarmsetError, match=words):
        EngineConfig(**settings)


def test_what_was_chosen_is_said(checkpoints):
    """C17: a window without drafts is one row, and says so; a window without a source takes the best one there is."""
    none = open_engine(checkpoints["mixtral"], "33%", window=4, draft="none")
    assert none.stats()["drafts"]["most_rows"] == 1 and "no drafts" in none.notes[-1]
    usual = open_engine(checkpoints["mixtral"], "33%", window=3)
    assert (usual.stats()["drafts"]["source"], usual.stats()["drafts"]["most_rows"]) == ("lookup", 3)
    assert open_engine(checkpoints["mixtral"], "33%", draft="lookup").stats()["drafts"]["most_rows"] == 4
    assert open_engine("builtin:tiny", "33%", window=2).stats()["drafts"]["source"] == "mtp"


# -- how many rows --------------------------------------------------------------------------------------------


def simulate(depth: Depth, windows: int, right: float, ms_a_row: float, cold_a_row: float) -> list[int]:
    """Windows whose drafts are right with chance `right` (by turns, no dice), and cost 10 ms and more for each row."""
    sizes, credit = [], 0.0
    for _ in range(windows):
        rows, accepted = depth.next_rows(), 0
        for _ in range(rows - 1):
            credit += right
            if credit < 1:
                break
            credit -= 1
            accepted += 1
        depth.observe(drafted=rows - 1, accepted=accepted, ms=10 + ms_a_row * rows, cold=cold_a_row * rows)
        sizes.append(rows)
    return sizes


def usual(sizes: list[int]) -> int:
    return max(set(sizes), key=sizes.count)


def test_c13_drafting_that_costs_more_than_it_saves_shrinks_the_window_and_says_why():
    depth = Depth(4)
    assert usual(simulate(depth, 60, right=0.3, ms_a_row=20, cold_a_row=9)[20:]) == 1
    assert depth.rows == 1 and "1 row: 1.00 tokens in 30.0 ms, 9.0 cold experts; 2 rows" in depth.why


def test_the_window_comes_back_when_drafts_are_right_again():
    depth = Depth(4)
    simulate(depth, 60, right=0.1, ms_a_row=5, cold_a_row=3)
    assert depth.rows == 1
    simulate(depth, 12 * TRY_EVERY, right=0.95, ms_a_row=1, cold_a_row=0.2)
    assert depth.rows == 4
    simulate(depth, 12 * TRY_EVERY, right=0.05, ms_a_row=5, cold_a_row=3)
    assert depth.rows == 1


def test_the_window_follows_what_a_cold_expert_costs():
    """The same drafts: worth it where rows are cheap, not where each brings as many cold experts of its own."""
    cheap, dear = Depth(8), Depth(8)
    simulate(cheap, 120, right=0.7, ms_a_row=0.5, cold_a_row=1)
    simulate(dear, 120, right=0.7, ms_a_row=0.5 + 12, cold_a_row=6)
    assert cheap.rows > 2 and dear.rows < cheap.rows


def test_without_adapting_the_window_stays():
    depth = Depth(4, adapt=False)
    assert set(simulate(depth, 50, right=0.0, ms_a_row=50, cold_a_row=9)) == {4}
    assert "as large as they may be" in depth.why


def test_c13_an_engine_with_a_slow_tier_shrinks_its_windows(checkpoints, prompt_ids, monkeypatch):
    """Wrong drafts whose cold experts take a millisecond each: windows of one row in the end, and status says why."""
    import time

    engine = open_engine(checkpoints["qwen3_moe"], "0")
    expected = decode(engine, prompt_ids, 60)
    use_draft(engine, ScriptedDraft(prompt_ids + expected, wrong=0.9), 4)
    engine.depth = Depth(4)
    run = engine.runner.run

    def slow(layer, *rest):
        before = engine.runner.counts.cold_experts
        out = run(layer, *rest)
        time.sleep(1e-3 * (engine.runner.counts.cold_experts - before))
        return out

    monkeypatch.setattr(engine.runner, "run", slow)
    assert decode(engine, prompt_ids, 60) == expected
    drafts = engine.stats()["drafts"]
    assert drafts["rows"] == 1 and drafts["rejected"] > 0
    assert drafts["rows_why"].startswith("1 row: 1.00 tokens in") and "cold experts" in drafts["rows_why"]


def test_random_checkpoints_for_a_wider_vocabulary_do_not_break_the_second_model(
    checkpoints, tmp_path, prompt_ids
):
    """A second model padded to fewer ids drafts nothing once the text has an id that it does not know."""
    config = make_config("mixtral")
    config.vocab_size = 4096
    small = save_random(tmp_path / "small", config)
    folder = checkpoints["qwen3_moe"]
    engine = open_engine(folder, "33%", window=4, draft="model", draft_model=str(small), adapt=False)
    assert decode(engine, prompt_ids, 12) == decode(open_engine(folder, "33%"), prompt_ids, 12)
    assert max(prompt_ids) >= 4096 and engine.stats()["drafts"]["drafted"] == 0
