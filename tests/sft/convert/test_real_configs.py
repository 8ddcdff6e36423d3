"""The configs that the tools' own repositories ship."""

import pytest

from sft.convert.conversion import ConversionError, flatten
from sft.convert.main import convert, read_config, recipe_text
from sft.recipe.load import parse_recipe
from tests.conftest import SHARED

REFUSED = {
    "DPO": "dpo",
    "vision": "vision qwen3vl mistral-small-3.1-24B-lora",
    "pretraining": "pretrain",
    "prediction": "predict",
    "accelerate launch": "accelerate_",
}
FILES = sorted((SHARED / "configs").glob("*/*.y*ml"))


@pytest.mark.skipif(not FILES, reason="../shared/data/configs is not here")
def test_every_config_converts_or_is_refused_by_name() -> None:
    for file in FILES:
        why = next((why for why, parts in REFUSED.items() if any(part in file.name for part in parts.split())), None)
        if why is not None:
            with pytest.raises(ConversionError, match=why):
                convert(file, 8)
            continue
        c = convert(file, 8)
        accounted = [*c.carried, *c.changed, *c.dropped]
        assert set(flatten(read_config(file))) <= set(accounted), file.name
        assert len(accounted) == len(set(accounted)), file.name
        assert not [key for key, why in c.dropped.items() if "that this converter knows" in why], file.name
        recipe = parse_recipe(recipe_text(c, "sft convert"))
        assert recipe.train.global_batch_size
        assert recipe.sources[0].path
