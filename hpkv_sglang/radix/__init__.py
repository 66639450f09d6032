"""SGLang's radix tree, extended with the tiers. Only here and in `plugin` is sglang imported.

install    which functions of SGLang are hooked, and why
hooked     what this process has hooked, and whether all of it took
cache      the tree: eviction spills, waiting requests are skipped, failed loads recomputed
wrapper    what the tree asks of the tiers, for one request at a time
linker     what the tiers are made of on this rank: pool, layout, engine, namespace
lookup     page hashes of a request, computed once
waiting    requests that wait for a verification, agreed between ranks
loads      loads in flight and the per-layer counter the attention waits on
fence      nothing writes a freed slot while a spill may still publish what it reads there
recompute  a request whose load failed is computed again instead of answered with an error
keys       the extra key of a request, framed
weights    weight updates and memory release close the tiers until the tree is reset
"""
