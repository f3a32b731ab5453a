"""The training form is the model: same loss, same gradients, and what it writes loads elsewhere."""

import json
import lzma
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen
from transformers.utils import logging

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from training import evaluate, export, statistics, train  # noqa: E402
from training.delta import gated_delta_rule  # noqa: E402
from training.experts import check_form, run_experts, sort_picks  # noqa: E402
from training.loss import HeadLoss  # noqa: E402
from training.measures import margin_swaps, most_used  # noqa: E402
from training.model import Run, TinyModel, tiny_config  # noqa: E402
from training.revive import revive  # noqa: E402

SMALL = {"num_experts": 32, "vocab_size": 512, "ngram_vocab_size_base": 200}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def small_model() -> TinyModel:
    model = TinyModel(tiny_config(**SMALL))
    with torch.no_grad():
        for parameter in model.parameters():  # nothing stays at its zero of initialisation
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Training and held-out text of each kind, and a tokenizer of 512."""
    folder = tmp_path_factory.mktemp("text")
    source = (ROOT / "training" / "model.py").read_text(encoding="utf-8")
    for name, copies in (("train", 4), ("held", 2)):
        with lzma.open(folder / f"{name}.jsonl.xz", "wt", encoding="utf-8") as out:
            for kind in ("prose", "code", "chinese"):
                out.write(json.dumps({"kind": kind, "source": "test", "text": source * copies}) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([source], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_losses_equal_transformers():
    model = small_model()
    ids = torch.randint(1, 512, (2, 150))
    ids[0, 60] = 0  # the n-gram context ends at an end of text
    want = model.trunk(ids[:, :-2], use_cache=False).logits
    hidden = model.hidden(ids[:, :-2], Run())
    assert torch.allclose(hidden @ model.embedding.t(), want, atol=1e-5)
    labels = ids[:, 1:-1].flatten()
    loss = model.losses(ids, Run(), with_mtp=True)["lm"]
    reference = torch.nn.functional.cross_entropy(want.flatten(0, 1), labels)
    assert abs(float(loss.detach() - reference.detach())) < 1e-5


def test_gradients_equal_transformers():
    model = small_model()
    ids = torch.randint(1, 512, (1, 80))
    names = [name for name, _ in model.trunk.named_parameters() if ".indexer." not in name]
    parameters = [p for name, p in model.trunk.named_parameters() if ".indexer." not in name]
    logits = model.trunk(ids[:, :-2], use_cache=False).logits
    reference = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:-1].flatten())
    want = torch.autograd.grad(reference, parameters)
    got = torch.autograd.grad(model.losses(ids, Run(), with_mtp=False)["lm"], parameters)
    for name, one, other in zip(names, got, want, strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-3), name


def test_mtp_never_moves_the_trunk():
    model = small_model()
    model.losses(torch.randint(1, 512, (1, 66)), Run(), with_mtp=True)["mtp"].backward()
    assert all(p.grad is None or not p.grad.any() for p in model.trunk.parameters())
    assert model.mtp.fc.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("length", [64, 200], ids=["one chunk", "a padded last chunk"])
def test_delta_rule_equals_transformers(length):
    def inputs() -> list[torch.Tensor]:
        torch.manual_seed(1)
        query, key = (
            torch.randn(2, length, 2, 16),
            torch.randn(2, length, 2, 16) + 0.7,
        )  # keys alike: the hard case
        value, strength = torch.randn(2, length, 4, 16), torch.rand(2, length, 4)
        decay = -torch.rand(2, length, 4) * torch.tensor([0.001, 0.1, 1.0, 10.0])
        return [x.requires_grad_() for x in (query, key, value, decay, strength)]

    mine, theirs = inputs(), inputs()
    got = gated_delta_rule(*mine)
    want, _ = qwen.torch_chunk_gated_delta_rule(*theirs, use_qk_l2norm_in_kernel=True)
    assert torch.allclose(got, want, atol=1e-5)
    slope = torch.randn_like(got)
    (got * slope).sum().backward()
    (want * slope).sum().backward()
    for one, other in zip(mine, theirs, strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-5 * float(other.grad.abs().max()))


@pytest.mark.parametrize("form", ["padded", "grouped"])
def test_expert_forms_equal_the_loop(form):
    assert check_form(form, torch.device("cpu"), torch.float32) < 1e-5


def test_experts_equal_transformers_with_an_empty_expert():
    block = small_model().trunk.model.layers[0].mlp
    x, ids = torch.randn(40, 128), torch.randint(0, 31, (40, 10))  # expert 31 is empty
    weights = torch.rand(40, 10)
    want = block.experts(x, ids, weights)
    got = run_experts(
        x, block.experts.gate_up_proj, block.experts.down_proj, weights, sort_picks(ids, 32), "loop"
    )
    assert torch.allclose(got, want, atol=1e-5)
    got.sum().backward()
    assert not block.experts.down_proj.grad[31].any()


def test_head_loss_equals_cross_entropy():
    hidden, weight = torch.randn(50, 16, requires_grad=True), torch.randn(64, 16, requires_grad=True)
    labels = torch.randint(64, (50,))
    want = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels)
    got = HeadLoss.apply(hidden, weight, labels)
    assert torch.allclose(got, want, atol=1e-6)
    pairs = zip(
        torch.autograd.grad(got, (hidden, weight)), torch.autograd.grad(want, (hidden, weight)), strict=True
    )
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


def test_export_loads_in_transformers_without_a_word_on_mtp(tmp_path):
    model = small_model()
    export.export(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["layer_types"][-1] == "full_attention"
    plain, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = torch.randint(1, 512, (1, 40))
    again = export.load(tmp_path)
    with torch.no_grad():
        got = again.hidden(ids, Run()) @ again.embedding.t()
        assert torch.allclose(got, plain(ids, use_cache=False).logits, atol=1e-5)
    for name, value in again.mtp.state_dict().items():
        assert torch.equal(value, model.mtp.state_dict()[name].bfloat16().float()), name


def arguments(text: Path, out: Path, *more: str) -> list[str]:
    shape = "512" if "--resume" in more else json.dumps(SMALL)
    width = [] if shape == "512" else ["--width", shape]
    return [
        *(
            "--out",
            str(out),
            "--text",
            str(text / "train.jsonl.xz"),
            "--tokenizer",
            str(text / "tokenizer.json"),
        ),
        *("--held-out", str(text / "held.jsonl.xz"), "--state", str(out.parent / "state"), "--device", "cpu"),
        *("--batch-tokens", "128", "--phases", "64@0.5,128+mtp@1.0", "--max-steps", "6", "--eval-every", "1"),
        *("--eval-tokens", "200", "--warmup-steps", "2", "--revive-every", "2", *width, *more),
    ]


def records(out: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_training_learns_and_goes_on(text, tmp_path):
    logging.disable_progress_bar()
    first, second = tmp_path / "first", tmp_path / "second"
    assert train.main(arguments(text, first, "--stage", "1/2")) == 0
    before = records(first, "held_out")[-1]["mix"]
    assert train.main(arguments(text, second, "--stage", "2/2", "--resume", str(first / "model"))) == 0
    assert records(second, "start")[0]["restored"]
    assert records(second, "held_out")[-1]["mix"] < before
    assert [r["mtp"] for r in records(second, "phase")] == [True]
    shutil.rmtree(tmp_path / "state")
    assert (
        train.main(arguments(text, tmp_path / "third", "--stage", "2/2", "--resume", str(first / "model")))
        == 0
    )
    assert not records(tmp_path / "third", "start")[0]["restored"]  # bf16 weights alone will do
    assert records(tmp_path / "third", "held_out")[-1]["mix"] < before


def test_muon_takes_a_step(text, tmp_path):
    assert train.main(arguments(text, tmp_path / "muon", "--optimizer", "muon")) == 0


def test_too_slow_stops(text, tmp_path):
    more = ("--min-tokens-per-sec", "1e12", "--max-steps", "30")
    assert train.main(arguments(text, tmp_path / "slow", *more)) == 3


def test_revive_copies_a_busy_expert():
    model = small_model()
    optimizer = train.Optimizer(model, "adamw", 0.1, 1.0)
    counts = torch.full((5, 32), 1000)
    counts[2, 7], counts[2, 3] = 0, 5000
    experts = model.trunk.model.layers[2].mlp.experts
    assert revive(model, optimizer, counts, torch.Generator().manual_seed(0)) == [0, 0, 1, 0, 0]
    assert torch.equal(experts.down_proj[7], experts.down_proj[3])


def test_margin_swap_counts():
    scores = torch.tensor([[9.0, 8, 7, 6, 5, 4, 3, 2.9, 2.5, 2.0, 1.95, 1.8, 0.0]])
    resident = torch.zeros(13, dtype=torch.bool)
    resident[[0, 6, 10, 11]] = True  # cold in the tail: 7, 8, 9
    assert margin_swaps(scores, resident, 10, 0.05 + 1e-6) == (3, 1)  # only 2.0 -> 1.95
    assert margin_swaps(scores, resident, 10, 1.0) == (
        3,
        2,
    )  # 2.9 -> 1.95, 2.5 -> 1.8, nothing is left for 2.0
    assert most_used(torch.tensor([[3, 5, 5, 1]]), 0.5).tolist() == [[False, True, True, False]]


def test_evaluation_reports_every_bar_and_fails_a_random_model(text, tmp_path, capsys):
    export.export(small_model(), tmp_path)
    shutil.copy(text / "tokenizer.json", tmp_path)
    source = ["--text", str(text / "train.jsonl.xz"), "--tokenizer", str(text / "tokenizer.json")]
    assert statistics.main([str(tmp_path), *source, "--tokens", "4000"]) == 0
    stored = json.loads((tmp_path / "profile-code.json").read_text())
    assert stored["format"] == "warmset-profile" and len(stored["counts"]) == 4
    checked = ["--check", "--evaluation", str(text / "held.jsonl.xz"), "--json", str(tmp_path / "out.json")]
    assert evaluate.main([str(tmp_path), *checked]) == 1
    printed = capsys.readouterr().out
    assert all(bar.what in printed for bar in evaluate.BARS)
    values = json.loads((tmp_path / "out.json").read_text())
    assert values["top_share_min"] > 0 and values["swap_growth"] > 1


def test_every_bar_can_pass():
    values = {bar.key: bar.limit for bar in evaluate.BARS} | {"largest_shard_bytes": 14e6}
    assert all(good for _, _, good in evaluate.judge(values))
    assert not any(good for _, _, good in evaluate.judge({}))


def test_a_timed_run_reads_new_windows(text, tmp_path):
    """Its length in steps is not known ahead: the plan must be long."""
    more = ("--max-steps", "0", "--minutes", "0.25", "--phases", "64@1.0", "--revive-every", "0")
    trainer = train.Trainer(train.arguments(arguments(text, tmp_path / "timed", *more)))
    assert trainer.config.planned_steps == train.PLANNED_STEPS
    trainer.enter(trainer.phases[0])
    starts = trainer.stepper.starts
    assert len(starts) == train.PLANNED_STEPS and len(starts[:200].unique()) > 100
    assert int(starts.max()) + 66 <= len(trainer.corpus.tokens)
