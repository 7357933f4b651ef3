"""What trainer.compile compiles computes what it did, as few programs for all batches; decoding is not compiled."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from data.batches import Batch
from eval.benchmark import measure_tau
from eval.decode import cache_capacity, plain_generate
from eval.sampling import SamplingConfig
from eval.stopping import StopConditions
from heads import HEADS
from heads.alignment import label_counts
from heads.packed import PackedLinear, can_pack
from heads.target import Target, TargetConfig, load_target
from train.agreement import disturbed_heads, packed_batch, relative
from train.compiling import check_compiler, check_compiling, compile_heads, compile_target, decoding
from train.loop import train
from train.start import load_frozen_target
from train.step_cost import inputs_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # of the compiler's own modules
    # The compiler looks at every tensor's gradient and hides what is said about it, but not from pytest.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Programs:
    """A backend that runs what it is given as it is, and counts how often it is given something."""

    def __init__(self):
        self.count = 0

    def __call__(self, program, example_inputs):
        self.count += 1
        return program.forward


@pytest.fixture(autouse=True)
def forgotten():
    """Programs of one test are none of another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def unpacked(family: str = "llama") -> Target:
    return load_target(TargetConfig("tiny", f"random:{family}"), "cpu", pack=False)


def batches(vocab_size: int) -> list[Batch]:
    """Rows of several lengths and numbers, of one document or of several; no two alike."""
    made = [packed_batch(vocab_size)]
    for rows, tokens in ((2, 17), (3, 30), (2, 41), (4, 23)):
        ids_BT = torch.randint(0, vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(tokens))
        supervised_BT = (torch.arange(tokens) >= tokens // 3).expand(rows, tokens)
        positions_BT = torch.arange(tokens).expand(rows, tokens)
        made.append(Batch(ids_BT, supervised_BT, torch.zeros_like(ids_BT), positions_BT))
    return made


def losses(heads, target: Target) -> list[torch.Tensor]:
    """The loss on each of `batches`, and the gradients of them all."""
    found = []
    heads.zero_grad()
    for batch in batches(256):
        with torch.no_grad():
            features = target.features(batch.ids_BT, batch.positions_BT, batch.documents_BT, heads.training_taps)
        counts_K = label_counts(batch.supervised_BT, batch.documents_BT, heads.depth)
        loss, _ = heads(features, *inputs_of(batch), counts_K)
        loss.backward()
        found.append(loss.detach())
    return [*found, *(parameter.grad.clone() for parameter in heads.parameters())]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert max(relative(one, other) for one, other in zip(found, expected, strict=True)) < 1e-5


@pytest.mark.parametrize(
    ("family", "programs"),
    [
        ("llama", 2),
        pytest.param("mistral", 1, marks=pytest.mark.slow),
        pytest.param("gemma3", 1, marks=pytest.mark.slow),
        pytest.param("qwen3", 2, marks=pytest.mark.slow),
    ],
)
def test_the_blocks_of_a_target_share_programs_that_serve_every_batch(family, programs):
    """One under a mask, and another where it is left to the model."""
    target = unpacked(family)
    heads = disturbed_heads("eagle3", target)
    expected, names = losses(heads, target), list(target.model.state_dict())
    made = Programs()
    compile_target(target, made)
    assert_same(losses(heads, target), expected)
    assert made.count == programs
    assert list(target.model.state_dict()) == names


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        ("medusa", False),
        pytest.param("hydra", False, marks=pytest.mark.slow),
        pytest.param("medusa", True, marks=pytest.mark.slow),
        pytest.param("hydra", True, marks=pytest.mark.slow),
        pytest.param("eagle", False, marks=pytest.mark.slow),
        pytest.param("eagle3", False, marks=pytest.mark.slow),
        pytest.param("eagle3", True, marks=pytest.mark.slow),
    ],
)
def test_heads_have_the_same_programs_for_every_batch(family, checkpointing):
    """One for all heads; of EAGLE one for step 0 and one for all others, whose attention is laid out otherwise."""
    target = unpacked()
    heads = disturbed_heads(family, target)
    expected, names = losses(heads, target), list(heads.state_dict())
    heads.gradient_checkpointing = checkpointing
    made = Programs()
    compile_heads(heads, made)
    assert_same(losses(heads, target), expected)
    assert made.count == (2 if family.startswith("eagle") else 1)
    assert list(heads.state_dict()) == names


