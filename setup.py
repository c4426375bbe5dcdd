"""The packages: all that are in the folders, so that none is forgotten; everything else is in pyproject.toml."""

import warnings

from setuptools import find_namespace_packages, setup

FOLDERS = {"jkv": "jkv", "jkv.models": "models", "jkv.training": "training"}
DATA = ("*__pycache__", "methods.weights.*")  # folders that are no packages

# That a folder named jkv goes before an installed one: of an editable installation it is the same.
warnings.filterwarnings("ignore", "Editable installation")

setup(
    package_dir=FOLDERS,
    packages=[*FOLDERS]
    + [f"{top}.{name}" for top, folder in FOLDERS.items() for name in find_namespace_packages(folder, exclude=DATA)],
)
