"""Train as sft.train does, with faults in what saves: `save_faults.py RECIPE [key=value ...]`.

SPOIL={"2": "full", ...} spoils the saving of some steps' checkpoints:

full         less is free on the disk than the checkpoint takes, until the next save
terminated   the same, and SIGTERM comes
fills        the disk fills while the checkpoint is written, until the next save
rank-1       what rank 1 writes goes to a device that is always full
gone         the run's folder is removed
read-only    the checkpoints' folder takes no more writes
kill-...     this process is killed: while it writes, before the renaming, after it, while an old checkpoint is removed

WRONG=NAME makes what is saved another model than the one in memory: a function of the second half of this file.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystem

from sft.checkpoint import final
from sft.checkpoint import write as checkpoint_writer
from sft.launch import rank as train
from sft.program import run_main
from sft.train.trainer import RecipeTrainer

State = dict[str, torch.Tensor]
RANK = int(os.environ.get("RANK", "0"))


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill(folder: Path, leave: int) -> None:
    """Leave so many bytes on the disk."""
    if RANK == 0:
        with (folder.parent / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(folder).free - leave)


def to_full_device(part_of_name: str, write: Callable[..., Any]) -> Callable[..., Any]:
    """Have rank 1 write such files to a device that is always full."""

    def write_there(*args: Any, **keywords: Any) -> Any:
        if RANK == 1:
            args = tuple(
                Path("/dev/full") if isinstance(value, (str, Path)) and part_of_name in str(value) else value
                for value in args
            )
        return write(*args, **keywords)

    return write_there


def before_and_after(
    first: Callable[[], object], work: Callable[..., Any], then: Callable[..., Any]
) -> Callable[..., Any]:
    def both(*args: Any, **keywords: Any) -> None:
        first()
        work(*args, **keywords)
        then()

    return both


def half_removed(writer: Any) -> None:
    """The kill meets an old checkpoint that has lost its name and some of its files."""
    for hidden in writer.folder.glob(".incomplete/removed-*"):
        next(hidden.glob("*.safetensors")).unlink()
        die()


def nothing() -> None: ...


def replacements(how: str, folder: Path) -> list[tuple[Any, str, Any]]:
    """What is replaced while a step is saved: of what, its name, by what."""
    if how == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    if how in ("full", "terminated"):
        fill(folder, leave=4096 * 64)
    if how == "gone":
        shutil.rmtree(folder.parent)
    if how == "read-only":
        # The disk itself is in use by files that are open.
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
    writer, save = checkpoint_writer.CheckpointWriter, torch.save
    manifest = checkpoint_writer.write_manifest
    return {
        "fills": [(torch, "save", before_and_after(lambda: fill(folder, leave=4096), save, nothing))],
        "rank-1": [
            (torch, "save", to_full_device("rank_1", save)),
            (FileSystem, "create_stream", to_full_device(".distcp", FileSystem.create_stream)),
        ],
        "kill-writing": [(torch, "save", before_and_after(nothing, save, die))],
        "kill-before": [(checkpoint_writer, "write_manifest", before_and_after(nothing, manifest, die))],
        "kill-after": [(writer, "_put_away", die)],
        "kill-removing": [(writer, "_clear", half_removed)],
    }.get(how, [])


@contextmanager
def spoiled(how: str | None, folder: Path) -> Iterator[None]:
    """The saving of one step."""
    (folder.parent / "filler").unlink(missing_ok=True)
    with ExitStack() as stack:
        for owner, name, replacement in replacements(how, folder) if how else []:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def spoil_checkpoints(by_step: dict[str, str]) -> None:
    save = RecipeTrainer._save_checkpoint

    def save_spoiled(trainer: RecipeTrainer, *args: Any) -> None:
        with spoiled(by_step.get(str(trainer.state.global_step)), Path(trainer.args.output_dir)):
            save(trainer, *args)

    RecipeTrainer._save_checkpoint = save_spoiled  # type: ignore[method-assign]


def after_saving(change: Callable[[Any, Path], object]) -> None:
    """Have the trained weights saved, and then changed on rank 0."""
    save_weights = final.save_weights

    def save_and_change(live: Any, job: Any, target: Path) -> None:
        save_weights(live, job, target)
        if live.is_world_process_zero():
            change(live, target)

    final.save_weights = save_and_change


def tensors_changed(change: Callable[[State], object]) -> None:
    """Have the tensors of a saved folder changed."""

    def rewrite(_: Any, folder: Path) -> None:
        for file in folder.glob("*.safetensors"):
            state = load_file(file)
            change(state)
            save_file(state, file, metadata={"format": "pt"})

    after_saving(rewrite)


def edited(name: str, **values: object) -> None:
    """Have keys of a saved JSON file changed."""

    def edit(_: Any, folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))

    after_saving(edit)


def zero3_without_gather() -> None:
    """What transformers writes where stage3_gather_16bit_weights_on_model_save is false."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    DeepSpeedEngine.zero_gather_16bit_weights_on_model_save = lambda engine: False


