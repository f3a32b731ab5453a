"""The first minute or so on a new GPU: is every part right there, how fast is a step, and where does its time go.

Every check stands alone: one that fails prints its traceback and the next one runs. Results go to `smoke.json`.
"""

import argparse
import importlib.metadata
import json
import time
import traceback
from collections.abc import Callable

import torch
from torch import Tensor
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen

from training import model as tiny
from training.balance import Balance
from training.data import Corpus, tokenise
from training.delta import gated_delta_rule
from training.experts import check_form, choose_form
from training.loss import HeadLoss
from training.model import Run, TinyModel, tiny_config
from training.optim import Optimizer
from training.parts import Parts
from training.step import Phase, StepConfig, Stepper, Totals

LIMIT_SEC = 75  # checks that have not begun by then are left out


class Smoke:
    def __init__(self, options: argparse.Namespace):
        self.options, self.device = options, torch.device(options.device)
        self.gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        self.changes = json.loads(options.width) if options.width else {}
        self.form = "grouped" if self.gpu else "loop"
        self.corpus: Corpus | None = None
        self.results: dict[str, object] = {}
        self.started = time.monotonic()

    def check(self, name: str, action: Callable[[], object]) -> None:
        began = time.monotonic()
        if began - self.started > LIMIT_SEC:
            self.results[name] = "left out: time"
            print(f"{name}: left out, {LIMIT_SEC} s are over", flush=True)
            return
        try:
            self.results[name] = action()
        except Exception as problem:  # the device is lent by the minute: go on with the next check
            traceback.print_exc()
            self.results[name] = f"failed: {type(problem).__name__}: {problem}"
        took = time.monotonic() - began
        print(f"[{took:.1f} s] {name}: {json.dumps(self.results[name])[:3000]}", flush=True)
        self.save()
        if self.gpu:
            torch.cuda.empty_cache()

    def save(self) -> None:
        self.options.out.mkdir(parents=True, exist_ok=True)
        (self.options.out / "smoke.json").write_text(json.dumps(self.results, indent=1) + "\n")

    def sync(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    # the checks
    def machine(self) -> dict[str, str]:
        versions = {
            name: importlib.metadata.version(name)
            for name in ("torch", "transformers", "numpy", "safetensors")
        }
        return versions | {"device": torch.cuda.get_device_name() if self.gpu else "cpu"}

    def text(self) -> str:
        options = self.options
        if options.text.exists() and options.tokenizer.exists():
            tokens = tokenise(options.text, options.tokenizer, 0, options.state / "tokens.safetensors")
            source = "text"
        else:  # no text yet: skewed random tokens give the same shapes
            random = torch.rand(3, 400_000, generator=torch.Generator().manual_seed(0))
            parts = (random**3 * 8192).to(torch.int16)
            tokens = dict(zip(("prose", "code", "chinese"), parts, strict=True))
            source = "random tokens"
        joined = Corpus.join(tokens)
        self.corpus = Corpus(joined.tokens.to(self.device), joined.ranges)
        return f"{source}: {joined.describe()}"

    def experts(self) -> dict[str, object]:
        said: dict[str, object] = {}
        for form in ("grouped", "padded"):
            try:
                said[form] = check_form(form, self.device, self.dtype)
            except Exception as problem:
                said[form] = f"{type(problem).__name__}: {problem}"
        self.form, said["why"] = choose_form(self.device, self.dtype)
        return said | {"chosen": self.form}

    def delta(self) -> dict[str, float]:
        torch.manual_seed(0)
        shapes = [(4, 512, 4, 32), (4, 512, 4, 32), (4, 512, 8, 32), (4, 512, 8), (4, 512, 8)]
        mine = [torch.randn(shape, device=self.device) for shape in shapes]
        mine[1] += 0.5  # keys that resemble one another: the hard case for the inverse
        mine[3], mine[4] = -mine[3].abs() * 0.1, mine[4].sigmoid()
        theirs = [x.clone().requires_grad_() for x in mine]
        mine = [x.requires_grad_() for x in mine]
        out = gated_delta_rule(*mine)
        want, _ = qwen.torch_chunk_gated_delta_rule(*theirs, use_qk_l2norm_in_kernel=True)
        slope = torch.randn_like(out)
        (out * slope).sum().backward()
        (want * slope).sum().backward()
        grads = max(relative(x.grad, y.grad) for x, y in zip(mine, theirs, strict=True))
        return {"values": relative(out, want), "gradients": grads}

    def head(self) -> dict[str, float]:
        torch.manual_seed(0)
        hidden = torch.randn(1000, 128, device=self.device)
        weight = (torch.randn(8192, 128, device=self.device) * 0.1).requires_grad_()
        labels = torch.randint(8192, (1000,), device=self.device)
        want = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels)
        (right,) = torch.autograd.grad(want, weight)
        loss = HeadLoss.apply(hidden.to(self.dtype), weight, labels)
        (grad,) = torch.autograd.grad(loss, weight)
        return {"value": abs(float(loss - want)), "gradient": relative(grad, right)}

    def whole(self) -> dict[str, float]:
        """Training form against transformers' own forward, float32."""
        torch.manual_seed(0)
        model = TinyModel(tiny_config(**self.changes)).to(self.device)
        ids = torch.randint(1, 8192, (2, 64), device=self.device)
        with torch.no_grad():
            want = model.trunk(ids, use_cache=False).logits
            got = model.hidden(ids, Run()) @ model.embedding.t()
            low = model.hidden(ids, Run(dtype=self.dtype, form=self.form)).float() @ model.embedding.t()
        return {"float32": relative(got, want), "working dtype": relative(low, want)}

    def stepper(self, tokens: int, phase: str, **changes) -> Stepper:
        torch.manual_seed(0)
        kind = changes.pop("optimizer", "adamw")
        model = TinyModel(tiny_config(**self.changes)).to(self.device)
        optimizer = Optimizer(model, kind, 0.1, 1.0)
        optimizer.set_lr(1e-3)
        totals = Totals(model.config.num_hidden_layers + 1, model.config.num_experts, self.device)
        balance = Balance(model.config.num_hidden_layers + 1, 1e-3, 0.0, self.device)
        config = StepConfig(
            batch_tokens=tokens, dtype=self.dtype, form=self.form, planned_steps=200, **changes
        )
        assert self.corpus is not None
        return Stepper(model, optimizer, self.corpus, Phase.parse(phase), config, totals, balance)

    def graph_is_eager(self) -> dict[str, object]:
        """The same eight steps, eager and by replay: mean losses side by side."""
        seen = {}
        for name in ("eager", "again", "graph"):
            stepper = self.stepper(16384, "512+mtp@1")
            if name == "graph":
                stepper.capture()
            while stepper.taken < 8:
                stepper.step()
            seen[name] = stepper.totals.read()
            stepper.close()
        seen["apart"] = abs(seen["eager"]["lm"] - seen["graph"]["lm"])
        return seen

    def speed(self, tokens: int, phase: str, graph: bool, steps: int = 12, **changes) -> dict[str, float]:
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
        stepper = self.stepper(tokens, phase, **changes)
        began = time.monotonic()
        if graph:
            stepper.capture()
        else:
            for _ in range(2):
                stepper.step()
        self.sync()
        ready = time.monotonic()
        for _ in range(steps):
            stepper.step()
        self.sync()
        each = (time.monotonic() - ready) / steps
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.gpu else 0.0
        loss = stepper.totals.read()["lm"]
        stepper.close()
        return {
            "tokens_per_sec": round(stepper.tokens / each),
            "step_ms": round(each * 1e3, 2),
            "prepare_sec": round(ready - began, 1),
            "memory_gib": round(memory, 1),
            "mean_loss": round(loss, 3),
        }

    def kernels(self) -> dict[str, object]:
        """One eager step under the profiler: kernels by time."""
        stepper = self.stepper(65536, "512+mtp@1")
        for _ in range(2):
            stepper.step()
        self.sync()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            stepper.step()
            self.sync()
        rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
        total = sum(row.self_device_time_total for row in rows) / 1e3
        count = sum(row.count for row in rows)
        top = [[round(row.self_device_time_total / 1e3, 2), row.count, row.key[:110]] for row in rows[:28]]
        print(f"{count} kernels, {total:.1f} ms")
        for milliseconds, times, name in top:
            print(f"{milliseconds:9.2f} ms {times:6} x  {name}")
        stepper.close()
        return {"kernels": count, "total_ms": total, "top": top}

    def parts(self, compiled: bool) -> dict[str, object]:
        """Forward + backward of each part at 128 x 512 tokens, ms; where a step's time goes."""
        torch.manual_seed(0)
        batch, length = (128, 512) if self.gpu else (1, 128)
        model = TinyModel(tiny_config(**self.changes)).to(self.device)
        parts = Parts.compiled() if compiled else Parts()
        run = Run(dtype=self.dtype, form=self.form, parts=parts)
        streams = torch.randn(batch, length, 4, 128, device=self.device, requires_grad=True)
        x = torch.randn(batch, length, 128, device=self.device).to(self.dtype).requires_grad_()
        ids = torch.randint(8192, (batch, length), device=self.device)
        layers, base = model.trunk.model.layers, model.trunk.model
        rope = tiny.rotation(base, ids)
        hyper, labels = layers[1].attn_hyper_connection, ids.flatten()
        injection = torch.rand(batch * length, 4, 1, device=self.device)
        shape = (batch, length, -1, 32)
        mixed = torch.randn(batch, length, 512, device=self.device, requires_grad=True)
        g, beta = (
            -torch.rand(batch, length, 8, device=self.device),
            torch.rand(batch, length, 8, device=self.device),
        )
        conv = layers[1].linear_attn.conv1d.weight

        def rule() -> Tensor:
            query, key, value = (part.reshape(shape) for part in mixed.split((128, 128, 256), -1))
            return gated_delta_rule(query, key, value, g, beta)

        cases: dict[str, Callable[[], Tensor]] = {
            "hc_read (10 a step)": lambda: tiny.read_streams(hyper, streams, run)[0],
            "hc_write (10)": lambda: tiny.write_streams(streams, x, injection, run),
            "delta rule (3)": rule,
            "conv (4)": lambda: parts.causal_conv_silu(mixed, conv, 1),
            "delta net whole (3)": lambda: tiny.delta_net(layers[1].linear_attn, x, run),
            "attention (2)": lambda: tiny.attention(layers[3].self_attn, x, rope, run),
            "moe whole (5)": lambda: tiny.moe(layers[1].mlp, x, run),
            "ngram (1)": lambda: tiny.ngram_features(layers[0].ple, streams, ids, run),
            "head (2)": lambda: HeadLoss.apply(x.flatten(0, 1), model.embedding, labels),
        }
        return {name: self.milliseconds(case) for name, case in cases.items()}

    def milliseconds(self, case: Callable[[], Tensor], times: int = 5) -> float | str:
        def once() -> None:
            out = case()
            out.backward(torch.ones_like(out))

        try:
            for _ in range(2):
                once()
            self.sync()
            began = time.monotonic()
            for _ in range(times):
                once()
            self.sync()
        except Exception as problem:
            return f"{type(problem).__name__}: {problem}"[:300]
        return round((time.monotonic() - began) / times * 1e3, 3)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.detach() - want.detach()).norm() / want.detach().norm())


