"""An adapter as it travels: PEFT reads what it writes, and its digest tells any change."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file

from conftest import MakeAdapter
from rollproof.oracle import Oracle, Sample
from rollproof.protocol import Adapter

SAMPLE = Sample(tuple(range(30)), tuple(range(40, 48)))


@torch.inference_mode()
def test_peft_reads_the_folder_as_the_oracle_reads_the_adapter(
    tmp_path: Path, base_oracle: Oracle, adapter: MakeAdapter
):
    mine = adapter(1, rank=4, rank_pattern={"q_proj": 7})
    folder = mine.save(tmp_path / "adapter")
    model = PeftModel.from_pretrained(copy.deepcopy(base_oracle._base), str(folder)).merge_and_unload()
    ids = torch.tensor([[*SAMPLE.prompt, *SAMPLE.tokens]])
    found = model(ids).logits[0].log_softmax(-1)[len(SAMPLE.prompt) - 1 : -1]
    base_oracle.add(mine)
    expected = base_oracle.score(1, [SAMPLE])[0].logprobs
    base_oracle.forget(1)
    torch.testing.assert_close(
        found.gather(-1, torch.tensor(SAMPLE.tokens)[:, None])[:, 0], expected, atol=2e-5, rtol=0
    )


def test_the_digest_tells_any_change(adapter: MakeAdapter):
    mine, again = adapter(1), adapter(1)
    assert mine.digest() == again.digest()
    assert adapter(1, seed=1).digest() != mine.digest()
    again.config.lora_alpha = 5
    assert again.digest() != mine.digest()
    name = next(iter(mine.tensors))
    before = mine.digest()
    mine.tensors[name].view(-1)[3] += 1  # the digest is of the tensors as they are now
    assert mine.digest() != before


def test_the_digest_is_that_of_what_was_saved(tmp_path: Path, adapter: MakeAdapter):
    mine = adapter(1, rank=4, rank_pattern={"q_proj": 7}, use_rslora=True)
    mine.save(tmp_path)
    file = tmp_path / "adapter_config.json"
    # As another version of PEFT, on another machine, would have written it.
    config = json.loads(file.read_text()) | {
        "peft_version": "0.17.0",
        "base_model_name_or_path": "/elsewhere",
    }
    file.write_text(json.dumps(config))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert Adapter(1, PeftConfig.from_pretrained(str(tmp_path)), tensors).digest() == mine.digest()
    config["use_rslora"] = False
    file.write_text(json.dumps(config))
    assert Adapter(1, PeftConfig.from_pretrained(str(tmp_path)), tensors).digest() != mine.digest()
