"""What is folded is what PEFT merges, rounded once, and nothing is left of what was folded in before."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from rollproof_reference import folding
from rollproof_reference.arena import Received
from rollproof_reference.folding import Folds, Product, fold
from rollproof_reference.kept import Folder, Kept

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HAS_GPU = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_GPU, reason="no GPU"))]


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor, terms: int) -> None:
    """One rounding of ``exact`` (float64) is allowed, and what adding so many terms in float32 loses."""
    info = torch.finfo(found.dtype)
    slack = 4 * terms * torch.finfo(torch.float32).eps * exact.abs().max()
    allowed = exact.abs() * (info.eps / 2) + slack + info.smallest_normal * info.eps
    assert bool(((found.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("device", DEVICES)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    columns=st.integers(1, 48),
    rank=st.integers(1, 9),
    alpha=st.sampled_from([1, 8, 16]),
    rslora=st.booleans(),
    dora=st.booleans(),
    in_place=st.booleans(),
    scratch=st.sampled_from([1, 100, 1 << 22]),
    data=st.data(),
)
def test_a_fold_is_what_peft_merges_rounded_once(
    device: str,
    dtype: torch.dtype,
    rows: list[int],
    columns: int,
    rank: int,
    alpha: int,
    rslora: bool,
    dora: bool,
    in_place: bool,
    scratch: int,
    data: st.DataObject,
):
    """In one slice of a packed weight, whose other slices stay as they are."""
    torch.manual_seed(data.draw(st.integers(0, 1 << 30)))
    chosen = data.draw(st.integers(0, len(rows) - 1))
    packed = torch.randn(sum(rows), columns).to(device, dtype)
    layer = torch.nn.Linear(columns, rows[chosen], bias=False, device=device).double()
    layer.weight.data.copy_(packed.split(rows)[chosen])
    config = LoraConfig(r=rank, lora_alpha=alpha, use_rslora=rslora, use_dora=dora, target_modules=["0"])
    model = get_peft_model(torch.nn.Sequential(layer), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter).to(dtype))
    adapted: Any = model.base_model.model[0]
    a, b = (half.default.weight.detach().to(dtype) for half in (adapted.lora_A, adapted.lora_B))
    m = adapted.lora_magnitude_vector.default.weight.detach().to(dtype) if dora else None
    scale = float(adapted.scaling["default"])
    exact = model.merge_and_unload(safe_merge=True)[0].weight.detach()

    found = packed.clone()
    into = found.split(rows)[chosen]
    usual, folding.SCRATCH = folding.SCRATCH, scratch
    try:
        fold(into, into if in_place else packed.split(rows)[chosen], a, b, scale, m)
    finally:
        folding.SCRATCH = usual
    assert_rounded_once(into, exact, rank + (columns if dora else 1))
    for index, (before, after) in enumerate(zip(packed.split(rows), found.split(rows), strict=True)):
        assert index == chosen or before.equal(after)


def products(
    memory: torch.Tensor, weights: dict[str, torch.Tensor], rank: int, dora: bool = False
) -> list[list[Product]]:
    """The same products in each half of ``memory``."""
    halves = []
    for half in memory:
        made, end = [], 0
        for name, weight in weights.items():
            height, width = weight.shape
            a = half[end : end + rank * width].view(rank, width)
            end += rank * width
            b = half[end : end + height * rank].view(height, rank)
            end += height * rank
            m = half[end : end + height] if dora else None
            end += -(-height // 8) * 8 if dora else 0
            made.append(Product(name, weight, a, b, m))
        halves.append(made)
    return halves


class Made:
    """A folder over some weights, and arenas on them."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu", host: bool = False) -> None:
        self.dtype, self.device = dtype, device
        packed = torch.randn(32 + 16 + 16, 48, device=device).to(dtype)
        embedding = torch.randn(40, 24, device=device).to(dtype)
        self.weights = dict(zip("qkv", packed.split([32, 16, 16]), strict=True)) | {"embed": embedding.t()}
        self.base = {name: weight.clone() for name, weight in self.weights.items()}
        self.folder = Folder(host=host)

    def open(self, key: str, names: str, rank: int = 8, dora: bool = False) -> torch.Tensor:
        chosen = {name: self.weights[name] for name in names.split()}
        size = sum(rank * sum(weight.shape) + 48 * dora for weight in chosen.values())
        memory = torch.zeros(2, size, dtype=self.dtype, device=self.device)
        folds = Folds(products(memory, chosen, rank, dora), memory)
        self.folder.open(key, Received(memory, torch.device(self.device)), folds)
        return memory

    def fold(self, key: str, half: int, memory: torch.Tensor, scale: float = 0.5) -> None:
        top = torch.linalg.vector_norm(memory[half], torch.inf).item()
        count = len(self.folder._arenas[key][1].weights)
        self.folder.fold(key, half, [scale] * count, top)

    def now(self) -> dict[str, torch.Tensor]:
        return {name: weight.clone() for name, weight in self.weights.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(one[name].equal(other[name]) for name in other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_thousand_folds_leave_nothing_behind(device: str, dtype: torch.dtype, host: bool):
    torch.manual_seed(0)
    made = Made(dtype, device, host)
    memory = made.open("all", "q k v embed")
    last = torch.randn_like(memory[0])
    memory[0].copy_(last)
    made.fold("all", 0, memory)
    once = made.now()
    assert not any(once[name].equal(made.base[name]) for name in once)
    made.folder.unfold()
    assert same(made.now(), made.base)
    for number in range(1000):
        memory[number % 2].copy_(torch.randn_like(memory[0]))
        made.fold("all", number % 2, memory, scale=0.1 + number % 7)
    memory[0].copy_(last)
    made.fold("all", 0, memory)
    assert same(made.now(), once)
    made.folder.unfold()
    assert same(made.now(), made.base)
    assert not made.folder.kept.names


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
def test_weights_that_the_next_adapter_is_not_on_are_put_back(host: bool):
    torch.manual_seed(0)
    made = Made(torch.bfloat16, host=host)
    made.open("all", "q k v").normal_()
    made.fold("all", 0, torch.ones(1, 1))
    memory = made.open("some", "k embed", rank=16)
    memory.normal_()
    made.fold("some", 1, memory)
    now = made.now()
    assert [name for name in now if now[name].equal(made.base[name])] == ["q", "v"]
    assert made.folder.kept.names == {"k", "embed"}
    fresh = torch.empty_like(now["k"])
    product = products(memory, {"k": made.weights["k"]}, 16)[1][0]
    fold(fresh, made.base["k"], product.a, product.b, 0.5)
    assert now["k"].equal(fresh)


@pytest.mark.parametrize(
    ("dtype", "top", "finite"),
    [(torch.float16, 200, False), (torch.bfloat16, 200, True), (torch.bfloat16, 1e19, False)],
)
def test_a_result_that_is_not_finite_is_refused_before_anything_is_written(
    dtype: torch.dtype, top: float, finite: bool
):
    made = Made(dtype)
    good = made.open("q", "q")
    good.fill_(0.1)
    made.fold("q", 0, good)
    before = made.now()
    bad = made.open("all", "q k v embed")
    bad.fill_(top)
    if finite:
        made.fold("all", 0, bad)
        return
    with pytest.raises(ValueError, match=f"folded into 'q' .* aren't finite in {dtype}"):
        made.fold("all", 0, bad)
    assert same(made.now(), before)
    made.fold("q", 1, good)
    assert same(made.now(), before)


def test_numbers_that_only_could_overflow_are_served():
    """A bound that is too rough: the largest of A meets none of B."""
    made = Made(torch.float16)
    memory = made.open("q", "q")
    product = products(memory, {"q": made.weights["q"]}, 8)[0][0]
    product.a[0, 0], product.b[0, 1] = 6e4, 6e4
    made.fold("q", 0, memory)
    assert same(made.now(), made.base)


def test_a_row_of_no_length_has_no_direction():
    """With DoRA, a row that came to nothing can't be brought to a length."""
    made = Made(torch.float32)
    made.weights["q"].zero_()
    memory = made.open("dora", "q", dora=True)
    with pytest.raises(ValueError, match="aren't finite"):
        made.fold("dora", 0, memory)
    assert not made.weights["q"].any()


def test_shapes_that_do_not_go_together_are_named():
    with pytest.raises(
        ValueError, match=r"'q' is \[4, 8\] in the engine: A \[2, 8\] and B \[5, 2\] don't go"
    ):
        Product("q", torch.zeros(4, 8), torch.zeros(2, 8), torch.zeros(5, 2))
    with pytest.raises(ValueError, match="'q' is torch.float32 in the engine, and A torch.float16"):
        Product("q", torch.zeros(4, 8), torch.zeros(2, 8).half(), torch.zeros(4, 2).half())


def test_copies_are_counted_before_they_are_made():
    kept = Kept(host=False)
    weights = {"q": torch.zeros(4, 8), "k": torch.zeros(2, 8, dtype=torch.bfloat16)}
    assert kept.cost(weights) == 4 * 8 * 4 + 2 * 8 * 2
    assert kept.room(weights) > 1 << 20
    kept.take({"q": weights["q"]})
    assert kept.cost(weights) == 2 * 8 * 2


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel as Triton's interpreter runs it, on the CPU."""
    pytest.importorskip("triton")
    if HAS_GPU:  # Triton's interpreter fails with NumPy 2.4
        pytest.skip("the compiled kernel is tested instead")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = importlib.util.spec_from_file_location(
        "interpreted_kernel", Path(folding.__file__).with_name("folding_kernel.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
    monkeypatch.setattr(folding, "kernels", lambda name: module)
    return module.fold_tiles


SHAPES = [(70, 136), (64, 128), (3, 8), (200, 264), (1, 1000), (17, 2112)]


def check_kernel(dtype: torch.dtype, device: str, rank: int, in_place: bool) -> None:
    """Tiles that end inside a weight, in both halves of an arena, with scales that change."""
    torch.manual_seed(0)
    # Rows between the weights show what is written beside them.
    whole = [torch.randn(height + 2, width, device=device).to(dtype) for height, width in SHAPES]
    before = [one.clone() for one in whole]
    weights = {str(index): one[1:-1] for index, one in enumerate(whole)}
    memory = torch.randn(2, sum(rank * (h + w) for h, w in SHAPES), device=device).to(dtype)
    halves = products(memory, weights, rank)
    sources = [one[1:-1] for one in before]
    table = folding._Table(halves[0], list(weights.values()) if in_place else sources, memory[0])
    for half, scales in ((0, [2.0, 0.3, -1.5, 0.7, 0.11, 1.3]), (1, [1.0] * 6), (0, [0.3] * 6)):
        if in_place:
            for weight, source in zip(weights.values(), sources, strict=True):
                weight.copy_(source)
        table(memory[half], scales)
        for product, of, scale in zip(halves[half], sources, scales, strict=True):
            exact = of.double() + scale * (product.b.double() @ product.a.double())
            assert_rounded_once(product.weight, exact, rank)
            plain = torch.empty_like(of)
            fold(plain, of, product.a, product.b, scale)
            assert (plain != product.weight).double().mean() < 0.01, "the two differ in more than ties"
    for one, other in zip(whole, before, strict=True):
        assert one[[0, -1]].equal(other[[0, -1]])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rank", [8, 24, 128])
def test_the_kernel_folds_as_addmm_does(interpreted: Any, rank: int, in_place: bool):
    """In float16: the interpreter multiplies no bfloat16."""
    check_kernel(torch.float16, "cpu", rank, in_place)


@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rank", [8, 16, 24, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_folds_as_addmm_does_on_a_gpu(dtype: torch.dtype, rank: int, in_place: bool):
    check_kernel(dtype, "cuda", rank, in_place)


@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
def test_a_gpu_takes_the_kernel_where_it_can():
    made = Made(torch.bfloat16, "cuda")
    made.open("some", "q k v embed")
    assert made.folder._arenas["some"][1]._fusible == [True, True, True, False]
    made.open("high", "q", rank=136)
    assert made.folder._arenas["high"][1]._fusible == [False]
    made.open("dora", "q", dora=True)
    assert made.folder._arenas["dora"][1]._fusible == [False]