def smoke(options: argparse.Namespace) -> int:
    s = Smoke(options)
    check, big = s.check, 65536 if s.gpu else 512
    check("machine", s.machine)
    check("text", s.text)
    check("experts", s.experts)
    check("delta rule", s.delta)
    check("head", s.head)
    check("transformers", s.whole)
    if s.gpu:
        check("graph = eager", s.graph_is_eager)
    check("speed 512 graph", lambda: s.speed(big, "512+mtp@1", s.gpu))
    if s.gpu:
        check("kernels", s.kernels)
        check("speed 512 graph, 2x tokens", lambda: s.speed(2 * big, "512+mtp@1", True, steps=8))
        check("speed 2048 graph", lambda: s.speed(big, "2048+mtp@1", True))
        check("speed 512 graph, muon", lambda: s.speed(big, "512+mtp@1", True, optimizer="muon"))
        check("speed 512 graph, no mtp", lambda: s.speed(big, "512@1", True))
        check("speed 8192 graph", lambda: s.speed(big, "8192+mtp@1", True))
    check("parts", lambda: s.parts(False))
    check("speed 512 eager", lambda: s.speed(big, "512+mtp@1", False, steps=3))
    if options.compile:  # compiling takes the better part of a minute
        check("speed 512 graph, compiled", lambda: s.speed(big, "512+mtp@1", s.gpu, parts=Parts.compiled()))
        check("parts compiled", lambda: s.parts(True))
    print("--- summary")
    for name, result in s.results.items():
        if name.startswith(("speed", "parts", "experts", "graph")):
            print(f"{name}: {json.dumps(result)}")
    return 0
