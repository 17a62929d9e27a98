"""Our own readings of drafting rules that others publish, behind the `Drafter` protocol.

They are replayed on the same recordings at the same budget of nodes as our own drafter. They are
readings of rules and not the programs of their authors: what a draft costs in microseconds is what
our reading of it costs. Each module says where its rule stands, and where ours is kinder to it.
"""
