"""Checkpoints: folders of safetensors and one JSON manifest, written while training goes on, read into any split.

::

    ckpt/step-1200/part-0.safetensors     written by whoever holds the tensors; keys "<full name>@<offset,…>"
                   part-1.safetensors
                   manifest.json          written last: for each name its shape, dtype and chunks; SHA-256 of each file

Nothing is pickled, and nothing is executed on load.
"""
