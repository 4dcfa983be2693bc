"""What takes the time: products, attention, and what stands between them, as this processor does them quickest.

Functions in LLVM's language (``compiled.py``, ``bfloat16.py``) and libraries' products. Each gives the bits of PyTorch
or, in bfloat16, is as close to the exact result; where there is none for a processor, a dtype or a size, PyTorch does
it.

* products: ``product.py`` chooses one for the dtype and the number of rows; ``packed.py`` is a weight in the order of
  ``mkl.py`` or ``onednn.py``, which ``stream.py`` reads (``panel_loops.py``; with AMX, ``block_loops.py`` for many
  rows); ``dots.py`` reads a plain one;
* attention: ``softmax.py``; sequences that decode: ``paged_attention.py`` (``paged_loops.py``); a prompt:
  ``tiled_attention.py`` (``tiled_layout.py``, ``tiled_loops.py``: ``tiled_products.py``, ``tiled_weights.py``);
* in one pass each: a norm and a rotation (``fused.py``), an MLP's gate (``gated.py``, with ``exponential.py``);
* all calls of a step again, without Python: ``graph.py``, with what stands between them in ``graph_operations.py``.
"""
