"""Options that several commands take, each with the same words."""

from typing import Annotated

import typer

MODEL = "smollm2-135m"  # where none is named
Model = Annotated[str, typer.Option(help="A name, a .gguf file, a model folder, or hub:org/name[@REVISION].")]
Dtype = Annotated[str, typer.Option(help="Of weights and uncompressed tokens: float32, bfloat16 or float16.")]
Temperature = Annotated[float, typer.Option(help="0: always the likeliest token.")]
TopK = Annotated[int, typer.Option(help="Draw from the k likeliest; 0: from all.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest that make up this probability.")]
MinP = Annotated[float, typer.Option(help="Leave out what is this many times less likely than the best.")]
Penalty = Annotated[float, typer.Option(help="Above 1: used tokens become less likely.")]
