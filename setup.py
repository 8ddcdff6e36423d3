"""Puts recipes/ and ds_configs/ into the wheel, as sft/shipped/, where sft/recipe/schema.py finds them. All else is in pyproject.toml."""

from setuptools import find_packages, setup

SHIPPED = {f"sft.shipped.{folder}": folder for folder in ("recipes", "ds_configs")}

setup(packages=[*find_packages(include=["sft*", "eval*"]), *SHIPPED], package_dir=SHIPPED)
