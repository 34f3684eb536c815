"""FAIL: an update that can't be served is refused whole, out loud, and the old version serves on."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..outcome import FailureError, about
from ..protocol import Adapter
from ..session import Session
from ..subject import told as one_line

Tensors = dict[str, torch.Tensor]


def _nan(tensors: Tensors, name: str) -> str:
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    return "NaN in one tensor"


def _infinite(tensors: Tensors, name: str) -> str:
    tensors[name] = torch.full_like(tensors[name], torch.inf)
    return "infinity in one tensor"


def _shape(tensors: Tensors, name: str) -> str:
    tensors[name] = tensors[name][:, :-1].contiguous()
    return "a tensor one column too narrow"


def _half(tensors: Tensors, name: str) -> str:
    del tensors[name]
    return "a lora_A without its lora_B"


def _module(tensors: Tensors, name: str) -> str:
    for half in (name, name.replace(".lora_B.", ".lora_A.")):
        del tensors[half]
    return "one targeted module without tensors"


def _prefix(tensors: Tensors, name: str) -> str:
    for old in list(tensors):
        tensors[old.replace("base_model.model.", "module.")] = tensors.pop(old)
    return "a wrapper's prefix on every name"


def _other_base(tensors: Tensors, name: str) -> str:
    for old in list(tensors):
        tensors[old.replace(".layers.", ".blocks.")] = tensors.pop(old)
    return "the module names of another model"


def _deeper_base(tensors: Tensors, name: str) -> str:
    tensors[name.replace(".0.", ".999.", 1)] = tensors[name].clone()
    half = name.replace(".lora_B.", ".lora_A.")
    tensors[half.replace(".0.", ".999.", 1)] = tensors[half].clone()
    return "a layer that the model doesn't have"


def _empty(tensors: Tensors, name: str) -> str:
    tensors.clear()
    return "no tensors"


Break = Callable[[Tensors, str], str]
BROKEN: tuple[Break, ...] = (
    *(_nan, _infinite, _shape, _half, _module, _prefix, _other_base, _deeper_base, _empty),
)


async def broken_tensors(session: Session) -> str:
    """Each way to break an adapter's tensors, one at a time."""
    await session.update()
    for break_it in BROKEN:
        adapter, how, _ = _broken(session.adapter(), break_it)
        if await session.offer(adapter) is None:
            raise _accepted(how)
        with about(f"after an adapter with {how} was refused"):
            told = await session.claim(True)
    await session.update()
    after = await session.claim(True)
    return (
        f"{len(BROKEN)} broken adapters refused, the old version serving ({told}); a good one after: {after}"
    )


async def names_the_fault(session: Session) -> str:
    """The refusals of single broken tensors name the tensor's module."""
    await session.update()
    for break_it in (_nan, _shape, _half):
        adapter, how, module = _broken(session.adapter(), break_it)
        error = await session.offer(adapter)
        if error is None:
            raise _accepted(how)
        if module not in str(error):
            raise FailureError(f"{how} in {module!r} was refused without naming it: {one_line(error)}")
    return "a NaN, a wrong shape and a missing half are refused by name"


def _broken(good: Adapter, break_it: Break) -> tuple[Adapter, str, str]:
    tensors = dict(good.tensors)
    name = next(name for name in tensors if name.endswith(".lora_B.weight"))
    how = break_it(tensors, name)
    module = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
    return Adapter(good.version, copy.deepcopy(good.config), tensors), how, module


def _accepted(how: str) -> FailureError:
    # What serves now is anybody's guess, so the clauses after this one get a fresh rollout.
    return FailureError(
        f"update_adapter reported success for an adapter with {how}: it has to raise, and the old "
        "version has to serve on",
        fatal=True,
    )


async def unsupported(session: Session) -> str:
    """PEFT features beyond plain A and B: refused whole, or served exactly."""
    told = []
    features: dict[str, dict[str, object]] = {
        "DoRA": {"use_dora": True},
        "modules_to_save": {"modules_to_save": [session.oracle.output_layer]},
    }
    if biased := session.oracle.biased_leaves():  # PEFT merges a LoRA bias only into a layer's own
        features["a LoRA bias"] = {"lora_bias": True, "target_modules": biased}
    await session.update()
    for name, options in features.items():
        adapter = session.peft_adapter(**options)
        with about(f"an adapter with {name}"):
            error = await session.push(adapter)
            seen = await session.claim(True)
        told.append(f"{name} {'served' if error is None else f'refused ({one_line(error)})'}: {seen}")
    return "; ".join(told)


Damage = Callable[[Path], None]
_TENSORS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"


def _full_disk(folder: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(folder))


def _no_tensors(folder: Path) -> None:
    (folder / _TENSORS).unlink()


def _cut_tensors(folder: Path) -> None:
    _cut(folder / _TENSORS)


def _pickle(folder: Path) -> None:
    from safetensors.torch import load_file

    torch.save(load_file(folder / _TENSORS), folder / "adapter_model.bin")
    (folder / _TENSORS).unlink()


def _cut_config(folder: Path) -> None:
    _cut(folder / _CONFIG)


def _no_config(folder: Path) -> None:
    (folder / _CONFIG).unlink()


def _cut(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])


DAMAGES: dict[str, Damage] = {
    "raises for a full disk": _full_disk,
    "leaves the tensors out": _no_tensors,
    "writes half of the tensors": _cut_tensors,
    "writes a pickle in place of the tensors": _pickle,
    "writes half of the config": _cut_config,
    "leaves the config out": _no_config,
}


@dataclass(frozen=True)
class Damaged(Adapter):
    """An adapter that is whole, while the folder it saves is not."""

    damage: Damage = _no_tensors

    def save(self, folder: str | Path) -> Path:
        """Write the folder, and damage it."""
        path = super().save(folder)
        self.damage(path)
        return path


async def damaged_folders(session: Session) -> str:
    """Each damage once: the rollout may not have used the folder at all, and then has to serve."""
    await session.update()
    served, refused = list[str](), list[str]()
    for how, damage in DAMAGES.items():
        good = session.adapter()
        adapter = Damaged(good.version, good.config, good.tensors, damage)
        with about(f"an adapter whose save {how}"):
            error = await session.push(adapter)
            # The history knows whether the update was refused, and so which version has to answer.
            told = await session.claim(True)
        (served if error is None else refused).append(how if error is None else f"{how} ({one_line(error)})")
    await session.update()
    after = await session.claim(True)
    return "; ".join(
        [
            f"{len(served)} of {len(DAMAGES)} served without the folder",
            *(f"refused: {how}" for how in refused),
            f"last: {told}",
            f"a whole one after: {after}",
        ]
    )
