"""Our own readings of drafting rules that others publish, behind the `Drafter` protocol.

`registry.py` lists all contenders. Rules that draft from texts alone are replayed on recordings,
too, at the same budget of nodes (`drafting_rules.py`). They are readings of rules and not the
programs of their authors: what a draft costs in microseconds is what our reading of it costs. Each
module says where its rule stands, and where ours is kinder to it. Nodes of rules that give no
probabilities bear 1.
"""
