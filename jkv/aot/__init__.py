"""Does it fit, and what does it cost: by compilers of machines that are not here."""