def zero3_empty_shards() -> None:
    """The state_dict of the model itself, of which each rank has a part elsewhere."""

    def save(live: Any, job: Any, target: Path) -> None:
        if live.is_world_process_zero():
            state = {name: value.clone() for name, value in live.model.state_dict().items()}
            live.model.save_pretrained(target, state_dict=state)

    final.save_weights = save


def fsdp_own_shard() -> None:
    final.full_state = lambda model, *_, **__: {
        name: value.to_local().clone() for name, value in model.named_parameters()
    }


def head_dropped() -> None:
    tensors_changed(lambda state: state.pop("lm_head.weight"))


def adapter_not_saved() -> None:
    """The base alone."""
    from peft.tuners.tuners_utils import BaseTuner

    BaseTuner.merge_and_unload = lambda adapted, *_, **__: adapted.unload()


def adapter_scale_zero() -> None:
    edited("adapter_config.json", lora_alpha=0)


def adapter_bit() -> None:
    """The last bit of one element."""

    def flip(state: State) -> None:
        name = next(name for name in state if "lora_B" in name)
        state[name].view(-1).view(torch.int32)[0] ^= 1

    tensors_changed(flip)


def adapter_renamed() -> None:
    """Names that PEFT does not know: it loads the others, and says nothing."""

    def rename(state: State) -> None:
        for name in [name for name in state if "layers.1." in name]:
            state[name.replace("lora_B", "lora_b")] = state.pop(name)

    tensors_changed(rename)


def embeddings_not_resized() -> None:
    """The embedding of the base, under a tokenizer with more tokens."""
    rows = 544
    tensors_changed(lambda state: state.update({n: v[:rows].clone() for n, v in state.items() if "embed" in n}))
    edited("config.json", vocab_size=rows)


def stale() -> None:
    """The weights of one step ago."""
    before: State = {}
    step = RecipeTrainer.training_step

    def remember(live: Any, *args: Any, **keywords: Any) -> Any:
        before.update({name: value.detach().clone() for name, value in live.model.named_parameters()})
        return step(live, *args, **keywords)

    RecipeTrainer.training_step = remember  # type: ignore[method-assign]
    tensors_changed(lambda state: state.update(before))


def other_rotation() -> None:
    """The live model computes with frequencies that no file holds."""
    after_saving(lambda live, _: live.accelerator.unwrap_model(live.model).model.rotary_emb.inv_freq.mul_(0.3))


def no_stop_token() -> None:
    edited("generation_config.json", eos_token_id=0)


def no_chat_template() -> None:
    complete = final._complete

    def complete_without(job: Any, tokenizer: Any, folder: Path) -> None:
        complete(job, tokenizer, folder)
        (folder / "chat_template.jinja").unlink()

    final._complete = complete_without


if __name__ == "__main__":
    spoil_checkpoints(json.loads(os.environ.get("SPOIL", "{}")))
    if wrong := os.environ.get("WRONG"):
        globals()[wrong]()
    run_main(train.main)
