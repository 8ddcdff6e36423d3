"""Train as sft.train does, with a fault planted in what saves: `FAULT=NAME torchrun ... train_and_break.py RECIPE ...`."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sft.checkpoint import final
from sft.launch import rank as train
from sft.program import run_main
from sft.train.trainer import RecipeTrainer

State = dict[str, torch.Tensor]


def rewrite(folder: Path, change: Callable[[State], object]) -> None:
    """Change the tensors of a folder."""
    for file in folder.glob("*.safetensors"):
        state = load_file(file)
        change(state)
        save_file(state, file, metadata={"format": "pt"})


def after_saving(change: Callable[[Any, Path], None]) -> None:
    """Have the trained weights saved, and then changed on the first rank."""
    save_weights = final.save_weights

    def save_and_change(live: Any, job: Any, target: Path) -> None:
        save_weights(live, job, target)
        if live.is_world_process_zero():
            change(live, target)

    final.save_weights = save_and_change


def zero3_without_gather() -> None:
    """What transformers writes where stage3_gather_16bit_weights_on_model_save is false."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    DeepSpeedEngine.zero_gather_16bit_weights_on_model_save = lambda engine: False


def zero3_empty_shards() -> None:
    """The state_dict of the model itself, of which each rank has a part elsewhere."""
    final.save_weights = lambda live, job, target: live.model.save_pretrained(
        target, state_dict={name: value.clone() for name, value in live.model.state_dict().items()}
    ) if live.is_world_process_zero() else None  # fmt: skip


def fsdp_own_share() -> None:
    """A rank's share of each weight."""
    final.full_state = lambda model, *_, **__: {
        name: value.to_local().clone() for name, value in model.named_parameters()
    }  # fmt: skip


def head_dropped() -> None:
    after_saving(lambda live, folder: rewrite(folder, lambda state: state.pop("lm_head.weight")))


def edit_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def tie_broken() -> None:
    """What peft's merge does to tied embeddings: a head of its own."""

    def untie(live: Any, folder: Path) -> None:
        rewrite(folder, lambda state: state.update({"lm_head.weight": state["model.embed_tokens.weight"].clone()}))
        edit_config(folder, tie_word_embeddings=False)

    after_saving(untie)


def adapter_not_saved() -> None:
    """The base alone."""
    from peft.tuners.tuners_utils import BaseTuner

    BaseTuner.merge_and_unload = lambda adapted, *_, **__: adapted.unload()


def adapter_scale_zero() -> None:
    def scale(live: Any, folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 0}))

    after_saving(scale)


def embeddings_not_resized() -> None:
    """The embedding of the base, under a tokenizer with more tokens."""

    def cut(live: Any, folder: Path) -> None:
        rows = 544
        rewrite(folder, lambda state: state.update({n: v[:rows].clone() for n, v in state.items() if "embed" in n}))
        edit_config(folder, vocab_size=rows)

    after_saving(cut)


def norm_rounded() -> None:
    def cast(state: State) -> None:
        state["model.norm.weight"] = state["model.norm.weight"].bfloat16()

    after_saving(lambda live, folder: rewrite(folder, cast))


def stale() -> None:
    """The weights of one step ago."""
    before: State = {}
    step = RecipeTrainer.training_step

    def remember(live: Any, *args: Any, **keywords: Any) -> Any:
        before.update({name: value.detach().clone() for name, value in live.model.named_parameters()})
        return step(live, *args, **keywords)

    RecipeTrainer.training_step = remember  # type: ignore[method-assign]
    after_saving(lambda live, folder: rewrite(folder, lambda state: state.update(before)))


def other_theta() -> None:
    """A config.json that is not the one in memory; the tensors are right."""
    after_saving(
        lambda live, folder: edit_config(
            folder, rope_theta=500.0, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
        )
    )


def other_rotation() -> None:
    """The live model computes with frequencies that no file holds."""

    def slow_down(live: Any, folder: Path) -> None:
        model = live.accelerator.unwrap_model(live.model)
        model.model.rotary_emb.inv_freq.mul_(0.3)

    after_saving(slow_down)


def no_stop_token() -> None:
    def remove(live: Any, folder: Path) -> None:
        file = folder / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 0}))

    after_saving(remove)


def no_chat_template() -> None:
    complete = final._complete

    def complete_without(job: Any, tokenizer: Any, folder: Path) -> None:
        complete(job, tokenizer, folder)
        (folder / "chat_template.jinja").unlink()

    final._complete = complete_without


if __name__ == "__main__":
    if fault := os.environ.get("FAULT"):
        globals()[fault]()
    run_main(train.main)