def test_decoding_makes_no_program_and_uses_none():
    target, conditions = unpacked(), StopConditions(max_new_tokens=12)
    cache = target.new_cache(cache_capacity(9, conditions, 1))
    expected = plain_generate(target, list(range(1, 10)), conditions, SamplingConfig(), cache).tokens
    made = Programs()
    compile_target(target, made)
    with decoding():
        assert plain_generate(target, list(range(1, 10)), conditions, SamplingConfig(), cache).tokens == expected
    assert made.count == 0


@pytest.fixture
def programs(monkeypatch) -> Programs:
    """What a run compiles, without a compiler."""
    made = Programs()
    monkeypatch.setattr(torch, "compile", partial(_compile_with, made, torch.compile))
    return made


def _compile_with(made: Programs, compile_for: Any, function: Any, **options: Any) -> Any:
    return compile_for(function, **{**options, "backend": made})


@pytest.mark.slow
def test_a_run_that_is_compiled_trains_the_same_heads(make_config, tmp_path, programs, monkeypatch):
    counts = []

    def measuring(*inputs):
        before = programs.count
        counts.append((before, measure_tau(*inputs), programs.count))
        return counts[-1][1]

    monkeypatch.setattr("train.run.measure_tau", measuring)
    settings = ("trainer.eval_prompts=2", "trainer.eval_every=2", "data.packing=false")
    train(make_config(*settings, f"output_dir={tmp_path}/plain"))
    assert programs.count == 0
    train(make_config(*settings, "trainer.compile=true", f"output_dir={tmp_path}/compiled"))
    assert 2 <= programs.count <= 4
    assert all(before == after for before, _, after in counts)
    one, other = (load_file(tmp_path / name / "heads" / "model.safetensors") for name in ("plain", "compiled"))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.skipif(not can_pack(torch.float32), reason="no layer is packed on this CPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_compiled_is_not_packed_for_decoding(compiled, make_config):
    alone: Any = SimpleNamespace(distributed_type=DistributedType.NO, device=torch.device("cpu"))
    target = load_frozen_target(make_config(f"trainer.compile={compiled}"), alone)
    assert any(isinstance(module, PackedLinear) for module in target.model.modules()) != compiled


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("adapter.r=4", "adapter= turns layers of the target on and off"),
        ("model.device_map=auto", r"model\.device_map=auto moves data between GPUs"),
        ("model.quantization=bitsandbytes-4bit", r"quantised weights \(bitsandbytes-4bit\) come with kernels"),
    ],
)
def test_targets_that_cannot_be_compiled_are_refused(make_config, override, problem):
    with pytest.raises(ValueError, match=rf"compiles the target, but {problem}.*; set trainer\.compile=false"):
        make_config("trainer.compile=true", override)


@pytest.mark.parametrize(
    ("device", "lacking", "problem"),
    [
        ("cpu", {"CXX": "no-such-compiler"}, "a compiler, and there is no no-such-compiler; install gcc and g"),
        ("cpu", {"PATH": ""}, r"a compiler, and there is no g\+\+; install"),
        ("cuda", {"PATH": ""}, "a compiler, and there is no gcc or clang; install gcc"),
    ],
)
def test_a_missing_compiler_is_named(device, lacking, problem, monkeypatch):
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in lacking.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(name=name))
    with pytest.raises(ValueError, match=problem):
        check_compiler(torch.device(device))


def test_a_gpu_without_triton_is_told_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package triton; install it with `pip install triton`, or leave"):
        check_compiler(torch.device("cuda"))


def test_a_run_without_a_compiler_ends_before_the_target_is_loaded(make_config, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("train.start.load_target", None)
    with pytest.raises(ValueError, match=r"compile: torch\.compile needs a compiler"):
        train(make_config("trainer.compile=true"))


def test_zero3_is_refused_by_name():
    def engine(stage: int) -> Any:
        state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
        return SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, state=state, device=torch.device("cpu"))

    check_compiling(engine(2))
    with pytest.raises(ValueError, match=r"ZeRO-3 fetches the weights.*conf/accelerate/fsdp2\.yaml.*compile=false"):
        check_compiling(engine(3))


@pytest.mark.slow  # a compiler runs
@pytest.mark.parametrize("family", HEADS)
def test_compiled_steps_have_the_losses_and_gradients_of_eager_ones(family):
    target = unpacked()
    heads = disturbed_heads(family, target)
    expected = losses(heads, target)
    compile_target(target)
    compile_heads(heads)
    assert_same(losses(heads, target), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hydra", "eagle3"])
def test_compiled_steps_recompute_too(family):
    target = unpacked()
    heads = disturbed_heads(family, target)
    expected = losses(heads, target)
    heads.gradient_checkpointing = True
    compile_heads(heads)
    assert_same(losses(heads, target), expected)
