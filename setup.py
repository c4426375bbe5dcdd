"""What a build needs beside pyproject.toml: the links of jkv/, which pip does not restore from a .zip."""

from pathlib import Path

from setuptools import setup

for name in ("models", "training"):
    link = Path(__file__).parent / "jkv" / name
    if not link.is_dir():  # a file with the address of the folder
        link.unlink()
        link.symlink_to(f"../{name}")

setup()
