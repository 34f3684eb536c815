"""Copies of many tensors at once give what a copy of each would give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollproof_reference.copying import Copies, Fill
from rollproof_reference.memory import Shared, local_device, mapped

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


@pytest.mark.parametrize("device", DEVICES)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 300)), max_size=5),
    step=st.sampled_from([1, 8]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_copies_are_exact(device: str, shapes: list[tuple[int, int]], step: int, dtype: torch.dtype):
    """With sizes that the kernel takes (a multiple of 8 elements) and such that it doesn't."""
    pairs = []
    for rows, columns in shapes:
        of = torch.randn(rows, columns * step, device=device).to(dtype)
        pairs.append((torch.zeros_like(of), of))
    copy = Copies(pairs)
    copy()
    for _, of in pairs:
        of.add_(1)
    copy()
    assert all(to.equal(of) for to, of in pairs)


@pytest.mark.parametrize("device", DEVICES)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 300)), min_size=1, max_size=5),
    step=st.sampled_from([1, 8]),
    of=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    to=st.sampled_from([torch.bfloat16, torch.float32]),
    wider=st.integers(0, 3),
    scale=st.sampled_from([1.0, 2.0, 0.3]),
)
def test_filling_casts_and_then_scales(
    device: str,
    shapes: list[tuple[int, int]],
    step: int,
    of: torch.dtype,
    to: torch.dtype,
    wider: int,
    scale: float,
):
    """Also into the first columns of wider tensors, of which the rest stays as it is."""
    shapes = [(rows, columns * step) for rows, columns in shapes]
    whole = [torch.full((rows, columns + wider), 7, dtype=to, device=device) for rows, columns in shapes]
    scales = [scale**index for index in range(len(shapes))]
    infinite = torch.ones(1, dtype=torch.int32, device=device)
    fill = Fill([one[:, : one.shape[1] - wider] for one in whole], scales, infinite)
    for _ in range(2):
        sources = [torch.randn(shape, device=device).to(of).requires_grad_() for shape in shapes]
        fill(sources)
        assert not infinite.item()
        for one, source, factor in zip(whole, sources, scales, strict=True):
            columns = source.shape[1]
            torch.testing.assert_close(one[:, :columns], source.detach().to(to) * factor, rtol=0, atol=0)
            assert bool((one[:, columns:] == 7).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_filling_tells_what_is_not_finite(device: str, bad: float):
    into = [torch.zeros(16, 64, dtype=torch.float16, device=device) for _ in range(2)]
    infinite = torch.zeros(1, dtype=torch.int32, device=device)
    fill = Fill(into, [1.0, 2.0], infinite)
    right, wrong = torch.ones(16, 64, device=device), torch.ones(16, 64, device=device)
    wrong[15, 63] = bad
    for sources, expected in (([right, right], 0), ([right, wrong], 1), ([right, right], 0)):
        fill(sources)
        assert infinite.item() == expected


def test_a_sum_that_overflows_is_no_fault():
    into = [torch.zeros(4, 8, dtype=torch.float32)]
    infinite = torch.ones(1, dtype=torch.int32)
    Fill(into, [1.0], infinite)([torch.full((4, 8), 3e38)])
    assert not infinite.item()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_takes_the_kernel_and_writes_nothing_else():
    memory = torch.zeros(3, 8192, dtype=torch.bfloat16, device="cuda")
    copy = Copies([(memory[1, :4104], torch.ones(4104, dtype=torch.bfloat16, device="cuda"))])
    assert copy._table is not None
    copy()
    assert memory.sum() == memory[1, :4104].sum() == 4104


@pytest.mark.parametrize("other", [torch.zeros(3, 4), torch.zeros(4, 3, dtype=torch.bfloat16)])
def test_tensors_that_do_not_fit_are_named(other: torch.Tensor):
    with pytest.raises(ValueError, match="can't be copied into"):
        Copies([(torch.zeros(4, 3), other)])


def test_a_file_is_mapped_once_more_and_leaves_no_name(tmp_path: Path):
    shared = Shared.on_host((2, 5), torch.float32, tmp_path)
    assert not shared.tensor.any()
    mapped(shared.handle)[1].fill_(7)
    shared.forget_file()
    assert not list(tmp_path.iterdir())
    assert shared.tensor.tolist() == [[0] * 5, [7] * 5]


def test_no_gpu_has_a_made_up_uuid():
    assert local_device("") is None
    assert local_device("no such") is None
